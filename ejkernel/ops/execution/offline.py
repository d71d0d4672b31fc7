"""Tuning outside the program: what the registry saw, or what a lowered program holds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..core.device import device_fingerprint
from ..core.errors import SettingError
from ..core.invocation import Invocation
from ..core.key import Key
from ..registry import recorded_calls
from ..tuning.tuner import Tuner
from .labels import find_labels_in_lowered, parse_label
from .results import AutotuningResult, Entry

Recorded = tuple[Key, Any, Invocation[Any, Any]]


def benchmark(fn: Callable[..., Any], *args: Any, warmup: int = 1, iters: int = 5, **kwargs: Any) -> float:
    """Median seconds of a call."""
    return Tuner[Any](warmup, iters).measure(fn, *args, **kwargs)


def autotune_recorded(selector: Any, *, show_progress: bool = False, repetition_count: int = 1) -> AutotuningResult:
    """Tunes every call that the registry saw on this device; of several repetitions the fastest winner stays."""
    device = device_fingerprint()
    return _tune_all(selector, device, recorded_calls(device), show_progress, repetition_count)


def autotune_lowered(selector: Any, lowered: Any) -> AutotuningResult:
    """Tunes the labelled calls of a lowered program, as far as the registry saw them."""
    device = device_fingerprint()
    wanted = {parse_label(name) for name in find_labels_in_lowered(lowered)}
    calls = [call for call in recorded_calls(device) if (call[0].op_id, call[0].call_key) in wanted]
    return _tune_all(selector, device, calls, show_progress=False, repetitions=1)


def _tune_all(
    selector: Any, device: str, calls: Sequence[Recorded], show_progress: bool, repetitions: int
) -> AutotuningResult:
    if not isinstance(repetitions, int) or repetitions < 1:
        raise SettingError(f"repetition_count={repetitions!r} is not a whole number of at least 1")
    entries = []
    for number, (key, kernel, inv) in enumerate(calls, 1):
        if show_progress:
            print(f"tuning {number} of {len(calls)}: {key.op_id} {key.call_key}", file=sys.stderr)
        decision = selector.tune(inv, kernel, repetitions)
        if decision.tier != "autotune":
            if show_progress:
                print(f"  not tuned: {dict(decision.misses).get('autotune', '')}", file=sys.stderr)
            # In an overlay a guess would stand before what is known already.
            decision = selector.decide(inv, kernel)
        entries.append(Entry(key.op_id, key.call_key, decision.cfg))
    return AutotuningResult(device, tuple(entries))
