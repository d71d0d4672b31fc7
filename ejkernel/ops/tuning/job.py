"""One tuning to do, as a value, and what a tuner is given beside it: the lock of the device, and another's answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import _jax
from ..core.record import Objective
from .progress import Watch, unseen

# Held while candidates are timed: it gets the seconds that may be waited for it.
DeviceLock = Callable[[float], AbstractContextManager[Any]]
# (cfg,) where another process found the answer meanwhile.
AnsweredElsewhere = Callable[[], tuple[Any] | None]


def no_lock(wait: float) -> AbstractContextManager[Any]:
    """Takes no lock: no other tuning uses the device."""
    return contextlib.nullcontext()


def no_answer() -> tuple[Any] | None:
    """Gives no answer: no other process tunes the same."""
    return None


# The end of the budget of a whole program, by `time.perf_counter`. A tuning's own part of it may be exceeded until
# something is measured: what was begun is worth more than what is left for the next one. None: its own is the end.
program_end: ContextVar[float | None] = ContextVar("ejkernel_program_end", default=None)
# Is what is being traced ahead of its turn not wanted any more? Then no further candidate of it is traced.
is_abandoned: ContextVar[Callable[[], bool] | None] = ContextVar("ejkernel_is_abandoned", default=None)


@dataclass(frozen=True)
class TuningJob:
    """A tuning as a value: candidates, arguments, reference, objective and limits."""

    # From a cfg to a function of the call's arguments.
    make_fn: Callable[[Any], Callable[..., Any]]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    # The heuristic cfg first, where there is one: it wins ties.
    candidates: Sequence[Any]
    objective: Objective = "forward"
    # None: the first candidate that runs is the reference.
    reference: Callable[..., Any] | None = None
    tolerance: float | None = None
    # cfgs known from elsewhere (another environment, a lesser tuning): measured with the rest, never trusted.
    seeds: Sequence[Any] = ()
    # cfgs that the kernel rules out for this call, with its reasons: not measured, but in the record.
    refused: Sequence[tuple[Any, str]] = ()
    # Is the first candidate the heuristic cfg?
    heuristic_first: bool = False
    # Random floats instead of the call's own; its integers stay.
    fresh_floats: bool = False
    example: Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]] | None = None
    seconds: float | None = None
    # Entered around compiling and running, so that nothing of the caller's transformations reaches in.
    room: Callable[[], AbstractContextManager[Any]] = _jax.clean_room
    # Puts the arrays where the measured programs want them.
    place: Callable[[Sequence[Any]], tuple[Any, ...]] = tuple
    # Told how far the tuning is.
    watch: Watch = unseen
    # What the record says of the call: key parts, kernel path, environment.
    about: Mapping[str, Any] = field(default_factory=dict)
    # Tuned ahead of the program that needs it: a process of its own costs little beside what it saves.
    offline: bool = False
    # Where tunings are journalled; None: nowhere.
    journal: Path | None = None
