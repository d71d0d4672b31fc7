"""Runners compile, check and time candidates: the interface of all of them, and the runner in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Protocol, final

import jax

from ..core.record import Record, Stop, Trial
from ..timing.clock import Clock
from ..timing.cost import least_cost
from ..timing.race import Outcome, conclude, low_end
from ..timing.sampler import RoundSampler
from .builder import ProgramBuilder
from .candidates import CandidateSet
from .check import CheckCase, Checker, inputs_of
from .compile import CandidateCompiler
from .interrupted import TuningInterrupted
from .job import TuningJob
from .journal.observer import Doing, NoObserver, PriorResults, StepObserver
from .progress import Step, Watch
from .quick_candidates import QuickCandidates
from .reference import Reference

# The share of a budget that is kept for timing: a candidate that is compiled and not timed cannot win.
FOR_MEASURING = 0.25
NOT_TIMED = "not timed when the time was up"
# Runs of each candidate in a first look, while they take little time.
_LOOKS = 3
# So many programs are compiled for speed side by side at first, then twice as many each time. A compiler times products
# on the device, one after the other, and remembers them: on an H200 none of twelve programs with products of many sizes
# was compiled after six seconds, while four took 3.4; 23 programs with the same products took less at once than in
# groups of four.
_AT_ONCE = 4
# Rounds of a few candidates: seconds of each, by number.
Rows = Sequence[Mapping[int, float]]


class Runner(Protocol):
    """The object that compiles, checks and times candidates, in this process or by a worker."""

    job: TuningJob
    candidates: CandidateSet

    def begin(self, deadline: float, end: float = math.inf, *, ahead: bool = False) -> None:
        """Traces or exports every candidate that has entered, on the calling thread; the tuning ends at `end`.

        `ahead`: another tuning is being timed, so that nothing is compiled or sent yet.
        """

    def compile(self, deadline: float, end: float = math.inf) -> None:
        """Makes programs of the candidates that have entered, before a device is claimed; continues after `begin`."""

    def check(self, deadline: float) -> None:
        """Takes out each candidate that fails or is wrong; a runner may leave that to the timing."""

    def time_briefly(
        self, numbers: Sequence[int], *, rounds: int, kept: int | None, deadline: float, seed: int
    ) -> Rows:
        """Times candidates for a few rounds, to rank a batch."""

    def note_seconds(self, number: int, seconds: float, ratio: float) -> None:
        """Tells the observer what a first look has shown."""

    def race(self, record: Record, numbers: Sequence[int], *, deadline: float, heuristic: int | None) -> Record:
        """Races candidates; the record with the outcome."""

    def close(self) -> None:
        """Lets everything go."""


@final
class InProcessRunner:
    """Compiles, checks and times candidates in this process."""

    def __init__(
        self,
        job: TuningJob,
        *,
        seed: int,
        device: jax.Device,
        clock: Clock | None = None,
        warmup: int = 1,
        iters: int = 1,
        observer: StepObserver | None = None,
        prior: PriorResults | None = None,
        builder: ProgramBuilder | None = None,
        pipelined: bool | None = None,
        cases: Sequence[CheckCase] = (),
        told_rounds: Callable[[Mapping[int, float], str], None] = lambda seconds, clock: None,
    ) -> None:
        self.job = job
        self.seed = seed
        self._clock = clock
        self._warmup = warmup
        self._iters = iters
        self._observer: StepObserver = observer or NoObserver()
        # Are candidates run while others compile? Not where both need the same cores.
        self._pipelined = device.platform != "cpu" if pipelined is None else pipelined
        # Has `begin` traced the candidates of the next `compile`?
        self._is_begun = False
        # Told the seconds of each round by number, and the clock.
        self._told_rounds = told_rounds
        # The name of the clock of the latest rounds.
        self._clock_name = ""
        self.candidates = CandidateSet(observer)
        call, self.leaves = inputs_of(job, seed)
        reference = None
        if job.reference is not None:
            reference = Reference(job.reference, call, self.leaves, platform=device.platform)
        self.compiler = CandidateCompiler(
            *(job, self.candidates, call, self.leaves),
            seed=seed,
            device=device,
            reference=reference,
            builder=builder,
            prior=prior,
            observer=observer,
        )
        self.checker = Checker(
            job, self.candidates, self.leaves, seed=seed, reference=reference, given=cases, observer=observer
        )

    def begin(self, deadline: float, end: float = math.inf, *, ahead: bool = False) -> None:
        """Traces and lowers the candidates."""
        self._is_begun = True
        self.compiler.begin(deadline, end, ahead=ahead)

    def compile(self, deadline: float, end: float = math.inf) -> None:
        """Compiles, and makes both sets of inputs with their right answers: user code, so before a device is claimed.

        If candidates are checked while others compile, it returns once all are lowered.
        """
        if not self._is_begun:
            self.begin(deadline, end)
        self._is_begun = False
        self.compiler.until(deadline, end)
        self.wait()

    def wait(self) -> None:
        """Waits for all programs; if candidates are checked while others compile, for the reference alone."""
        if not (self._pipelined and self.compiler.pipelined):
            self.compiler.finish()
        if self.compiler.await_reference():
            self.checker.cases()

    def check(self, deadline: float = math.inf) -> None:
        """Runs each candidate on two sets of inputs, and compares its answers."""
        self._check_those_there(deadline)
        while self.compiler.take():
            self._check_those_there(deadline)
        for number in self.candidates.having("compiled"):
            # The deadline counts only once one candidate has passed the check.
            if self.candidates.having("checked", "timed") and time.perf_counter() >= deadline:
                self.candidates.advance(number, "timeout", message="not checked when the time was up")
            else:
                self.checker.check(number)

    def _check_those_there(self, deadline: float) -> None:
        """Checks compiled candidates until another program arrives.

        Without a reference the first candidate that runs defines what is right, so an earlier candidate that still
        compiles is waited for.
        """
        while not self.compiler.is_done and not self.compiler.has_news() and time.perf_counter() < deadline:
            there = self.candidates.having("compiled")
            is_one_right = bool(self.candidates.having("checked", "timed"))
            if not there or (not is_one_right and there[0] > min(self.compiler.coming, default=math.inf)):
                return
            self.checker.check(there[0])

    def time_briefly(
        self,
        numbers: Sequence[int],
        *,
        rounds: int,
        kept: int | None,
        deadline: float,
        seed: int,
        least: int | None = None,
    ) -> Rows:
        """Times candidates for up to `rounds` rounds in this process; slow candidates may stop after `least`."""
        sampler = self._sampler(numbers, deadline)
        place = None if kept is None else numbers.index(kept)
        outcome = sampler.race(least_rounds=least or rounds, most_rounds=rounds, protected=place, seed=seed)
        self._clock_name = str(sampler.clock.name)
        rows: list[dict[int, float]] = [{} for _ in range(outcome.rounds)]
        for number, lane in zip(numbers, outcome.lanes, strict=True):
            if lane.failure is not None:
                self.candidates.fail(number, lane.failure, "runtime")
                continue
            for r, value in lane.samples.items():
                rows[r][number] = math.exp(value)
            # `kept` is the best of earlier batches, run again for comparison: it keeps its earlier samples.
            if lane.samples and number != kept:
                self.candidates.advance(number, "timed", samples_s=lane.seconds, dropped_round=len(lane.samples))
        return rows

    def sampler_of(self, numbers: Sequence[int], *, seed: int) -> RoundSampler:
        """A sampler of these candidates' programs, with the inputs of a race."""
        programs, others = self.candidates.running, [case.leaves for case in self.checker.sets()[1:]]
        return RoundSampler(self._clock, programs, self.leaves, numbers, warmup=self._warmup, seed=seed, others=others)

    def race(self, record: Record, numbers: Sequence[int], *, deadline: float, heuristic: int | None) -> Record:
        """Races candidates in this process; on Ctrl-C the rounds so far decide, and are raised."""
        numbers = self._without_hopeless(numbers, heuristic, deadline)
        place = numbers.index(heuristic) if heuristic is not None and heuristic in numbers else None
        rounds: list[Mapping[int, float]] = []
        tell = told_with_gain(self.job.watch, place)

        def told(seconds: Mapping[int, float], total: int) -> None:
            rounds.append(seconds)
            tell(seconds, total)

        sampler = self._sampler(numbers, deadline, told=told, tells_drops=True)
        stopped = False
        try:
            outcome = sampler.race(least_rounds=self._iters, protected=place, seed=self.seed)
        except KeyboardInterrupt:
            if not rounds:
                raise
            stopped = True
            outcome = conclude(len(numbers), rounds, rules=sampler.rules, protected=place)
        clock, conditions = sampler.clock_name, sampler.conditions
        record = replace(record, objective=self.compiler.objective, clock=clock, conditions=conditions)
        record = replace(record, cost=least_cost(program.executable for program in self.candidates.running.values()))
        late = self.compiler.late or time.perf_counter() >= deadline or stopped
        record = finished(record, self.candidates, numbers, outcome, heuristic=heuristic, late=late)
        if stopped:
            raise TuningInterrupted(replace(record, stop="interrupted"))
        return record

    def _without_hopeless(self, numbers: Sequence[int], heuristic: int | None, deadline: float) -> list[int]:
        """The candidates to be raced; quickly compiled ones that are near the fastest are compiled for speed now."""
        quick = [number for number in numbers if self.compiler.is_quick(number)]
        if not quick:
            return list(numbers)
        kept = heuristic if heuristic in numbers else None
        rows = self.time_briefly(numbers, rounds=_LOOKS, least=1, kept=kept, deadline=deadline, seed=self.seed)
        seconds = {n: min(taken) for n in numbers if (taken := [row[n] for row in rows if n in row])}
        quick_ones = QuickCandidates(seconds, quick, self.compiler.compiler_timing, kept)
        near = self._promising([n for n in quick if n in seconds], quick_ones)
        near = self._compiled_for_speed(near, quick_ones, deadline)
        return [n for n in numbers if self.candidates.runs(n) and (n not in quick or n in near)]

    def _compiled_for_speed(self, near: Sequence[int], quick_ones: QuickCandidates, deadline: float) -> list[int]:
        """Compiles candidates for speed, a few at a time, the most promising first; returns those that it compiled.

        What can no longer win by then is dropped.
        """
        left = deadline - time.perf_counter()
        until = deadline - FOR_MEASURING * left if math.isfinite(left) else math.inf
        waiting, raced, count = quick_ones.in_order(near), list[int](), _AT_ONCE
        with self.compiler.undisturbed():
            while waiting and count and (start := time.perf_counter()) < until:
                some, waiting = waiting[:count], waiting[count:]
                self.compiler.compile_for_speed(some, until)
                raced += some
                for number in some:
                    if self.candidates.state(number) == "compiled":
                        self.checker.check(number)
                right = [number for number in some if self.candidates.runs(number)] if waiting else []
                quick_ones.note(some, self._look(right, quick_ones, deadline))
                waiting = self._promising(waiting, quick_ones)
                # A compilation that begins too late would run beside the race and disturb it.
                now = time.perf_counter()
                share = max(until - now, 0.0) / max(now - start, 1e-9)
                count = 2 * count if share >= 2.0 else int(share * len(some)) if share >= 0.5 else 0
        self.compiler.leave_quick(waiting)
        return raced

    def _look(self, numbers: Sequence[int], quick_ones: QuickCandidates, deadline: float) -> dict[int, float]:
        """Seconds of the shortest of a few runs of each of these; no rounds of the race.

        The standard runs with them: it shows how much the device's speed has changed since the first look.
        """
        if not numbers:
            return {}
        standard = quick_ones.standard
        together = list(numbers)
        # One that failed in an earlier look runs no more.
        if standard is not None and standard not in numbers and self.candidates.runs(standard):
            together.append(standard)
        sampler = self._sampler(together, deadline, is_told=False)
        outcome = sampler.race(least_rounds=1, most_rounds=_LOOKS, seed=self.seed)
        lanes = zip(together, outcome.lanes, strict=True)
        return {number: math.exp(min(lane.samples.values())) for number, lane in lanes if lane.samples}

    def _promising(self, numbers: Sequence[int], quick_ones: QuickCandidates) -> list[int]:
        """The candidates that may still win by having their parts timed; of the others it is noted why not."""
        found = {number: quick_ones.why_hopeless(number) for number in numbers}
        for number, why in found.items():
            if why is None:
                continue
            # Round 0 marks the time of a quick program, which does not compare with those of the race.
            self.candidates.advance(number, "timed", message=why.message, dropped_round=0)
            self.note_seconds(number, quick_ones.seconds[number], why.ratio)
        return [number for number, why in found.items() if why is None]

    def note_seconds(self, number: int, seconds: float, ratio: float) -> None:
        """Tells the observer a candidate's seconds, and its ratio to the best."""
        cfg, name = self.candidates.cfg(number), self.candidates.program_name(number)
        self._observer.dropped(cfg, name, seconds=seconds, ratio=ratio, clock=self._clock_name)

    def close(self) -> None:
        """Lets the compiling threads go."""
        self.compiler.close()

    def _sampler(
        self,
        numbers: Sequence[int],
        deadline: float,
        *,
        told: Callable[[Mapping[int, float], int], None] = lambda seconds, total: None,
        tells_drops: bool = False,
        is_told: bool = True,
    ) -> RoundSampler:
        at_work: list[tuple[Any, Doing]] = []

        def turn(place: int | None, doing: str) -> None:
            if place is None:
                for cfg, was_doing in at_work:
                    self._observer.came_back(cfg, was_doing)
                at_work.clear()
                return
            at_work[:] = [(self.candidates.cfg(numbers[place]), "trace" if doing == "trace" else "race")]
            self._observer.trying(*at_work[0])

        def dropped(place: int, seconds: float, ratio: float) -> None:
            self._clock_name = str(sampler.clock.name)
            self.note_seconds(numbers[place], seconds, ratio)

        def watch(seconds: Mapping[int, float], total: int) -> None:
            told(seconds, total)
            # The time of a quickly compiled program is no measurement of its candidate.
            found = {numbers[place]: s for place, s in seconds.items() if not self.compiler.is_quick(numbers[place])}
            if is_told and found:
                self._told_rounds(found, str(sampler.clock.name))

        sampler = RoundSampler(
            *(self._clock, self.candidates.running, self.leaves, numbers),
            warmup=self._warmup,
            deadline=deadline,
            seed=self.seed,
            watch=watch,
            turn=turn,
            dropped=dropped if tells_drops else lambda place, seconds, ratio: None,
            others=[case.leaves for case in self.checker.sets()[1:]],
        )
        return sampler


