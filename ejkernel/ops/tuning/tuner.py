"""The tuner: its settings, and the four things that it does; `tuning.prepared` is how one tuning goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Generic

import jax
import numpy as np

from .. import _jax
from ..core.errors import SettingError
from ..core.invocation import Cfg
from ..core.record import Objective, Record, Trial
from ..timing import inputs
from ..timing.clock import Clock, WallClock
from ..timing.profiler import ProfilerUnavailable
from ..timing.program import CompiledProgram, stage
from ..timing.sampler import once
from .job import AnsweredElsewhere, DeviceLock, TuningJob, no_answer, no_lock
from .prepared import IsolationWarning as IsolationWarning
from .prepared import PreparedTuning
from .search.effort import FEW, effort_named
from .search.strategy import Strategy

if TYPE_CHECKING:
    from .custom_tuner import Engine
    from .worker.limits import Isolation


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
        return self._prepared(job, device_lock, answered_elsewhere).measure()

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
        prepared = self._prepared(job, device_lock, answered_elsewhere)
        prepared.trace(is_next=is_next)
        return prepared

    def _prepared(
        self, job: TuningJob, device_lock: DeviceLock, answered_elsewhere: AnsweredElsewhere
    ) -> PreparedTuning:
        return PreparedTuning(self, job, device_lock, answered_elsewhere, effort=self._effort, keep=self._keep)

    def _keep(self, record: Record) -> None:
        self._last.record = record

    def searches(self, count: int) -> bool:
        """Are so many candidates too many to race them all?

        Below twice the cap of an effort a search saves little, and one wave of compiling is faster than many.
        """
        return count > (FEW if self.strategy is not None else max(FEW, self._effort.evaluations / 2))


def engine(tuner: Any) -> Engine:
    """Our own tuner as it is, anything else with `autotune` wrapped."""
    if isinstance(tuner, Tuner) and type(tuner).autotune is Tuner.autotune:
        return tuner
    # Imported where it is needed: most programs have no tuner of their own.
    from .custom_tuner import CustomTuner

    return CustomTuner(tuner)


def _refuse_unless_isolation(isolate: Any) -> None:
    from .worker.limits import Isolation

    if not isinstance(isolate, Isolation):
        raise SettingError(f"isolate={isolate!r} is unknown; use True, False, None or Isolation(...)")


def _whole(value: Any, name: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(f"{name}={value!r} is not a whole number of at least {least}")
