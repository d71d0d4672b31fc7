"""The tuner: compiles the candidates, checks that they agree, races them and keeps a record of it all."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Generic

import jax
import numpy as np

from .. import _jax
from ..core.codec import describe
from ..core.device import default_device
from ..core.errors import SettingError, TuningError
from ..core.invocation import Cfg
from ..core.record import Objective, Record, Trial
from ..timing import inputs
from ..timing.clock import Clock, WallClock
from ..timing.profiler import ProfilerUnavailable
from ..timing.program import Program, first_line, stage
from .field import Field, status_of
from .hunt import Hunt
from .job import Job, distinct
from .race import Outcome
from .search.effort import FEW, effort_named
from .search.strategy import Strategy
from .stopwatch import Stopwatch, once


class Tuner(Generic[Cfg]):
    """Finds the fastest of some candidates that compute the same thing."""

    def __init__(
        self,
        warmup: int = 1,
        iters: int = 3,
        *,
        seed: int = 0,
        clock: Clock | None = None,
        seconds: float | None = None,
        effort: str = "default",
        strategy: Strategy | None = None,
    ) -> None:
        _whole(warmup, "warmup", 0)
        _whole(iters, "iters", 1)
        if seconds is not None and not seconds > 0:
            raise SettingError(f"seconds={seconds!r} is no budget; use a positive number, or None for no limit")
        if clock is not None and not (hasattr(clock, "time") or hasattr(clock, "round")):
            raise SettingError(f"clock={clock!r} is no clock; it needs a name and time(call, leaves, calls)")
        if strategy is not None and (isinstance(strategy, type) or not isinstance(strategy, Strategy)):
            raise SettingError(f"strategy={strategy!r} is none; it needs propose(space, known, count, rng)")
        self.warmup = warmup
        self.iters = iters
        self.effort = effort
        self._effort = effort_named(effort)
        # None: the one that fits the candidates.
        self.strategy = strategy
        self.seed = seed
        self.seconds = seconds
        # None: the device's own clock where there is one, else the host's.
        self.clock = clock
        self._last = threading.local()

    @property
    def record(self) -> Record | None:
        """What this thread's latest `measure`, `autotune` or `tune` left behind."""
        return getattr(self._last, "record", None)

    def measure(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """Median seconds of `iters` runs after `warmup` runs; array leaves are arguments, all else is constant."""
        objective: Objective = "forward+backward" if getattr(fn, "_ejk_validate_backward", False) else "forward"
        with _jax.clean_room():
            call = inputs.take_apart(args, kwargs)
            leaves = inputs.concrete(call.leaves, np.random.default_rng(self.seed))
            start = time.perf_counter()
            program = stage(fn, call, leaves, objective, seed=self.seed).build()
            compile_s = time.perf_counter() - start
            for _ in range(self.warmup):
                jax.block_until_ready(program.call(*leaves))
            clock, samples = self._samples(program, leaves)
        trial = Trial(None, message=program.notes, compile_s=compile_s, samples_s=samples)
        self._last.record = Record(objective=program.objective, clock=clock, seed=self.seed, trials=(trial,), winner=0)
        return median(samples)

    def _samples(self, program: Program, leaves: Sequence[Any]) -> tuple[str, tuple[float, ...]]:
        clock: Any = self.clock or WallClock()
        try:
            return clock.name, tuple(once(clock, program, leaves) for _ in range(self.iters))
        except ProfilerUnavailable as error:
            wall = WallClock()
            return f"{wall.name} ({error})", tuple(once(wall, program, leaves) for _ in range(self.iters))

    def autotune(
        self,
        make_fn: Callable[[Cfg], Callable[..., Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        candidates: Iterable[Cfg],
        *,
        reference: Callable[..., Any] | None = None,
    ) -> Cfg:
        """The fastest candidate whose output agrees with the reference's, else with the first one that runs."""
        record = self.tune(Job(make_fn, args, kwargs, tuple(candidates), reference=reference))
        return record.cfg  # type: ignore[no-any-return]

    def tune(self, job: Job) -> Record:
        """The same for a whole job; a `TuningError` where no candidate can be used."""
        cfgs = distinct([*job.candidates, *job.seeds])
        if not cfgs:
            raise TuningError("there is nothing to tune: no candidates were given")
        limits = [s for s in (job.seconds, self.seconds) if s is not None]
        if self._searches(len(cfgs)) and math.isfinite(self._effort.seconds):
            limits.append(self._effort.seconds)
        budget = min(limits, default=None)
        deadline = math.inf if budget is None else time.perf_counter() + budget
        record = Record(**dict(job.about), objective=job.objective, seed=self.seed, budget_s=budget)
        with job.room():
            record = self._run(job, record, cfgs, deadline)
        self._last.record = record
        if record.winner is None:
            reasons = [f"{describe(t.cfg)}: {t.status}: {t.message}" for t in record.trials]
            raise TuningError("no candidate can be used:\n  " + "\n  ".join(reasons), reasons)
        return record

    def _searches(self, count: int) -> bool:
        """Are so many candidates too many to race them all?"""
        return count > FEW if self.strategy is not None else not self._effort.covers(count)

    def _run(self, job: Job, record: Record, cfgs: Sequence[Any], deadline: float) -> Record:
        if self._searches(len(cfgs)):
            return self._hunt(job, record, cfgs, deadline)
        field = Field(job, cfgs, seed=self.seed, device=default_device())
        field.compile(deadline)
        field.prepare()
        with job.turn(deadline - time.perf_counter()):
            settled = job.settled()
            if settled is not None:
                return _found_elsewhere(record, field, settled)
            field.check(deadline)
            return self._race(job, record, field, list(field.programs), deadline)

    def _hunt(self, job: Job, record: Record, cfgs: Sequence[Any], deadline: float) -> Record:
        """Measures as many as the effort allows, and races the best few."""
        field = Field(job, (), seed=self.seed, device=default_device())
        hunt = Hunt(job, cfgs, field, clock=self.clock, warmup=self.warmup, deadline=deadline)
        hunt.run(self.strategy, self._effort, self.seed)
        record = replace(record, space=len(cfgs))
        with job.turn(deadline - time.perf_counter()):
            settled = hunt.settled or job.settled()
            if settled is not None:
                return _found_elsewhere(record, field, settled)
            return self._race(job, record, field, hunt.finalists(), deadline)

    def _race(self, job: Job, record: Record, field: Field, numbers: list[int], deadline: float) -> Record:
        watch = Stopwatch(self.clock, field.programs, field.leaves, numbers, warmup=self.warmup, deadline=deadline)
        protected = numbers.index(0) if job.heuristic_first and 0 in numbers else None
        outcome = watch.race(least_rounds=self.iters, protected=protected, seed=self.seed)
        record = replace(record, objective=field.objective, clock=watch.clock_name)
        return _finish(record, job, field, numbers, outcome, late=time.perf_counter() >= deadline)


def _found_elsewhere(record: Record, field: Field, settled: tuple[Any]) -> Record:
    found = Trial(settled[0], "skipped", "found by another process meanwhile")
    return replace(record, stop="settled", trials=(*field.trials, found), winner=len(field.trials))


def _finish(record: Record, job: Job, field: Field, numbers: list[int], outcome: Outcome, *, late: bool) -> Record:
    trials = field.trials
    for place, number in enumerate(numbers):
        lane = outcome.lanes[place]
        trials[number] = replace(trials[number], samples_s=lane.seconds, dropped_round=lane.dropped_round)
        if lane.failure is not None:
            status = status_of(lane.failure, "runtime")
            trials[number] = replace(trials[number], status=status, message=first_line(lane.failure))
        elif not lane.samples:
            trials[number] = replace(trials[number], status="timeout", message="not timed when the time was up")
    field.share_with_twins()
    order = [numbers[place] for place in outcome.order]
    heuristic = 0 if job.heuristic_first else None
    return replace(
        record,
        trials=tuple(trials),
        winner=order[0] if order else None,
        runner_up=order[1] if len(order) > 1 else None,
        heuristic=heuristic,
        tied=tuple(numbers[place] for place in outcome.tied),
        gain=_gain(trials, heuristic, order[0] if order else None),
        stop="failed" if not order else "deadline" if late else "finished",
    )


def _gain(trials: Sequence[Trial], heuristic: int | None, winner: int | None) -> tuple[float, float, float] | None:
    """The heuristic's time over the winner's: middle, low and high end of the paired samples."""
    if heuristic is None or winner is None or not trials[heuristic].samples_s:
        return None
    pairs = zip(trials[heuristic].samples_s, trials[winner].samples_s, strict=False)
    ratios = sorted(a / b for a, b in pairs)
    # An interval for the median from the order of the paired ratios: about 95% by the normal approximation.
    half = math.ceil(0.98 * math.sqrt(len(ratios)))
    low = ratios[max(0, len(ratios) // 2 - half)]
    high = ratios[min(len(ratios) - 1, len(ratios) // 2 + half)]
    return median(ratios), low, high


def _whole(value: Any, name: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(f"{name}={value!r} is not a whole number of at least {least}")
