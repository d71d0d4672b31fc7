"""Limits of a selector: the tiers that may answer, how that is changed for a while, and the budget of tunings.

Calls that begin a tuning by themselves have a minute each and ten a process, said when they are used up; a setting, or
a tuner of the user's own, knows better. No JAX here.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, Literal, Self, get_args

from ..core.errors import PolicyFieldError, PolicyValueError, ScopeError
from ..core.key import Key
from ..core.record import Record
from ..core.shown import Shown
from ..settings import Settings

Fallback = Literal["autotune", "heuristics"]


@dataclass(frozen=True, repr=False)
class AutotunePolicy(Shown):
    """Settings of a selector: the tiers that may answer, and what a tuning has to cover."""

    allow_autotune: bool = True
    allow_heuristics: bool = True
    cache_miss_fallback: Fallback = "autotune"
    validate_backward: bool = False
    # Answers from the records of other calls, where nothing was measured; off where heuristics are.
    allow_predictions: bool = False

    def __post_init__(self) -> None:
        """Rejects values that mean nothing."""
        if self.cache_miss_fallback not in get_args(Fallback):
            raise PolicyValueError(
                f"cache_miss_fallback={self.cache_miss_fallback!r} is unknown; use 'autotune' or 'heuristics'"
            )
        for name in ("allow_autotune", "allow_heuristics", "validate_backward", "allow_predictions"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyValueError(f"{name}={getattr(self, name)!r} is unknown; use True or False")


@dataclass(frozen=True)
class Frame:
    """One change in force; equal changes of one selector are equal, so that what was built under them is shared."""

    # None: for every selector.
    selector: object
    updates: tuple[tuple[str, Any], ...]


# The changes around this context, outermost first.
frames: ContextVar[tuple[Frame, ...]] = ContextVar("ejkernel_policy", default=())


# Has any change ever been in force? Until then a call need not look; a copied context keeps its changes for good.
used = False


def in_force(selector: object, base: AutotunePolicy) -> AutotunePolicy:
    """The selector's policy as this context sees it."""
    around = frames.get()
    if not around:
        return base
    mine = [f for f in around if f.selector is None or f.selector is selector]
    # What holds for every selector holds whatever the overrides of one of them say.
    for frame in sorted(mine, key=lambda f: f.selector is None):
        base = replace(base, **dict(frame.updates))
    return base


class _Change:
    """Policy updates for a `with` block of this context."""

    def __init__(self, selector: object, updates: dict[str, Any]) -> None:
        self._frame = Frame(selector, tuple(updates.items()))

    def __enter__(self) -> Self:
        global used
        used = True
        frames.set((*frames.get(), self._frame))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = frames.get()
        if not entered or entered[-1] is not self._frame:
            raise ScopeError(f"{type(self).__name__} was left in another order than it was entered, or elsewhere")
        frames.set(entered[:-1])


class policy_override(_Change):
    """Changes fields of a selector's policy inside a `with` block; other threads do not see it."""

    def __init__(self, selector: Any, **updates: Any) -> None:
        known = [f.name for f in fields(AutotunePolicy)]
        for name in updates:
            if name not in known:
                raise PolicyFieldError(f"a policy has no field {name!r}; it has {', '.join(known)}")
        # Checked here, so that a wrong value fails where it is written.
        AutotunePolicy(**updates)
        super().__init__(selector, updates)


class forward_autotune_only(_Change):
    """Tunings inside measure the forward pass alone, whatever the policy says."""

    def __init__(self) -> None:
        super().__init__(None, {"validate_backward": False})


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
