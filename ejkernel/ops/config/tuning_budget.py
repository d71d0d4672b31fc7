"""The budget of tunings: seconds that this process has spent, and the default of those that calls begin by themselves.

A minute a call and ten a process, said when they are used up; a setting, or a tuner of the user's own, knows better.
No JAX here.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

from ..core.key import Key
from ..core.record import Record
from ..settings import Settings

# A first call that takes longer looks as if it hung. What needs more is tuned ahead.
CALL_SECONDS = 60.0
PROCESS_SECONDS = 600.0
_MORE = (
    "tune ahead with autotune(...) or `ejkernel tune`, or set EJKERNEL_OPS_TUNE_SECONDS to what a process may spend "
    "(inf: no limit)"
)
_spent = 0.0
_inline = 0.0
_lock = threading.Lock()
_depth = threading.local()
_said = False


class TuningWarning(UserWarning):
    """A tuning that did not go as it should."""


def seconds_spent() -> float:
    """Seconds of tuning of this process so far, in all threads."""
    return _spent


def inline_seconds_spent() -> float:
    """Seconds of those tunings that a call began by itself."""
    with _lock:
        return _inline


@contextlib.contextmanager
def spending(*, inline: bool = False) -> Iterator[None]:
    """Counts a `with` block; a tuning inside a tuning counts once."""
    global _spent, _inline
    nested = getattr(_depth, "value", 0)
    _depth.value = nested + 1
    start = time.perf_counter()
    try:
        yield
    finally:
        _depth.value = nested
        if not nested:
            taken = time.perf_counter() - start
            with _lock:
                _spent += taken
                _inline += taken if inline else 0.0


def why_over(settings: Settings) -> str:
    """The reason why a call may not begin a tuning by itself any more, said once; else empty."""
    global _said
    if settings.tune_seconds is not None or inline_seconds_spent() < PROCESS_SECONDS:
        return ""
    why = f"calls of this process have spent {PROCESS_SECONDS:g} s on tuning, the default"
    with _lock:
        first, _said = not _said, True
    if first:
        warnings.warn(f"{why}; from now on stores and heuristics serve. {_MORE}", TuningWarning, stacklevel=2)
    return f"{why}; {_MORE}"


def seconds_for(settings: Settings, tuner: Any) -> list[float]:
    """The bounds of one such tuning; a setting or a tuner with a budget of its own knows better."""
    if settings.tune_seconds is not None:
        return []
    left = max(PROCESS_SECONDS - inline_seconds_spent(), 1.0)
    return [left] if getattr(tuner, "seconds", None) is not None else [left, CALL_SECONDS]


def tell_if_used_up(key: Key, record: Record, seconds: float | None, *, is_answered: bool = True) -> None:
    """Says that a call's own minute ended its tuning, and what is used now."""
    if record.stop == "deadline" and seconds == CALL_SECONDS:
        used = "the best so far is used" if is_answered else "the heuristic cfg is used"
        message = f"tuning {key} was stopped after {CALL_SECONDS:g} s, the default for a call; {used}"
        warnings.warn(f"{message}. Give Tuner(seconds=...), or {_MORE}", TuningWarning, stacklevel=2)
