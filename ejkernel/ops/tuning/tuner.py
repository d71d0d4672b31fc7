"""The tuner: compiles the candidates, checks that they agree, races them and keeps a record of it all."""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Generic, final

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
from ..timing.compile_pool import JaxSettings
from ..timing.profiler import ProfilerUnavailable
from ..timing.program import CompiledProgram, stage
from ..timing.sampler import once, usual_clock
from .candidates import found_meanwhile
from .job import TuningJob
from .journal.observer import NoObserver, NoPriorResults, PriorResults, StepObserver
from .journal.resume import journalled
from .progress import Phases, Watch, unseen
from .runner import FOR_MEASURING, InProcessRunner, Runner
from .search.effort import FEW, effort_named
from .search.strategy import Strategy

if TYPE_CHECKING:
    from .journal.file import Journal
    from .search.driver import SearchDriver
    from .worker.limits import Isolation
    from .worker.runner import WorkerRunner


# Held while candidates are timed: it gets the seconds that may be waited for it.
DeviceLock = Callable[[float], AbstractContextManager[Any]]
# (cfg,) where another process found the answer meanwhile.
AnsweredElsewhere = Callable[[], tuple[Any] | None]


def no_lock(wait: float) -> AbstractContextManager[Any]:
    """No lock: no other tuning uses the device."""
    return contextlib.nullcontext()


def no_answer() -> tuple[Any] | None:
    """No other process tunes the same."""
    return None


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
        """The record of this thread's latest `measure`, `autotune` or `tune`."""
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
        """The fastest candidate that agrees with the reference, or without one with the first candidate that runs."""
        record = self.tune(TuningJob(make_fn, args, kwargs, tuple(candidates), reference=reference))
        return record.cfg  # type: ignore[no-any-return]

    def tune(
        self, job: TuningJob, *, device_lock: DeviceLock = no_lock, answered_elsewhere: AnsweredElsewhere = no_answer
    ) -> Record:
        """Measures a whole job and returns its record; a `TuningError` where no candidate can be used.

        `device_lock` is held while candidates are timed, one at a time on a device; it gets the seconds that may be
        waited for it. `answered_elsewhere` is asked once it is held: (cfg,) where another process found the answer.
        """
        return PreparedTuning(self, job, device_lock, answered_elsewhere).measure()

    def prepare(
        self,
        job: TuningJob,
        *,
        device_lock: DeviceLock = no_lock,
        answered_elsewhere: AnsweredElsewhere = no_answer,
        is_next: bool = True,
    ) -> PreparedTuning:
        """Traces the candidates of a job now, on this thread; `measure` does the rest, on this one or another.

        So the next call of a program is traced while this one is measured, and `is_next` says so. A search traces when
        it measures.
        """
        prepared = PreparedTuning(self, job, device_lock, answered_elsewhere)
        prepared.trace(is_next=is_next)
        return prepared

    def searches(self, count: int) -> bool:
        """Are so many candidates too many to race them all?"""
        return count > FEW if self.strategy is not None else not self._effort.covers(count)


@final
class PreparedAhead:
    """A tuning that was traced before its turn came: how long it may take, and its observer, are known when it does."""

    def __init__(self, tuner: Tuner[Any], job: TuningJob, device_lock: DeviceLock, *, is_next: bool) -> None:
        self._watch: Watch = unseen
        watched = replace(job, watch=lambda step: self._watch(step))
        self._prepared = tuner.prepare(watched, device_lock=device_lock, is_next=is_next)

    def measure(self, seconds: float | None, watch: Watch) -> Record:
        """Compiles, checks and races within these seconds."""
        self._watch = watch
        self._prepared.allow(seconds)
        return self._prepared.measure()

    def close(self) -> None:
        """Lets everything go."""
        self._prepared.close()


