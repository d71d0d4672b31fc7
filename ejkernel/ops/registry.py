"""The calls seen so far, by device, operation and call key; offline tuning starts from them."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .core.key import Key

if TYPE_CHECKING:
    from .core.invocation import Invocation
    from .core.trace_context import TraceContext

RecordedCall = tuple[Any, tuple[Any, ...], dict[str, Any]]

_calls: dict[str, dict[str, dict[str, RecordedCall]]] = {}
# Whole invocations, as the executor saw them: a batch or a mesh around a call is part of its key.
_seen: dict[Key, tuple[Any, Invocation[Any, Any], TraceContext | None]] = {}
_lock = threading.Lock()


def record_invocation(
    dev: str, op_id_v: str, call_key: str, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Remembers one call; the newest of equal keys stays."""
    call = (kernel, tuple(copied(a) for a in args), {name: copied(v) for name, v in kwargs.items()})
    with _lock:
        _calls.setdefault(dev, {}).setdefault(op_id_v, {})[call_key] = call


def record_call(key: Key, kernel: Any, inv: Invocation[Any, Any], trace_context: TraceContext | None = None) -> None:
    """Remembers a call as the executor makes it, with the settings around it."""
    record_invocation(*key, kernel, inv.args, inv.kwargs)
    with _lock:
        _seen[key] = (kernel, inv, trace_context)


def trace_context_of(key: Key) -> TraceContext | None:
    """The settings around a recorded call; None where the executor did not see it."""
    found = _seen.get(key)
    return None if found is None else found[2]


def recorded_calls(dev: str) -> list[tuple[Key, Any, Invocation[Any, Any]]]:
    """Every recorded call of a device as an invocation that has its key again."""
    with _lock:
        seen = dict(_seen)
    # The registry itself needs no JAX, and a command line may list it.
    from .core.invocation import Invocation

    calls = []
    for op_id, recorded in get_invocations(dev).items():
        for call_key, (kernel, args, kwargs) in recorded.items():
            key = Key(dev, op_id, call_key)
            found = seen.get(key)
            calls.append((key, kernel, found[1] if found else Invocation(kernel.op_id, args, kwargs)))
    return calls


def get_invocations(dev: str) -> dict[str, dict[str, RecordedCall]]:
    """A copy of what was recorded for a device: `{op: {call_key: (kernel, args, kwargs)}}`."""
    with _lock:
        kept = {op: dict(calls) for op, calls in _calls.get(dev, {}).items()}
    return {
        op: {
            call_key: (kernel, tuple(copied(a) for a in args), {name: copied(v) for name, v in kwargs.items()})
            for call_key, (kernel, args, kwargs) in calls.items()
        }
        for op, calls in kept.items()
    }


def forget_invocations() -> None:
    """Empties the registry."""
    with _lock:
        _calls.clear()
        _seen.clear()


def copied(value: Any) -> Any:
    """Copies plain containers at any depth; arrays, kernels and everything else stay as they are."""
    if type(value) in (dict, OrderedDict, defaultdict):
        same = copy.copy(value)
        same.update({key: copied(v) for key, v in value.items()})
        return same
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    if type(value) in (list, tuple, set, deque):
        return type(value)(copied(v) for v in value)
    return value
