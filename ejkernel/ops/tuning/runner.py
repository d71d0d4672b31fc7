"""Where candidates are checked and timed: what every track can do, and the one in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol, final

from ..core.record import Record, Stop, Trial
from ..timing.clock import Clock
from ..timing.program import first_line
from ..timing.race import Outcome
from .candidates import CandidateSet, status_of
from .progress import Step, Watch
from .sampler import RoundSampler

# The share of a budget that compiling leaves: a candidate that is compiled and not timed cannot win.
FOR_MEASURING = 0.25
# Rounds of a few candidates: seconds of each, by number.
Rows = Sequence[Mapping[int, float]]


class Runner(Protocol):
    """A field of candidates, and the process that they run in."""

    field: CandidateSet

    def compile(self, deadline: float, end: float = math.inf) -> None:
        """Makes programs of all that entered the field, before a device is claimed; `end` is the tuning's."""

    def check(self, deadline: float) -> None:
        """Drops whoever fails or computes something else, where that can be known before anybody is timed."""

    def look(self, numbers: Sequence[int], *, rounds: int, kept: int | None, deadline: float, seed: int) -> Rows:
        """A few rounds, to rank a batch; whoever fails leaves the field's programs, and its trial says why."""

    def race(self, record: Record, numbers: Sequence[int], *, deadline: float, heuristic: int | None) -> Record:
        """The record with the outcome of a whole race."""

    def close(self) -> None:
        """Lets everything go."""


@final
class InProcessRunner:
    """This process."""

    def __init__(self, field: CandidateSet, *, clock: Clock | None, warmup: int, iters: int) -> None:
        self.field = field
        self._given = clock
        self._warmup = warmup
        self._iters = iters

    def compile(self, deadline: float, end: float = math.inf) -> None:
        """Compiled, and what is right is known."""
        self.field.compile(deadline, end)
        self.field.prepare()

    def check(self, deadline: float) -> None:
        """Each runs on two sets of inputs."""
        self.field.check(deadline)

    def look(self, numbers: Sequence[int], *, rounds: int, kept: int | None, deadline: float, seed: int) -> Rows:
        """Timed here."""
        watch = self._stopwatch(numbers, deadline)
        place = None if kept is None else numbers.index(kept)
        outcome = watch.race(least_rounds=rounds, most_rounds=rounds, protected=place, seed=seed)
        rows: list[dict[int, float]] = [{} for _ in range(outcome.rounds)]
        for number, lane in zip(numbers, outcome.lanes, strict=True):
            if lane.failure is not None:
                self.field.drop(number, lane.failure)
                continue
            for r, value in lane.samples.items():
                rows[r][number] = math.exp(value)
        return rows

    def race(self, record: Record, numbers: Sequence[int], *, deadline: float, heuristic: int | None) -> Record:
        """Raced here."""
        place = numbers.index(heuristic) if heuristic is not None and heuristic in numbers else None
        watch = self._stopwatch(numbers, deadline, told=told_with_gain(self.field.job.watch, place), goes_on=True)
        outcome = watch.race(least_rounds=self._iters, protected=place, seed=self.field.seed)
        record = replace(record, objective=self.field.objective, clock=watch.clock_name)
        late = self.field.late or time.perf_counter() >= deadline
        return finished(record, self.field, numbers, outcome, heuristic=heuristic, late=late)

    def close(self) -> None:
        """Lets the compiling threads go."""
        self.field.close()

    def _stopwatch(
        self,
        numbers: Sequence[int],
        deadline: float,
        *,
        told: Callable[[Mapping[int, float], int], None] = lambda seconds, total: None,
        goes_on: bool = False,
    ) -> RoundSampler:
        job = self.field.job
        return RoundSampler(
            self._given,
            self.field.programs,
            self.field.leaves,
            numbers,
            warmup=self._warmup,
            deadline=deadline,
            seed=self.field.seed,
            watch=told,
            cfgs=[self.field.trials[number].cfg for number in numbers],
            witness=job.witness,
            past=job.past.rounds if goes_on else None,
        )


def finished(
    record: Record, field: CandidateSet, numbers: Sequence[int], outcome: Outcome, *, heuristic: int | None, late: bool
) -> Record:
    """The record of a race of these numbers; what the field knows of the others is in it too."""
    trials = field.trials
    for place, number in enumerate(numbers):
        lane, trial = outcome.lanes[place], trials[number]
        if lane.failure is not None:
            status = status_of(lane.failure, "runtime")
            trial = replace(trial, samples_s=lane.seconds, status=status, message=first_line(lane.failure))
            field.job.witness.failed(trial, field.texts.get(number, ""))
        elif lane.samples:
            trial = replace(trial, samples_s=lane.seconds, dropped_round=lane.dropped_round)
        # What a first look has timed stays known.
        elif not trial.samples_s:
            trial = replace(trial, status="timeout", message="not timed when the time was up")
        trials[number] = trial
    field.share_with_twins()
    order = [numbers[place] for place in outcome.order]
    return replace(
        record,
        trials=tuple(trials),
        winner=order[0] if order else None,
        runner_up=order[1] if len(order) > 1 else None,
        heuristic=heuristic,
        tied=tuple(numbers[place] for place in outcome.tied),
        gain=_gain(outcome, numbers, heuristic),
        stop=_stop(bool(order), trials, late),
    )


def _stop(decided: bool, trials: Sequence[Trial], late: bool) -> Stop:
    """Why a race ended; candidates that only had no time did not fail."""
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
    low = ratios[max(0, len(ratios) // 2 - half)]
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