@final
class PreparedTuning:
    """One job of a tuner, from its journal to its record; what is not measured has to be closed."""

    def __init__(
        self, tuner: Tuner[Any], job: TuningJob, device_lock: DeviceLock, answered_elsewhere: AnsweredElsewhere
    ) -> None:
        self.tuner = tuner
        self.job = job
        self._device_lock = device_lock
        self._answered_elsewhere = answered_elsewhere
        self.cfgs = distinct([*job.candidates, *job.seeds])
        if not self.cfgs:
            raise TuningError("there is nothing to tune: no candidates were given")
        self.searches = tuner.searches(len(self.cfgs))
        self.budget: float | None = None
        self.allow(job.seconds)
        # A search measures some of very many: what becomes of each is written down, not all their names.
        self._named = () if self.searches else self.cfgs
        self._held = contextlib.ExitStack()
        self._journal: Journal | None = None
        self._prior: PriorResults = NoPriorResults()
        self._is_open = False
        # A runner with candidates that were traced ahead, and why it is not a worker's.
        self._traced: InProcessRunner | WorkerRunner | None = None
        self._note = ""
        # Of the thread that prepares: another one that measures takes them over.
        self._thread = threading.get_ident()
        self._settings = JaxSettings.here()
        self._context = contextvars.copy_context()

    def allow(self, seconds: float | None) -> None:
        """Says how long it may take from now on; the tuner's own limits hold as well."""
        limits = [s for s in (seconds, self.tuner.seconds) if s is not None]
        if self.searches and math.isfinite(self.tuner._effort.seconds):
            limits.append(self.tuner._effort.seconds)
        self.budget = min(limits, default=None)
        self._left = math.inf if self.budget is None else self.budget

    def trace(self, *, is_next: bool) -> None:
        """Traces or exports; lets the device alone where another call is being measured, and this one `is_next`."""
        with self._within_budget(), self.job.room():
            self._open()
            if self.searches:
                return
            try:
                self._traced = self._first_runner(self._prior)
                self._begin(self._traced, is_next)
            except NotExportedError as error:
                if self.tuner.isolate or self._traced is None:
                    raise
                self._traced.close()
                self._note = _not_in_a_worker(error)
                self._traced = self._runner_here(self._prior)
                self._begin(self._traced, is_next)

    def measure(self) -> Record:
        """Compiles, checks and races; what was not measured is no answer."""
        if threading.get_ident() == self._thread:
            return self._measure()
        with self._settings.entered():
            return self._context.run(self._measure)

    def close(self) -> None:
        """Lets everything go."""
        if self._traced is not None:
            self._traced.close()
            self._traced = None
        self._held.close()

    def _measure(self) -> Record:
        tuner, job = self.tuner, self.job
        record = Record(**dict(job.about), objective=job.objective, seed=tuner.seed, budget_s=self.budget)
        with contextlib.closing(self), self._within_budget(), job.room():
            self._open()
            record = self._run(record, self._prior)
            if record.winner is None and any(trial.status == "skipped" for trial in record.trials):
                # All that were left of an earlier race are out: those that it dropped race after all.
                record = self._run(replace(record, trials=()), self._prior.without_drops())
            if self._journal is not None and record.winner is not None and record.stop == "finished":
                self._journal.finish(record, self._named)
        refused = (Trial(cfg, "invalid", reason) for cfg, reason in job.refused)
        record = replace(record, trials=(*record.trials, *refused))
        tuner._last.record = record
        _refuse_unless_measured(record, heuristic_first=job.heuristic_first)
        return record

    @contextlib.contextmanager
    def _within_budget(self) -> Iterator[None]:
        """Counts the time in a `with` block; what lies between two of them is not the tuning's."""
        start = time.perf_counter()
        self.deadline = start + self._left
        try:
            yield
        finally:
            self._left -= time.perf_counter() - start

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        clock = usual_clock(self.tuner.clock, default_device())
        opened = journalled(self.job, self._named, self.tuner.seed, clock)
        self._journal, self._prior = self._held.enter_context(opened)

    @property
    def _observer(self) -> StepObserver:
        return self._journal or NoObserver()

    def _begin(self, runner: Runner, is_next: bool) -> None:
        runner.candidates.enter(self.cfgs)
        runner.begin(*self._times(), ahead=is_next)

    def _times(self) -> tuple[float, float]:
        """The times at which compiling has to end, and the tuning has to."""
        return self.deadline - FOR_MEASURING * (self.budget or 0.0), self.deadline

    def _run(self, record: Record, prior: PriorResults) -> Record:
        runner, note = self._traced, self._note
        self._traced, self._note = None, ""
        if runner is None:
            runner = self._first_runner(prior)
        try:
            record = self._run_on(runner, record, prior)
        except (NotExportedError, IsolationError) as error:
            if self.tuner.isolate or isinstance(runner, InProcessRunner):
                raise
            note = _not_in_a_worker(error)
            if isinstance(error, IsolationError):
                warnings.warn(f"candidates run in this process: {error}", IsolationWarning, stacklevel=2)
            # A candidate that took a worker down would take this process down.
            prior = prior.without(runner.lost)
            record = self._run_on(self._runner_here(prior), record, prior)
        return replace(record, clock=record.clock + note)

    def _first_runner(self, prior: PriorResults) -> InProcessRunner | WorkerRunner:
        return self._worker_runner(prior) if self._wants_a_worker(prior) else self._runner_here(prior)

    def _runner_here(self, prior: PriorResults) -> InProcessRunner:
        tuner = self.tuner
        return InProcessRunner(
            self.job,
            seed=tuner.seed,
            device=default_device(),
            clock=tuner.clock,
            warmup=tuner.warmup,
            iters=tuner.iters,
            observer=self._observer,
            prior=prior,
        )

    def _run_on(self, runner: Runner, record: Record, prior: PriorResults) -> Record:
        """All of few candidates, or the best that a search finds among many, against each other."""
        driver, deadline = None, self.deadline
        phases = Phases()
        with contextlib.closing(runner):
            if self.searches:
                driver = self._search(runner, prior)
                record = replace(record, space=len(self.cfgs))
                phases.ended("searching")
            else:
                if not len(runner.candidates):
                    runner.candidates.enter(self.cfgs)
                runner.compile(*self._times())
                phases.ended("compiling")
            with self._device_lock(deadline - time.perf_counter()):
                phases.ended("waiting for the device")
                answer = (driver and driver.answer) or self._answered_elsewhere()
                if answer is not None:
                    return found_meanwhile(record, runner.candidates, answer[0])
                runner.check(deadline)
                # On an accelerator candidates are checked while others still compile.
                phases.ended("checking")
                numbers = driver.finalists() if driver else list(runner.candidates.running)
                heuristic = 0 if self.job.heuristic_first else None
                record = runner.race(record, numbers, deadline=deadline, heuristic=heuristic)
                phases.ended("racing")
                return replace(record, phases=phases.seconds)

    def _search(self, runner: Runner, prior: PriorResults) -> SearchDriver:
        # Imported where it is needed: most tunings are races.
        from .search.driver import SearchDriver

        driver = SearchDriver(
            self.cfgs,
            runner,
            deadline=self.deadline,
            device_lock=self._device_lock,
            answered_elsewhere=self._answered_elsewhere,
            earlier=prior.seconds(self.cfgs),
        )
        driver.run(self.tuner.strategy, self.tuner._effort, self.tuner.seed)
        return driver

    def _wants_a_worker(self, prior: PriorResults) -> bool:
        """Demanded, or worth it: ahead of the program that needs the cfg, or where a candidate may have crashed one."""
        if self.tuner.isolate is not None:
            return bool(self.tuner.isolate)
        return self.tuner.clock is None and (self.job.offline or any(map(prior.suspected, self.cfgs)))

    def _worker_runner(self, prior: PriorResults) -> WorkerRunner:
        # Imported where it is needed: most tunings are of this process.
        from .worker.limits import Isolation
        from .worker.runner import WorkerRunner

        tuner = self.tuner
        return WorkerRunner(
            self.job,
            tuner.isolate if isinstance(tuner.isolate, Isolation) else Isolation(),
            demanded=bool(tuner.isolate),
            warmup=tuner.warmup,
            iters=tuner.iters,
            seed=tuner.seed,
            observer=self._observer,
            prior=prior.in_worker(),
        )


