"""What a selector would answer, and what it knows about that: asked without tuning, telling or keeping anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..core import codec
from ..core.candidates import Offer
from ..core.cfg import distinct
from ..core.description import Known, Near, nearest
from ..core.errors import ConfigTypeError, RetuneError
from ..core.invocation import Invocation
from ..core.kernel import Kernel
from ..core.key import Key
from ..core.record import Record
from ..core.request import Hit, Request, ask
from ..store.layered import LayeredStore
from ..store.store import KeepsRecords, Store, StoredEntry
from .cache import overlay_in_force
from .consensus import agreed
from .selection import ConfigSelectorChain, objective_of
from .tiers import AutotuneTier, MemoryTier, StoreTier, Tier


@dataclass(frozen=True)
class Preview:
    """The answer to come: of which tier, why the earlier ones have none, and what is known about it."""

    request: Request
    tier: str
    # None where it would have to be tuned first, or where nothing answers.
    hit: Hit | None
    misses: tuple[tuple[str, str], ...]
    # How many candidates a tuning would measure.
    candidates: int | None = None


def preview(selector: ConfigSelectorChain[Any, Any], inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Preview:
    """What `decide` would do for this call now."""
    policy = selector.policy
    request = ask(inv, kernel, objective_of(policy))
    misses: list[tuple[str, str]] = []
    for tier in map(_looking_only, selector._tiers(policy)):
        # Behind `cfg=` and overlays, and before everything that this process knows by itself.
        shared = agreed(request, selector._settings) if isinstance(tier, MemoryTier) else None
        if shared is not None:
            tiers = {"agreed": "memory"}
            return Preview(request, tiers.get(shared.source, shared.source), shared, tuple(misses))
        answer = tier.field(request, _say_nothing) if isinstance(tier, AutotuneTier) else tier.find(request)
        if isinstance(answer, Offer):
            return _planned(selector, request, answer.cfgs, tuple(misses))
        if isinstance(answer, Hit):
            return Preview(request, answer.source, answer, tuple(misses))
        if answer.seeds is not None:
            request = replace(request, seeds=(*request.seeds, *answer.seeds) if answer.seeds else ())
        if answer.reason:
            misses.append((tier.name, answer.reason))
    return Preview(request, "error", None, tuple(misses))


def _planned(
    selector: ConfigSelectorChain[Any, Any], request: Request, cfgs: list[Any], misses: tuple[tuple[str, str], ...]
) -> Preview:
    try:
        selector._refuse_a_second_time(request)
    except RetuneError as error:
        return Preview(request, "error", None, (*misses, ("autotune", str(error))))
    count = len(distinct([*cfgs, *(seed.cfg for seed in request.seeds)]))
    return Preview(request, "autotune", None, misses, count)


def _say_nothing(what: tuple[str, str], message: str) -> None:
    """In place of a warning."""


def _looking_only(tier: Tier) -> Tier:
    return StoreTier(_unpromoting(tier.store)) if isinstance(tier, StoreTier) else tier


def _unpromoting(store: Store) -> Store:
    # A layered store brings what it finds below to the top; looking must not.
    return LayeredStore(*store.layers, promote=False) if isinstance(store, LayeredStore) else store


def places(selector: ConfigSelectorChain[Any, Any]) -> Iterator[Store]:
    """The selector's own store, then the packs."""
    return map(_unpromoting, selector._places())


def entry_behind(selector: ConfigSelectorChain[Any, Any], key: Key, cfg: Any) -> tuple[StoredEntry, str] | None:
    """The stored entry with this cfg and where it lies; None where no store or pack has it."""
    for store in places(selector):
        entry = store.lookup(key)
        if entry is not None and same_cfg(entry.cfg, cfg):
            return entry, str(store)
    return None


def record_behind(selector: ConfigSelectorChain[Any, Any], key: Key, cfg: Any) -> Record | None:
    """The record of the tuning that gave this cfg, where it was kept."""
    record = selector._records.get(key)
    if record is None and isinstance(selector.persistent, KeepsRecords):
        record = selector.persistent.record(*key)
    return record if record is not None and same_cfg(record.cfg, cfg) else None


def near_misses(selector: ConfigSelectorChain[Any, Any], request: Request) -> tuple[Near, ...]:
    """The nearest other calls that have a cfg, wherever this call would be looked for."""
    return nearest(request.key, request.call, _known(selector, request.key.op_id.partition("@v")[0]))


def _known(selector: ConfigSelectorChain[Any, Any], op: str) -> Iterator[Known]:
    yield from (Known(key, {}, "the overlays in force") for key in overlay_in_force())
    if selector.lock is not None:
        yield from selector.lock.known()
        return
    stored: set[Key] = set()
    for store in places(selector):
        for key in map(Key._make, store.keys()):
            # Reading every entry of a large store would take a while; only this operation's can be near.
            entry = store.lookup(key) if key.op_id.partition("@v")[0] == op else None
            if entry is not None:
                stored.add(key)
                yield Known(key, entry.call, str(store))
    yield from (Known(key, call, "memory") for key, _, call in selector.cache._known() if key not in stored)


def same_cfg(one: Any, other: Any) -> bool:
    """Are these one cfg, as a file would hold it?"""
    try:
        return bool(codec.encode(one) == codec.encode(other))
    # A cfg without JSON: then as Python prints it.
    except ConfigTypeError:
        return repr(one) == repr(other)
