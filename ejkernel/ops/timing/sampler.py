"""Samples of a race by a clock: which clock, how many calls make a sample, and when enough was measured."""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from .cache_flush import flush_for
from .clock import Clock, RoundClock, Run, TraceClock, WallClock, in_turns
from .profiler import ProfilerClock, ProfilerUnavailable
from .program import CompiledProgram
from .race import Outcome, Rules, race

# A sample on the host shorter than this is mostly the clock's and the dispatch's own noise.
_HOST_SAMPLE = 1e-3
_MOST_HOST_CALLS = 64
# A device's clock is exact: there some runs of a short kernel even out what the memory does.
_DEVICE_SAMPLE = 60e-6
_MOST_DEVICE_CALLS = 16
# A trace costs some 15 ms on an H200, whatever is in it: few candidates run several rounds in one.
_ROUNDS_A_TRACE = 8
_CALLS_A_TRACE = 128
_SECONDS_A_TRACE = 10e-3
# Beyond the least number of rounds a race goes on while it is cheap: rounds of an exact clock say more.
_ENOUGH_SECONDS = 1.0
_ENOUGH_DEVICE_SECONDS = 0.6

# What the program at a place is about to do: "race" or "trace"; the end of a trace takes longer than any run.
Turn = Callable[[int | None, str], None]

_WITH_A_CLOCK = {"gpu", "tpu", "cuda", "rocm"}

# The host's noise only ever adds: a lower quantile stands for a candidate. A device's is small and has two sides.
HOST_RULES = Rules(quantile=0.25, tie=0.01, few=12)
DEVICE_RULES = Rules(quantile=0.5, tie=0.004, least_gaps=(0.69, 0.10, 0.03), most_rounds=40)


