"""One tuning of a tuner, from its journal to its record: traced ahead of its turn, or measured at once.

The candidates run in this process or in a worker; where the worker cannot have them, or cannot be started, they run
here after all. Few candidates are raced at once; of many a search finds the best, which are raced then.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from ..core.cfg import distinct
from ..core.codec import describe
from ..core.device import default_device
from ..core.errors import IsolationError, NotExportedError, OutOfTimeError, TuningError
from ..core.record import Record, Trial
from ..timing.compile_pool import JaxSettings
from ..timing.sampler import usual_clock
from .candidates import found_meanwhile
from .interrupted import TuningInterrupted
from .job import AnsweredElsewhere, DeviceLock, TuningJob, program_end
from .journal.observer import NoObserver, NoPriorResults, PriorResults, StepObserver
from .journal.resume import journalled
from .progress import Phases, Watch, unseen
from .runner import FOR_MEASURING, InProcessRunner, Runner
from .search.effort import Effort

if TYPE_CHECKING:
    from .journal.file import Journal
    from .search.driver import SearchDriver
    from .tuner import Tuner
    from .worker.runner import WorkerRunner


class IsolationWarning(UserWarning):
    """Candidates that should have run in a process of their own, and did not."""


@final
class PreparedAhead:
    """A tuning that is traced before its turn; its seconds and its watcher are known only when the turn comes."""

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
    """One job of a tuner, from its journal to its record; without `measure`, `close` has to be called."""

    def __init__(
        self,
        tuner: Tuner[Any],
        job: TuningJob,
        device_lock: DeviceLock,
        answered_elsewhere: AnsweredElsewhere,
        *,
        effort: Effort,
        keep: Callable[[Record], None],
    ) -> None:
        self.tuner = tuner
        self._effort = effort
        # Gets the record, also of a tuning that failed.
        self._keep = keep
        self.job = job
        self._device_lock = device_lock
        self._answered_elsewhere = answered_elsewhere
        self.cfgs = distinct([*job.candidates, *job.seeds])
        if not self.cfgs:
            raise TuningError("there is nothing to tune: no candidates were given")
        self.searches = tuner.searches(len(self.cfgs))
        self.budget: float | None = None
        self.allow(job.seconds)
        # The candidates that the journal lists at its beginning: none for a search, which measures few of very many.
        self._named = () if self.searches else self.cfgs
        self._held = contextlib.ExitStack()
        self._journal: Journal | None = None
        self._prior: PriorResults = NoPriorResults()
        self._is_open = False
        # The runner with the candidates that `trace` has traced, and a note for the record where it is no worker's.
        self._traced: InProcessRunner | WorkerRunner | None = None
        self._note = ""
        # JAX settings and context of the preparing thread: if another thread measures, it enters them.
        self._thread = threading.get_ident()
        self._settings = JaxSettings.here()
        self._context = contextvars.copy_context()

    def allow(self, seconds: float | None) -> None:
        """Sets the seconds that the tuning may take from now on; the tuner's own limits hold as well."""
        limits = [s for s in (seconds, self.tuner.seconds) if s is not None]
        if self.searches and math.isfinite(self._effort.seconds):
            limits.append(self._effort.seconds)
        self.budget = min(limits, default=None)
        self._left = math.inf if self.budget is None else self.budget

    def trace(self, *, is_next: bool) -> None:
        """Traces or exports the candidates. `is_next`: another call is being measured, so nothing uses the device."""
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
        """Compiles, checks and races; a `TuningError` where the winner or the heuristic cfg was not measured."""
        if threading.get_ident() == self._thread:
            return self._measure()
        end = program_end.get()
        with self._settings.entered():
            return self._context.run(self._measure_until, end)

    def _measure_until(self, end: float | None) -> Record:
        # The context is of when the tuning was prepared, and the end of the program's budget of now.
        program_end.set(end)
        return self._measure()

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
                # Every candidate that an earlier race had left has failed: those that it dropped are raced now.
                record = self._run(replace(record, trials=()), self._prior.without_drops())
            if self._journal is not None and record.winner is not None and record.stop == "finished":
                self._journal.finish(record, self._named)
        refused = (Trial(cfg, "invalid", reason) for cfg, reason in job.refused)
        record = replace(record, trials=(*record.trials, *refused))
        self._keep(record)
        _refuse_unless_measured(record, heuristic_first=job.heuristic_first)
        return record

    @contextlib.contextmanager
    def _within_budget(self) -> Iterator[None]:
        """Takes the time in a `with` block off the budget; time between two such blocks does not count."""
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
            # A candidate that has ended a worker is left out: it would end this process too.
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
        """The record of a race between all candidates, or between the best that a search finds among many."""
        known: list[Record] = []
        try:
            with contextlib.closing(runner):
                try:
                    known.append(self._raced_on(runner, record, prior))
                except TuningInterrupted as stopped:
                    known.append(stopped.record)
                    raise
        except TuningInterrupted:
            raise
        except KeyboardInterrupt:
            # While the runner is let go: what it found is known.
            if not known:
                raise
            raise TuningInterrupted(replace(known[0], stop="interrupted")) from None
        return known[0]

    def _raced_on(self, runner: Runner, record: Record, prior: PriorResults) -> Record:
        driver, deadline = None, self.deadline
        phases = Phases()
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
                return found_meanwhile(record, runner.candidates.trials(), answer[0])
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
        driver.run(self.tuner.strategy, self._effort, self.tuner.seed)
        return driver

    def _wants_a_worker(self, prior: PriorResults) -> bool:
        """Is a worker demanded, or worth its cost: in an offline tuning, or where a candidate may have crashed one?"""
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
    """Raises where no measured cfg is known to be at least as fast as the heuristic one."""
    if record.stop == "settled":
        return
    heuristic = record.trials[0] if heuristic_first else None
    late = record.stop == "deadline"
    if heuristic is not None and not heuristic.samples_s and heuristic.status in ("ok", *(["timeout"] if late else ())):
        # Tuned must never be slower than untuned.
        why = heuristic.message or "not timed"
        message = f"the time was up before the heuristic cfg was measured ({why}), so nothing is known to be faster"
        raise OutOfTimeError(message, [message], record)
    others = record.trials[1:]
    # A skipped candidate was measured, and dropped, in an earlier run of this tuning.
    is_alone = not any(trial.samples_s or trial.status == "skipped" for trial in others)
    if heuristic is not None and late and heuristic.samples_s and is_alone:
        unmeasured = sum(trial.status == "timeout" for trial in others)
        if unmeasured:
            # If the heuristic cfg were kept as tuned, the other candidates would never be measured.
            message = f"the time was up before any of {unmeasured} candidates beside the heuristic cfg was measured"
            raise OutOfTimeError(message, [message], record)
    if record.winner is not None and record.trials[record.winner].samples_s:
        return
    reasons = [f"{describe(t.cfg)}: {t.status}: {t.message}" for t in record.failures]
    kind, what = (OutOfTimeError, "was measured in time") if late else (TuningError, "can be used")
    raise kind(f"no candidate {what}:\n  " + "\n  ".join(reasons), reasons, record)
