"""The default budget of tunings that calls begin by themselves: a minute a call, ten a process, said when used up."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from ..core.key import Key
from ..core.record import Record
from ..settings import Settings
from ..tuning.budget import inline_seconds_spent
from .tuning_job import TuningWarning

# A first call that takes longer looks as if it hung. What needs more is tuned ahead.
CALL_SECONDS = 60.0
PROCESS_SECONDS = 600.0
_MORE = (
    "tune ahead with autotune(...) or `ejkernel tune`, or set EJKERNEL_OPS_TUNE_SECONDS to what a process may spend "
    "(inf: no limit)"
)
_lock = threading.Lock()
_said = False


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


def tell_if_used_up(key: Key, record: Record, seconds: float | None) -> None:
    """Says that a call's own minute ended its tuning."""
    if record.stop == "deadline" and seconds == CALL_SECONDS:
        message = f"tuning {key} was stopped after {CALL_SECONDS:g} s, the default for a call; the best so far is used"
        warnings.warn(f"{message}. Give Tuner(seconds=...), or {_MORE}", TuningWarning, stacklevel=2)