class RoundSampler:
    """Times rounds of programs; falls back to the host's clock where the device's cannot be had."""

    def __init__(
        self,
        clock: Clock | None,
        programs: Mapping[int, CompiledProgram],
        leaves: Sequence[Any],
        numbers: Sequence[int],
        *,
        warmup: int,
        deadline: float = math.inf,
        seed: int = 0,
        watch: Callable[[Mapping[int, float], int], None] = lambda seconds, total: None,
        turn: Turn = lambda place, doing: None,
        dropped: Callable[[int, float, float], None] = lambda place, seconds, ratio: None,
        others: Sequence[Sequence[Any]] = (),
    ) -> None:
        self.programs = [programs[number] for number in numbers]
        self.names = [_module_name(program) for program in self.programs]
        # Rounds take these inputs in turns: where arrays lie, and what of them is in a cache, differs.
        self.inputs = (leaves, *others)
        self.warmup = warmup
        self.deadline = deadline
        # Told the seconds of those in each round, and how many there were at the start.
        self.watch = watch
        # Told the place of a program before it runs, and None once the round is over.
        self._turn = turn
        self._dropped = dropped
        self.clock: Any = clock or _automatic(self.programs, self.names)
        # Only a clock that knows programs by their names does not time the flush as well.
        self._flush = flush_for(_device(self.programs)) if isinstance(self.clock, ProfilerClock) else None
        self.note = ""
        self._calls: dict[int, int] = {}
        # By the device's clock: seconds of a call in the latest round, and rounds that were measured ahead.
        self._took: dict[int, float] = {}
        self._ahead: list[Mapping[int, float | Exception]] = []
        self._shuffled = random.Random(seed)
        self._rounds = 0

    @property
    def conditions(self) -> str:
        """The state of caches and memory while programs were timed, as the record says it."""
        size = sum(getattr(leaf, "nbytes", 0) for leaf in self.inputs[0]) / 1e6
        many = f"{len(self.inputs)} sets of inputs in turns" if len(self.inputs) > 1 else "the same inputs each time"
        flushed = self._flush is not None and isinstance(self.clock, ProfilerClock)
        caches = "caches emptied before each call" if flushed else "caches as the program before left them"
        return f"{many}, {size:.3g} MB each; {caches}"

    @property
    def clock_name(self) -> str:
        """The name of the clock that timed the rounds, as the record says it."""
        return f"{self.clock.name} ({self.note})" if self.note else str(self.clock.name)

    @property
    def rules(self) -> Rules:
        """The rules that the clock declares; else a clock for whole rounds has a device's, another one the host's."""
        declared = getattr(self.clock, "rules", None)
        usual = DEVICE_RULES if isinstance(self.clock, RoundClock) else HOST_RULES
        return declared if isinstance(declared, Rules) else usual

    def race(
        self, *, least_rounds: int, most_rounds: int | None = None, protected: int | None = None, seed: int = 0
    ) -> Outcome:
        """The race of the programs; by the host's clock from the start where the device's cannot be had."""
        try:
            return self._race(least_rounds, most_rounds, protected, seed)
        except ProfilerUnavailable as error:
            # Times of two clocks do not compare, and each has its own rules: nothing of the first one's is kept.
            self.clock, self.note = WallClock(), str(error)
            self._calls.clear()
            self._ahead.clear()
        return self._race(least_rounds, most_rounds, protected, seed)

    def pairs(self, rounds: int) -> list[tuple[float, float]]:
        """Seconds of two programs in so many rounds, none of them dropped; raises what a program raises."""
        try:
            found = [self._pair() for _ in range(rounds)]
        except ProfilerUnavailable as error:
            self.clock, self.note = WallClock(), str(error)
            self._calls.clear()
            self._ahead.clear()
            found = [self._pair() for _ in range(rounds)]
        for row in found:
            for seconds in row.values():
                if isinstance(seconds, Exception):
                    raise seconds
        return [(float(row[0]), float(row[1])) for row in found]  # type: ignore[arg-type]

    def _pair(self) -> Mapping[int, float | Exception]:
        row = self.round(self._shuffled.sample(range(2), 2))
        # Launches are a part of each sample of the host's clock: as large a part of the one as of the other.
        self._calls = dict.fromkeys(self._calls, max(self._calls.values(), default=1))
        return row

    def _race(self, least_rounds: int, most_rounds: int | None, protected: int | None, seed: int) -> Outcome:
        device = isinstance(self.clock, RoundClock)
        enough = time.perf_counter() + (_ENOUGH_DEVICE_SECONDS if device else _ENOUGH_SECONDS)
        return race(
            len(self.programs),
            self._watched,
            least_rounds=least_rounds,
            protected=protected,
            seed=seed,
            rules=self.rules if most_rounds is None else replace(self.rules, most_rounds=most_rounds),
            out_of_time=self._late,
            enough=lambda: time.perf_counter() >= enough,
            dropped=self._dropped,
        )

    def _watched(self, order: Sequence[int]) -> Mapping[int, float | Exception]:
        found = self.round(order)
        seconds = {place: s for place, s in found.items() if not isinstance(s, Exception)}
        self.watch(seconds, len(self.programs))
        self._turn(None, "race")
        return found

    def round(self, order: Sequence[int]) -> Mapping[int, float | Exception]:
        """Seconds of each candidate in this order, or what it raised; without those that the deadline left no turn."""
        if not self._calls and self.deadline < math.inf:
            # The first one wins ties: should the time be up within this round, it must have had its turn.
            order = sorted(order, key=bool)
        if self._ahead:
            # No program joins a race: those that still run are among those that ran.
            ahead = self._ahead.pop(0)
            return {place: ahead[place] for place in order}
        broken = self._warm([place for place in order if place not in self._calls])
        runs = [self._run(place, 0) for place in order if place in self._calls]
        if not isinstance(self.clock, RoundClock):
            found: Mapping[int, float | Exception] = in_turns(self.clock, runs, self._late)
        else:
            found = self._traced(self.clock, runs)
            self._learn(found)
        self._rounds += 1 + len(self._ahead)
        return {**found, **broken}

    def _traced(self, clock: RoundClock, runs: Sequence[Run]) -> Mapping[int, float | Exception]:
        rounds = self._rounds_at_once(runs)
        if rounds < 2 or not isinstance(clock, TraceClock):
            return clock.round(runs)
        orders = [self._shuffled.sample(runs, len(runs)) for _ in range(rounds - 1)]
        schedule = [runs, *([self._run(run.number, later + 1) for run in order] for later, order in enumerate(orders))]
        first, *self._ahead = clock.rounds(schedule)
        return first

    def _rounds_at_once(self, runs: Sequence[Run]) -> int:
        if any(run.number not in self._took for run in runs):
            return 1
        calls = sum(run.calls for run in runs)
        seconds = sum(self._took[run.number] * run.calls for run in runs)
        return int(min(_ROUNDS_A_TRACE, _CALLS_A_TRACE / max(calls, 1), _SECONDS_A_TRACE / max(seconds, 1e-9)))

    def _late(self) -> bool:
        return time.perf_counter() >= self.deadline

    def _run(self, place: int, later: int) -> Run:
        call, calls = self.programs[place].call, self._calls[place]
        leaves = self.inputs[(self._rounds + later) % len(self.inputs)]
        before = functools.partial(self._turn, place, "race")
        after = functools.partial(self._turn, place, "trace")
        flush = self._flush or (lambda: None)
        return Run(place, self.names[place], call, leaves, calls, before, after, flush)

    def _warm(self, places: Sequence[int]) -> dict[int, Exception]:
        """Runs newcomers as often as asked before any sample counts, and finds how many calls make a sample."""
        broken: dict[int, Exception] = {}
        for place in places:
            # One there must be, however late.
            if self._calls and self._late():
                break
            call, seconds = self.programs[place].call, math.inf
            self._turn(place, "race")
            try:
                for _ in range(max(self.warmup, 1)):
                    seconds = min(seconds, self._once(call))
            # Whatever a candidate raises is the candidate's outcome.
            except Exception as error:
                broken[place] = error
            else:
                self._calls[place] = self._calls_for(seconds)
        return broken

    def _once(self, call: Any) -> float:
        if not isinstance(self.clock, RoundClock):
            return float(self.clock.time(call, self.inputs[0], 1))
        start = time.perf_counter()
        jax.block_until_ready(call(*self.inputs[0]))
        return time.perf_counter() - start

    def _calls_for(self, seconds: float) -> int:
        # The host's clock sees launches and waits: what a kernel takes on a device is known after the first round.
        if isinstance(self.clock, RoundClock):
            return 1
        return max(1, min(_MOST_HOST_CALLS, math.ceil(_HOST_SAMPLE / max(seconds, 1e-9))))

    def _learn(self, found: Mapping[int, float | Exception]) -> None:
        for place, seconds in found.items():
            if not isinstance(seconds, Exception):
                wanted = math.ceil(_DEVICE_SAMPLE / max(seconds, 1e-9))
                self._calls[place] = max(1, min(_MOST_DEVICE_CALLS, wanted))
                self._took[place] = seconds


