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
from ..core.cfg import distinct
from ..core.codec import describe
from ..core.device import default_device
from ..core.errors import IsolationError, NotExportedError, OutOfTimeError, SettingError, TuningError
from ..core.invocation import Cfg
from ..core.record import Objective, Record, Trial
from ..timing import inputs
from ..timing.clock import Clock, WallClock
from ..timing.profiler import ProfilerUnavailable
from ..timing.program import CompiledProgram, stage
from .candidates import CandidateSet, found_meanwhile
from .job import TuningJob
from .journal.resume import CARRIED, journalled
from .runner import FOR_MEASURING, InProcessRunner, Runner
from .sampler import once, usual_clock
from .search.effort import FEW, effort_named
from .search.strategy import Strategy

if TYPE_CHECKING:
    from .search.driver import SearchDriver
    from .worker.limits import Isolation
    from .worker.runner import WorkerRunner


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
            call = inputs.flatten_call(args, kwargs)
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

    def _samples(self, program: CompiledProgram, leaves: Sequence[Any]) -> tuple[str, tuple[float, ...]]:
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
        record = self.tune(TuningJob(make_fn, args, kwargs, tuple(candidates), reference=reference))
        return record.cfg  # type: ignore[no-any-return]

    def tune(self, job: TuningJob) -> Record:
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
        clock = usual_clock(self.clock, default_device())
        with job.room(), journalled(job, named, self.seed, clock) as (job, journal):
            record = _or_from_before(_by_one_clock(self._run(job, record, cfgs, deadline), job))
            if journal is not None and record.winner is not None and record.stop == "finished":
                journal.finish(record.cfg, named)
        refused = (Trial(cfg, "invalid", reason) for cfg, reason in job.refused)
        record = replace(record, trials=(*record.trials, *refused))
        self._last.record = record
        if job.heuristic_first and record.stop == "deadline" and record.trials[0].status == "timeout":
            # Tuned must never be slower than untuned.
            why = record.trials[0].message
            message = f"the time was up before the heuristic cfg was measured ({why}), so nothing is known to be faster"
            raise OutOfTimeError(message, [message], record)
        if record.winner is None:
            reasons = [f"{describe(t.cfg)}: {t.status}: {t.message}" for t in record.failures]
            raise TuningError("no candidate can be used:\n  " + "\n  ".join(reasons), reasons, record)
        return record

    def _searches(self, count: int) -> bool:
        """Are so many candidates too many to race them all?"""
        return count > FEW if self.strategy is not None else not self._effort.covers(count)

    def _run(self, job: TuningJob, record: Record, cfgs: Sequence[Any], deadline: float) -> Record:
        note = ""
        if self._wants_a_worker(job, cfgs):
            track = self._elsewhere(job)
            try:
                return self._run_on(track, record, cfgs, deadline)
            except (NotExportedError, IsolationError) as error:
                if self.isolate:
                    raise
                note = f" (not in a worker process: {str(error)[:200]})"
                if isinstance(error, IsolationError):
                    warnings.warn(f"candidates run in this process: {error}", IsolationWarning, stacklevel=2)
            # Whoever took a worker down would take this process down.
            job = replace(job, past=job.past.without(track.lost))
        field = CandidateSet(job, (), seed=self.seed, device=default_device())
        here = InProcessRunner(field, clock=self.clock, warmup=self.warmup, iters=self.iters)
        record = self._run_on(here, record, cfgs, deadline)
        return replace(record, clock=record.clock + note)

    def _run_on(self, track: Runner, record: Record, cfgs: Sequence[Any], deadline: float) -> Record:
        """All of few candidates, or the best that a search finds among many, against each other."""
        job, hunt = track.field.job, None
        with contextlib.closing(track):
            if self._searches(len(cfgs)):
                hunt = self._hunt(track, cfgs, deadline)
                record = replace(record, space=len(cfgs))
            else:
                track.field.enter(cfgs)
                track.compile(deadline - FOR_MEASURING * (record.budget_s or 0.0), deadline)
            with job.turn(deadline - time.perf_counter()):
                settled = (hunt and hunt.settled) or job.settled()
                if settled is not None:
                    return found_meanwhile(record, track.field, settled[0])
                track.check(deadline)
                numbers = hunt.finalists() if hunt else sorted(track.field.programs)
                heuristic = 0 if job.heuristic_first else None
                return track.race(record, numbers, deadline=deadline, heuristic=heuristic)

    def _hunt(self, track: Runner, cfgs: Sequence[Any], deadline: float) -> SearchDriver:
        # Imported where it is needed: most tunings are races.
        from .search.driver import SearchDriver

        hunt = SearchDriver(cfgs, track, deadline=deadline)
        hunt.run(self.strategy, self._effort, self.seed)
        return hunt

    def _wants_a_worker(self, job: TuningJob, cfgs: Sequence[Any]) -> bool:
        """Demanded, or worth it: ahead of the program that needs the cfg, or where a candidate may have crashed one."""
        if self.isolate is not None:
            return bool(self.isolate)
        return self.clock is None and (job.offline or any(map(job.past.suspected, cfgs)))

    def _elsewhere(self, job: TuningJob) -> WorkerRunner:
        # Imported where it is needed: most tunings are of this process.
        from .worker.limits import Isolation
        from .worker.runner import WorkerRunner

        isolation = self.isolate if isinstance(self.isolate, Isolation) else Isolation()
        return WorkerRunner(
            job, isolation, demanded=bool(self.isolate), warmup=self.warmup, iters=self.iters, seed=self.seed
        )


def _by_one_clock(record: Record, job: TuningJob) -> Record:
    """Without what an earlier tuning timed by a clock that could not be had now."""
    before = job.past.rounds.clock
    if record.clock.startswith(before) or record.stop == "settled":
        return record
    message = f"timed by an earlier tuning by another clock ({before})"
    trials = [
        replace(t, status="skipped", message=message, samples_s=()) if t.message == CARRIED else t
        for t in record.trials
    ]
    return replace(record, trials=tuple(trials))


def _or_from_before(record: Record) -> Record:
    """Where everybody who ran again is out, the best of those whose samples were taken over."""
    timed = [n for n, trial in enumerate(record.trials) if trial.status == "ok" and trial.samples_s]
    if record.winner is not None or not timed:
        return record
    best = min(timed, key=lambda n: record.trials[n].seconds or math.inf)
    return replace(record, winner=best, stop="finished")


def _refuse_unless_isolation(isolate: Any) -> None:
    from .worker.limits import Isolation

    if not isinstance(isolate, Isolation):
        raise SettingError(f"isolate={isolate!r} is unknown; use True, False, None or Isolation(...)")


def _whole(value: Any, name: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(f"{name}={value!r} is not a whole number of at least {least}")
