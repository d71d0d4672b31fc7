"""Clocks that time programs, behind one small interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax


@dataclass(frozen=True)
class Run:
    """One candidate's turn in a round."""

    number: int
    # What its jitted function is called: how a profiler's trace knows it.
    name: str
    call: Callable[..., Any]
    leaves: Sequence[Any]
    # How often in a row.
    calls: int = 1
    # Names the candidate that runs next, should its run be the last thing this process does.
    before: Callable[[], None] = lambda: None
    # Says that it is over, where what follows takes longer than a run.
    after: Callable[[], None] = lambda: None
    # Done before each call, and not timed.
    flush: Callable[[], None] = lambda: None


class Clock(Protocol):
    """Seconds of one program; a test brings its own."""

    name: str

    def time(self, call: Callable[..., Any], leaves: Sequence[Any], calls: int) -> float:
        """Seconds per call over so many calls in a row."""


@runtime_checkable
class RoundClock(Protocol):
    """A clock that times a whole round at once."""

    name: str

    def round(self, runs: Sequence[Run]) -> Mapping[int, float | Exception]:
        """Seconds per call of each, or what it raised."""


@runtime_checkable
class TraceClock(RoundClock, Protocol):
    """A clock that times several rounds of the same programs at the price of one."""

    def rounds(self, schedule: Sequence[Sequence[Run]]) -> Sequence[Mapping[int, float | Exception]]:
        """Each round's seconds; fewer rounds where they cannot be told apart."""


class WallClock:
    """The host's clock around calls that are waited for."""

    name = "wall"

    def time(self, call: Callable[..., Any], leaves: Sequence[Any], calls: int) -> float:
        """Seconds per call, the wait for the last one included."""
        start = time.perf_counter()
        for _ in range(calls):
            out = call(*leaves)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls


def in_turns(
    clock: Clock, runs: Sequence[Run], late: Callable[[], bool] = lambda: False
) -> dict[int, float | Exception]:
    """A round by a clock that times one program at a time; it ends when it is late, but not before one was timed."""
    found: dict[int, float | Exception] = {}
    for run in runs:
        if any(not isinstance(seconds, Exception) for seconds in found.values()) and late():
            break
        run.before()
        try:
            found[run.number] = clock.time(run.call, run.leaves, run.calls)
        # Whatever a candidate raises is the candidate's outcome.
        except Exception as error:
            found[run.number] = error
    return found
