"""Rounds of a race by a clock: which clock, how many calls make a sample, and when enough was measured."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ..timing.clock import Clock, RoundClock, Run, WallClock, in_turns
from ..timing.profiler import ProfilerClock, ProfilerUnavailable
from ..timing.program import Program
from .race import Rules

# A sample on the host shorter than this is mostly the clock's and the dispatch's own noise.
_HOST_SAMPLE = 1e-3
_MOST_HOST_CALLS = 64
# On a device, whose clock is exact, a few runs of a short kernel even out what the memory does.
_DEVICE_SAMPLE = 20e-6
_MOST_DEVICE_CALLS = 4
# Beyond the least number of rounds a race goes on while it is cheap.
_ENOUGH_SECONDS = 1.0

# The host's noise only ever adds: a lower quantile stands for a candidate. A device's is small and has two sides.
_HOST_RULES = Rules(quantile=0.25, tie=0.01)
_DEVICE_RULES = Rules(quantile=0.5, tie=0.004, least_gaps=(0.69, 0.10, 0.03), most_rounds=60)


class Stopwatch:
    """Times rounds of programs; falls back to the host's clock where the device's cannot be had."""

    def __init__(
        self,
        clock: Clock | None,
        programs: Mapping[int, Program],
        leaves: Sequence[Any],
        numbers: Sequence[int],
        *,
        warmup: int,
    ) -> None:
        self.programs = [programs[number] for number in numbers]
        self.names = [_module_name(program) for program in self.programs]
        self.leaves = leaves
        self.warmup = warmup
        self.clock: Any = clock or _automatic(self.programs, self.names)
        self.note = ""
        self._calls: dict[int, int] = {}
        self.enough = time.perf_counter() + _ENOUGH_SECONDS

    @property
    def clock_name(self) -> str:
        """Which clock it was, as the record says it."""
        return f"{self.clock.name} ({self.note})" if self.note else str(self.clock.name)

    @property
    def rules(self) -> Rules:
        """The rules that fit the clock."""
        return _DEVICE_RULES if isinstance(self.clock, ProfilerClock) else _HOST_RULES

    def round(self, order: Sequence[int]) -> Mapping[int, float | Exception]:
        """Seconds of each candidate in this order, or what it raised."""
        broken = self._warm([place for place in order if place not in self._calls])
        runs = [self._run(place) for place in order if place not in broken]
        try:
            found = self.clock.round(runs) if isinstance(self.clock, RoundClock) else in_turns(self.clock, runs)
        except ProfilerUnavailable as error:
            self._fall_back(str(error))
            return self.round(order)
        return {**found, **broken}

    def _run(self, place: int) -> Run:
        return Run(place, self.names[place], self.programs[place].call, self.leaves, self._calls[place])

    def _warm(self, places: Sequence[int]) -> dict[int, Exception]:
        """Runs newcomers as often as asked before any sample counts, and finds how many calls make a sample."""
        broken: dict[int, Exception] = {}
        for place in places:
            call, seconds = self.programs[place].call, math.inf
            try:
                for _ in range(max(self.warmup, 1)):
                    seconds = min(seconds, self._once(call))
            # Whatever a candidate raises is the candidate's outcome.
            except Exception as error:
                broken[place] = error
            self._calls[place] = self._calls_for(seconds)
        return broken

    def _once(self, call: Any) -> float:
        if not isinstance(self.clock, RoundClock):
            return float(self.clock.time(call, self.leaves, 1))
        start = time.perf_counter()
        jax.block_until_ready(call(*self.leaves))
        return time.perf_counter() - start

    def _calls_for(self, seconds: float) -> int:
        device = isinstance(self.clock, RoundClock)
        sample, most = (_DEVICE_SAMPLE, _MOST_DEVICE_CALLS) if device else (_HOST_SAMPLE, _MOST_HOST_CALLS)
        # The host's clock sees a launch as well: on a device every kernel looks longer, and short ones get more calls.
        return max(1, min(most, math.ceil(sample / max(seconds / (20 if device else 1), 1e-9))))

    def _fall_back(self, reason: str) -> None:
        self.clock, self.note = WallClock(), reason
        self._calls.clear()


def _automatic(programs: Sequence[Program], names: Sequence[str]) -> Any:
    platforms = {_platform(program) for program in programs}
    known = all(names) and len(set(names)) == len(names)
    return ProfilerClock() if known and platforms and platforms <= {"gpu", "tpu", "cuda", "rocm"} else WallClock()


def _platform(program: Program) -> str:
    if program.executable is None:
        return "host"
    return str(next(iter(program.executable.runtime_executable().local_devices())).platform)


def _module_name(program: Program) -> str:
    """What a profiler calls the program; empty for what runs as it is."""
    if program.executable is None:
        return ""
    modules = program.executable.runtime_executable().hlo_modules()
    return str(modules[0].name).removeprefix("jit_") if modules else ""
