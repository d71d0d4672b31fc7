"""A tuner of the user's own behind the interface that the tiers use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

from ..core.cfg import distinct, same
from ..core.errors import TuningError
from ..core.record import Record, Trial
from .check import inputs_of
from .job import AnsweredElsewhere, DeviceLock, TuningJob, no_answer, no_lock


class Autotuner(Protocol):
    """The least that a tuner must have."""

    def autotune(self, make_fn: Any, args: Any, kwargs: Any, candidates: Any) -> Any:
        """The best candidate."""


class Engine(Protocol):
    """Runs a tuning job: our own tuner or the user's."""

    def tune(
        self, job: TuningJob, *, device_lock: DeviceLock = ..., answered_elsewhere: AnsweredElsewhere = ...
    ) -> Record:
        """The record of the tuning; a `TuningError` where no candidate can be used."""


@final
@dataclass(frozen=True, slots=True)
class CustomTuner:
    """Gives the job to the user's tuner; what it measured stays its own."""

    inner: Autotuner

    def tune(
        self, job: TuningJob, *, device_lock: DeviceLock = no_lock, answered_elsewhere: AnsweredElsewhere = no_answer
    ) -> Record:
        """The record of its choice."""
        cfgs = distinct([*job.candidates, *job.seeds])
        blank = Record(**dict(job.about), objective=job.objective, clock="foreign")
        # As for our own: real arrays, and nothing of the caller's transformations.
        with job.room(), device_lock(math.inf if job.seconds is None else job.seconds):
            answer = answered_elsewhere()
            if answer is not None:
                return replace(blank, stop="settled", trials=_one(answer[0]), winner=0)
            call, leaves = inputs_of(job, seed=0)
            args, kwargs = call.rebuild(leaves)
            try:
                cfg = self.inner.autotune(self._make_fn(job), args, kwargs, cfgs)
            except RuntimeError as error:
                reason = f"{type(self.inner).__qualname__}.autotune raised {type(error).__name__}: {error}"
                raise TuningError(reason, [reason]) from error
        trials = tuple(Trial(c) for c in cfgs)
        winner = next((i for i, c in enumerate(cfgs) if same(c, cfg)), None)
        if winner is None:
            trials, winner = (*trials, *_one(cfg)), len(trials)
        heuristic = 0 if job.heuristic_first else None
        return replace(blank, stop="foreign", trials=trials, winner=winner, heuristic=heuristic)

    @staticmethod
    def _make_fn(job: TuningJob) -> Callable[[Any], Callable[..., Any]]:
        def make_fn(cfg: Any) -> Callable[..., Any]:
            fn = job.make_fn(cfg)

            def tagged(*args: Any, **kwargs: Any) -> Any:
                return fn(*args, **kwargs)

            # The documented way to ask a tuner for forward and backward together.
            tagged._ejk_validate_backward = job.objective == "forward+backward"  # type: ignore[attr-defined]
            return tagged

        return make_fn


def _one(cfg: Any) -> tuple[Trial, ...]:
    return (Trial(cfg),)
