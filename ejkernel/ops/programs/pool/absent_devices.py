"""Calls of devices that this process has not: entries are read and kept by their keys, with cfgs as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.record import Record
from ...store.store import Store, as_store
from ..found_call import FoundCall
from ..results import AutotuningResult, Entry


def known_entry(call: FoundCall) -> Entry | None:
    """The tuned entry of a call in its selector's store; None where there is none."""
    persistent = call.selectors[0].persistent
    store: Store | None = None if persistent is None else as_store(persistent)
    kept = None if store is None else store.lookup(call.key)
    if kept is None or kept.source != "autotune":
        return None
    return _entry(call, kept.cfg, source="persistent")


def kept_entry(call: FoundCall, data: Mapping[str, Any]) -> Entry:
    """The entry of a record that a worker sent, put into the stores of the call's selectors."""
    record = Record.from_json(data)
    entry = _entry(call, record.cfg, record=record, source="autotune")
    result = AutotuningResult(call.key.device, (entry,))
    for selector in call.selectors:
        if selector.persistent is not None and selector.persist_autotune:
            result.save(selector.persistent)
    return entry


def _entry(call: FoundCall, cfg: Any, **about: Any) -> Entry:
    key = call.key
    return Entry(key.op_id, key.call_key, cfg, count=call.count, device=key.device, is_plain=True, **about)
