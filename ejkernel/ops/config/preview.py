"""Facts behind an answer of a selector: its entry, its record, and the nearest calls that are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..core import cfg as cfgs
from ..core.description import KnownCall, Near, nearest
from ..core.key import Key
from ..core.record import Record
from ..core.request import Request
from ..store.store import StoredEntry, peek
from .cache import overlay_in_force
from .selection import ConfigSelectorChain


def entry_behind(selector: ConfigSelectorChain[Any, Any], key: Key, cfg: Any) -> tuple[StoredEntry, str] | None:
    """The stored entry with this cfg and where it lies; None where no store or pack has it."""
    for store in selector.stores():
        entry = peek(store, key)
        if entry is not None and cfgs.same_kept(entry.cfg, cfg):
            return entry, str(store)
    return None


def record_behind(selector: ConfigSelectorChain[Any, Any], key: Key, cfg: Any) -> Record | None:
    """The record of the tuning that gave this cfg, where it was kept."""
    record = selector.record_of(key)
    return record if record is not None and cfgs.same_kept(record.cfg, cfg) else None


def near_misses(selector: ConfigSelectorChain[Any, Any], request: Request) -> tuple[Near, ...]:
    """The nearest other calls that have a cfg, wherever this call would be looked for."""
    return nearest(request.key, request.call, _known(selector, request.key.op_id.partition("@v")[0]))


def _known(selector: ConfigSelectorChain[Any, Any], op: str) -> Iterator[KnownCall]:
    yield from (KnownCall(key, {}, "the overlays in force") for key in overlay_in_force())
    lock_file = selector.lock_file
    if lock_file is not None:
        yield from lock_file.known()
        return
    stored: set[Key] = set()
    for store in selector.stores():
        for key in map(Key._make, store.keys()):
            # Reading every entry of a large store would take a while; only this operation's can be near.
            entry = peek(store, key) if key.op_id.partition("@v")[0] == op else None
            if entry is not None:
                stored.add(key)
                yield KnownCall(key, entry.call, str(store))
    yield from (KnownCall(key, entry.call, "memory") for key, entry in selector.cache.entries() if key not in stored)