def usual_clock(clock: Clock | None, device: jax.Device) -> str:
    """The clock that times rounds on a device, unless the device's own cannot be had."""
    own = ProfilerClock.name if device.platform in _WITH_A_CLOCK else WallClock.name
    return str(own if clock is None else clock.name)


def once(clock: Any, program: CompiledProgram, leaves: Sequence[Any]) -> float:
    """Seconds of one run by any clock."""
    if not isinstance(clock, RoundClock):
        return float(clock.time(program.call, leaves, 1))
    found = clock.round([Run(0, _module_name(program), program.call, leaves)])[0]
    if isinstance(found, Exception):
        raise found
    return found


def _automatic(programs: Sequence[CompiledProgram], names: Sequence[str]) -> Any:
    platforms = {_platform(program) for program in programs}
    known = all(names) and len(set(names)) == len(names)
    return ProfilerClock() if known and platforms and platforms <= _WITH_A_CLOCK else WallClock()


def _platform(program: CompiledProgram) -> str:
    return "host" if program.executable is None else str(_device([program]).platform)


def _device(programs: Sequence[CompiledProgram]) -> Any:
    """The device of the first program that has one."""
    devices = (p.executable.runtime_executable().local_devices() for p in programs if p.executable is not None)
    return next((device for found in devices for device in found), None)


def _module_name(program: CompiledProgram) -> str:
    """The name of the program in a profiler's trace; empty for what runs as it is."""
    if program.executable is None:
        return ""
    modules = program.executable.runtime_executable().hlo_modules()
    return str(modules[0].name).removeprefix("jit_") if modules else ""