def finished(
    record: Record,
    candidates: CandidateSet,
    numbers: Sequence[int],
    outcome: Outcome,
    *,
    heuristic: int | None,
    late: bool,
) -> Record:
    """The record of a race of these candidates, with the outcomes of all others."""
    for number, lane in zip(numbers, outcome.lanes, strict=True):
        if lane.failure is not None:
            candidates.fail(number, lane.failure, "runtime", samples_s=lane.seconds)
        elif lane.samples:
            candidates.advance(number, "timed", samples_s=lane.seconds, dropped_round=lane.dropped_round)
        # A candidate that a first look has timed keeps its samples.
        elif candidates.state(number) != "timed":
            candidates.advance(number, "timeout", message=NOT_TIMED)
    order = [numbers[place] for place in outcome.order]
    trials = candidates.trials()
    return replace(
        record,
        trials=trials,
        winner=order[0] if order else None,
        runner_up=order[1] if len(order) > 1 else None,
        heuristic=heuristic,
        tied=tuple(numbers[place] for place in outcome.tied),
        gain=_gain(outcome, numbers, heuristic),
        stop=_stop(bool(order), trials, late),
    )


def _stop(decided: bool, trials: Sequence[Trial], late: bool) -> Stop:
    """The reason that a race ended: `deadline`, not `failed`, if candidates only lacked time."""
    if late and (decided or any(trial.status == "timeout" for trial in trials)):
        return "deadline"
    return "finished" if decided else "failed"


