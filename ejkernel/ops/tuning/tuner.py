"""The tuner: compiles the candidates, checks that they agree, races them and keeps a record of it all."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Generic

import jax
import numpy as np

from .. import _jax
from ..core.codec import describe
from ..core.device import default_device
from ..core.errors import IsolationError, NotExportedError, OutOfTimeError, SettingError, TuningError
from ..core.invocation import Cfg
from ..core.record import Objective, Record, Stop, Trial
from ..timing import inputs
from ..timing.clock import Clock, WallClock
from ..timing.profiler import ProfilerUnavailable
from ..timing.program import Program, first_line, stage
from .field import Field, found_meanwhile, status_of
from .job import Job, distinct
from .progress import Step, Watch
from .race import Outcome
from .resume import journalled
from .search.effort import FEW, effort_named
from .search.strategy import Strategy
from .stopwatch import Stopwatch, once

# The share of a budget that compiling leaves.
_FOR_MEASURING = 0.25


if TYPE_CHECKING:
    from .heat import Isolation


class IsolationWarning(UserWarning):
    """Candidates that should have run in a process of their own, and did not."""


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
        isolate: bool | Isolation | None = None,
        effort: str = "default",
        strategy: Strategy | None = None,
    ) -> None:
        _whole(warmup, "warmup", 0)
        _whole(iters, "iters", 1)
        if seconds is not None and not seconds > 0:
            raise SettingError(f"seconds={seconds!r} is no budget; use a positive number, or None for no limit")
        if clock is not None and not (hasattr(clock, "time") or hasattr(clock, "round")):
            raise SettingError(f"clock={clock!r} is no clock; it needs a name and time(call, leaves, calls)")
        if not isinstance(isolate, (bool, type(None))):
            _refuse_unless_isolation(isolate)
        if isolate and clock is not None:
            raise SettingError(f"clock={clock!r} cannot be read in a worker process; leave out isolate or the clock")
        # A process of its own for the candidates: always, never, or (None) where it is worth its start.
        self.isolate = isolate
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
        # A search measures some of very many: what becomes of each is written down, not all their names.
        named = () if self._searches(len(cfgs)) else cfgs
        with job.room(), journalled(job, named, self.seed) as (job, journal):
            record = _or_from_before(self._run(job, record, cfgs, deadline))
            if journal is not None and record.winner is not None and record.stop == "finished":
                journal.finish(record.cfg, named)
        refused = (Trial(cfg, "invalid", reason) for cfg, reason in job.refused)
        record = replace(record, trials=(*record.trials, *refused))
        self._last.record = record
        if job.heuristic_first and record.stop == "deadline" and record.trials[0].status == "timeout":
            # Tuned must never be slower than untuned.
            message = "the time was up before the heuristic cfg was measured, so nothing is known to be faster"
            raise OutOfTimeError(message, [message], record)
        if record.winner is None:
            reasons = [f"{describe(t.cfg)}: {t.status}: {t.message}" for t in record.failures]
            raise TuningError("no candidate can be used:\n  " + "\n  ".join(reasons), reasons, record)
        return record

    def _searches(self, count: int) -> bool:
        """Are so many candidates too many to race them all?"""
        return count > FEW if self.strategy is not None else not self._effort.covers(count)

    def _run(self, job: Job, record: Record, cfgs: Sequence[Any], deadline: float) -> Record:
        if self._searches(len(cfgs)):
            return self._hunt(job, record, cfgs, deadline)
        note = ""
        if self._wants_a_worker(job, cfgs):
            try:
                return self._run_elsewhere(job, record, cfgs, deadline)
            except (NotExportedError, IsolationError) as error:
                if self.isolate:
                    raise
                note = f" (not in a worker process: {str(error)[:200]})"
                if isinstance(error, IsolationError):
                    warnings.warn(f"candidates run in this process: {error}", IsolationWarning, stacklevel=2)
        with contextlib.closing(Field(job, cfgs, seed=self.seed, device=default_device())) as field:
            # Part of the time is for measuring: a candidate that is compiled and not timed cannot win.
            # Without a heuristic cfg to fall back on one candidate there must be, however late.
            latest = deadline if job.heuristic_first else math.inf
            field.compile(deadline - _FOR_MEASURING * (record.budget_s or 0.0), latest)
            field.prepare()
            with job.turn(deadline - time.perf_counter()):
                settled = job.settled()
                if settled is not None:
                    return found_meanwhile(record, field, settled[0])
                field.check(deadline)
                record = self._race(job, record, field, list(field.programs), deadline)
        return replace(record, clock=record.clock + note)

    def _hunt(self, job: Job, record: Record, cfgs: Sequence[Any], deadline: float) -> Record:
        """Measures as many as the effort allows, and races the best few."""
        if self.isolate:
            raise SettingError(
                f"isolate={self.isolate!r} does not go with a search of {len(cfgs):,} candidates, which runs in this "
                "process; use effort='exhaustive', or leave it out"
            )
        # Imported where it is needed: most tunings are races, in this process.
        from .hunt import Hunt

        with contextlib.closing(Field(job, (), seed=self.seed, device=default_device())) as field:
            hunt = Hunt(job, cfgs, field, clock=self.clock, warmup=self.warmup, deadline=deadline)
            hunt.run(self.strategy, self._effort, self.seed)
            record = replace(record, space=len(cfgs))
            with job.turn(deadline - time.perf_counter()):
                settled = hunt.settled or job.settled()
                if settled is not None:
                    return found_meanwhile(record, field, settled[0])
                return self._race(job, record, field, hunt.finalists(), deadline)

    def _race(self, job: Job, record: Record, field: Field, numbers: list[int], deadline: float) -> Record:
        protected = numbers.index(0) if job.heuristic_first and 0 in numbers else None
        watch = Stopwatch(
            self.clock,
            field.programs,
            field.leaves,
            numbers,
            warmup=self.warmup,
            deadline=deadline,
            seed=self.seed,
            watch=_told_with_gain(job.watch, protected),
            cfgs=[field.trials[number].cfg for number in numbers],
            witness=job.witness,
            past=job.past.rounds,
        )
        outcome = watch.race(least_rounds=self.iters, protected=protected, seed=self.seed)
        record = replace(record, objective=field.objective, clock=watch.clock_name)
        return _finish(record, job, field, numbers, outcome, late=field.late or time.perf_counter() >= deadline)

    def _wants_a_worker(self, job: Job, cfgs: Sequence[Any]) -> bool:
        """Demanded, or worth it: ahead of the program that needs the cfg, or where a candidate may have crashed one."""
        if self.isolate is not None:
            return bool(self.isolate)
        return self.clock is None and (job.offline or any(map(job.past.suspected, cfgs)))

    def _run_elsewhere(self, job: Job, record: Record, cfgs: Sequence[Any], deadline: float) -> Record:
        from .heat import Isolation
        from .isolation import tune_elsewhere

        return tune_elsewhere(
            job,
            record,
            cfgs,
            self.isolate if isinstance(self.isolate, Isolation) else Isolation(),
            demanded=bool(self.isolate),
            warmup=self.warmup,
            iters=self.iters,
            seed=self.seed,
            deadline=deadline,
            finish=_finish,
        )


def _or_from_before(record: Record) -> Record:
    """Where everybody who ran again is out, the best of those whose samples were taken over."""
    timed = [n for n, trial in enumerate(record.trials) if trial.status == "ok" and trial.samples_s]
    if record.winner is not None or not timed:
        return record
    best = min(timed, key=lambda n: record.trials[n].seconds or math.inf)
    return replace(record, winner=best, stop="finished")


def _told_with_gain(watch: Watch, heuristic: int | None) -> Callable[[Mapping[int, float], int], None]:
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


def _finish(record: Record, job: Job, field: Field, numbers: list[int], outcome: Outcome, *, late: bool) -> Record:
    trials = field.trials
    for place, number in enumerate(numbers):
        lane = outcome.lanes[place]
        trials[number] = replace(trials[number], samples_s=lane.seconds, dropped_round=lane.dropped_round)
        if lane.failure is not None:
            status = status_of(lane.failure, "runtime")
            trials[number] = replace(trials[number], status=status, message=first_line(lane.failure))
            job.witness.failed(trials[number], field.texts.get(number, ""))
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


def _refuse_unless_isolation(isolate: Any) -> None:
    from .heat import Isolation

    if not isinstance(isolate, Isolation):
        raise SettingError(f"isolate={isolate!r} is unknown; use True, False, None or Isolation(...)")


def _whole(value: Any, name: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(f"{name}={value!r} is not a whole number of at least {least}")
