"""Writing a program's decisions into a lock file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from ..config.call_log import CallsMade, calls_made
from ..config.selection import ConfigSelectorChain
from ..core import cfg as cfgs
from ..core.description import described, described_in
from ..core.device import environment
from ..core.errors import SettingError
from ..core.key import Key
from ..execution.executor import Executor
from ..registry import recorded_calls
from ..store.lock_file import LockFile, write_lock
from ..store.store import StoredEntry, as_store
from .results import AutotuningResult, Entry
from .user_function import trace

LockedEntries = dict[Key, StoredEntry]
FreezeSource = CallsMade | AutotuningResult | ConfigSelectorChain[Any, Any] | Executor[Any, Any] | Callable[..., Any]


def freeze(path: str | os.PathLike[str], source: FreezeSource, /, *args: Any, **kwargs: Any) -> LockFile:
    """Writes what a source decided to a lock file, for review and for `locked`; the same decisions, the same text.

    A function is traced with the arguments, never run: the calls in it are what is frozen. `calls_made()` gives those
    of a block, a result its own, and a selector, or an executor with one, all that its memory and store hold.
    """
    entries = _entries(source, args, kwargs)
    if not entries:
        raise SettingError(
            f"nothing to freeze into {os.fspath(path)}: {_name(source)} made no call that a selector answered; "
            "a call with its own cfg= needs no lock"
        )
    return write_lock(path, entries)


def _entries(source: FreezeSource, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LockedEntries:
    if isinstance(source, Executor):
        return _entries(cast(FreezeSource, source.chooser), args, kwargs)
    if callable(source):
        return _traced(source, args, kwargs)
    if args or kwargs:
        raise SettingError(f"arguments are for a function that is traced, and {_name(source)} is none")
    if isinstance(source, CallsMade):
        return source.entries
    if isinstance(source, AutotuningResult):
        return _result(source)
    if isinstance(source, ConfigSelectorChain):
        return _selector(source)
    raise SettingError(
        f"{_name(source)} cannot be frozen; give a function and its arguments, the calls of calls_made(), "
        "an AutotuningResult, or a ConfigSelectorChain"
    )


def _traced(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LockedEntries:
    # Twice: the first trace may tune, and measuring a candidate may ask for kernels inside it that the program has not.
    for _ in range(2):
        with calls_made() as calls:
            trace(function, args, kwargs)
    return calls.entries


def _result(result: AutotuningResult) -> LockedEntries:
    found = result.by_key()
    calls = {key: described(inv) for device in {key.device for key in found} for key, _, inv in recorded_calls(device)}
    return {key: _tuned(key, entry, calls.get(key, {})) for key, entry in found.items()}


def _tuned(key: Key, entry: Entry, call: Mapping[str, str]) -> StoredEntry:
    record = entry.record if entry.is_measured else None
    if record is None:
        return StoredEntry(entry.cfg, environment(key.device), "guess" if entry.is_guess else "hand", call=call)
    # Tuned elsewhere, perhaps: the record knows where.
    where = record.environment or environment(key.device)
    return StoredEntry(entry.cfg, where, "autotune", record.objective, call=call or described_in(record))


def _selector(selector: ConfigSelectorChain[Any, Any]) -> LockedEntries:
    entries: LockedEntries = {}
    store = None if selector.persistent is None else as_store(selector.persistent)
    for key in map(Key._make, store.keys() if store is not None else ()):
        found = store.lookup(key) if store is not None else None
        if found is not None:
            entries[key] = _timeless(found)
    for key, (cfg, objective, call) in selector.cache.entries():
        kept = entries.get(key)
        if kept is None or not cfgs.same_kept(kept.cfg, cfg):
            tuned = objective is not None
            entries[key] = StoredEntry(
                cfg, environment(key.device), "autotune" if tuned else "hand", objective, call=call
            )
    return entries


def _timeless(entry: StoredEntry) -> StoredEntry:
    # Tuned again with the same outcome, the file must not change.
    return StoredEntry(entry.cfg, entry.environment, entry.source, entry.objective, call=entry.call)


def _name(source: Any) -> str:
    return getattr(source, "__qualname__", None) or f"a {type(source).__qualname__}"