def _not_in_a_worker(error: Exception) -> str:
    return f" (not in a worker process: {str(error)[:200]})"


def _refuse_unless_measured(record: Record, *, heuristic_first: bool) -> None:
    """Raises where nothing is known to be as good as what runs without a tuning."""
    if record.stop == "settled":
        return
    heuristic = record.trials[0] if heuristic_first else None
    late = record.stop == "deadline"
    if heuristic is not None and not heuristic.samples_s and heuristic.status in ("ok", *(["timeout"] if late else ())):
        # Tuned must never be slower than untuned.
        why = heuristic.message or "not timed"
        message = f"the time was up before the heuristic cfg was measured ({why}), so nothing is known to be faster"
        raise OutOfTimeError(message, [message], record)
    if record.winner is not None and record.trials[record.winner].samples_s:
        return
    reasons = [f"{describe(t.cfg)}: {t.status}: {t.message}" for t in record.failures]
    kind, what = (OutOfTimeError, "was measured in time") if late else (TuningError, "can be used")
    raise kind(f"no candidate {what}:\n  " + "\n  ".join(reasons), reasons, record)


def _refuse_unless_isolation(isolate: Any) -> None:
    from .worker.limits import Isolation

    if not isinstance(isolate, Isolation):
        raise SettingError(f"isolate={isolate!r} is unknown; use True, False, None or Isolation(...)")


def _whole(value: Any, name: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(f"{name}={value!r} is not a whole number of at least {least}")