def _gain(outcome: Outcome, numbers: Sequence[int], heuristic: int | None) -> tuple[float, float, float] | None:
    """The heuristic's time over the winner's: middle, low and high end of the samples of rounds that had both."""
    if heuristic is None or heuristic not in numbers or not outcome.order:
        return None
    theirs, best = outcome.lanes[numbers.index(heuristic)].samples, outcome.lanes[outcome.order[0]].samples
    ratios = sorted(math.exp(theirs[r] - best[r]) for r in theirs.keys() & best.keys())
    if not ratios:
        return None
    # An interval for the median from the order of the paired ratios: about 95% by the normal approximation.
    half = math.ceil(0.98 * math.sqrt(len(ratios)))
    low = ratios[low_end(len(ratios))]
    high = ratios[min(len(ratios) - 1, len(ratios) // 2 + half)]
    return median(ratios), low, high


def told_with_gain(watch: Watch, heuristic: int | None) -> Callable[[Mapping[int, float], int], None]:
    """Tells the best of each round, and its gain over the heuristic cfg's latest time."""
    latest = math.nan

    def tell(seconds: Mapping[int, float], total: int) -> None:
        nonlocal latest
        if not seconds:
            return
        best = min(seconds.values())
        latest = latest if heuristic is None else seconds.get(heuristic, latest)
        gain = latest / best if best > 0 and math.isfinite(latest) else None
        watch(Step("timing", total - len(seconds), total, best, gain))

    return tell
