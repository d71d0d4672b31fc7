"""The tunings that a selector begins: one at a time on a device, within what the process may still spend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax

from ..core.cfg import distinct
from ..core.errors import OutOfTimeError, RetuneError
from ..core.key import Key
from ..core.record import Record
from ..core.request import Hit, Request
from ..settings import default_folder, journal_folder
from ..tuning.candidates import found_meanwhile
from ..tuning.device_lock import device_lock, turn_name
from ..tuning.interrupted import TuningInterrupted
from ..tuning.job import TuningJob
from ..tuning.prepared import PreparedAhead
from ..tuning.progress import shown, tell
from ..tuning.search.effort import FEW
from ..tuning.tuner import Tuner, engine
from . import tuning_budget
from .autotune_tier import tuned
from .kept_answers import KeptAnswers
from .predicted_tier import Predictions
from .selector_parts import SelectorParts
from .tiers import StoreTier
from .tunability import StaticFloats
from .tuning_budget import seconds_spent, spending
from .warm_start import warm_start_configs


class TuningRuns:
    """Runs the tuning jobs of one selector, with what the selector knows."""

    def __init__(self, parts: SelectorParts[Any, Any], kept: KeptAnswers, predictions: Predictions) -> None:
        self._parts = parts
        self._kept = kept
        self._predictions = predictions
        # Tunings that were traced ahead of their turn.
        self._prepared: dict[Key, PreparedAhead] = {}
        self._static_floats = StaticFloats()

    def run(self, request: Request, job: TuningJob, *, again: bool) -> Record:
        """The record of a job that was run; `again`: whatever is known already."""
        refused = "" if again else self._kept.refusal(request)
        if refused:
            raise RetuneError(refused)
        if not again:
            self._static_floats.tuned(request)
        job = self._complete(request, job, again=again)
        ahead = self._prepared.pop(request.key, None)

        def answered() -> tuple[Any] | None:
            return None if again else self._answer_in_store(request)

        self._parts.tell("autotune_start", request.key, None, candidates=len(job.candidates), objective=job.objective)
        start = time.perf_counter()
        cfg: Any = None
        record: Record | None = None
        try:
            title, wanted = f"{request.key.op_id} {request.key.call_key}", self._parts.settings.progress
            with (
                spending(inline=not again),
                jax.default_device(request.device),
                shown(title, job.seconds, wanted) as watch,
            ):
                if ahead is not None:
                    record = ahead.measure(job.seconds, watch)
                else:
                    record = engine(self._parts.tuner).tune(
                        replace(job, watch=watch), device_lock=self._lock_for(request), answered_elsewhere=answered
                    )
            record = self._first_answer(answered, record)
            cfg = record.cfg
            if record.stop != "settled":
                tell(title, record, time.perf_counter() - start, wanted)
            if not again:
                tuning_budget.tell_if_used_up(request.key, record, job.seconds)
        except OutOfTimeError as error:
            if not again and error.record is not None:
                tuning_budget.tell_if_used_up(request.key, error.record, job.seconds, is_answered=False)
            raise
        except KeyboardInterrupt as stopped:
            record = self._best_so_far(request, stopped)
            cfg = None if record is None else record.cfg
            raise
        finally:
            seconds = time.perf_counter() - start
            counted = "failed_tunings" if record is None else "autotune"
            self._parts.tell("autotune_finish", request.key, counted, cfg=cfg, seconds=seconds, record=record)
        return record

    def prepare(self, tuner: Tuner[Any], request: Request, job: TuningJob, *, is_next: bool) -> Callable[[], None]:
        """Traces a job that the next `run` of its request goes on with; the function that comes back lets it go."""
        job = self._complete(request, job, again=True)
        ahead = PreparedAhead(tuner, job, self._lock_for(request), is_next=is_next)
        self._prepared[request.key] = ahead

        def let_go() -> None:
            if self._prepared.pop(request.key, None) is not None:
                ahead.close()

        return let_go

    def _best_so_far(self, request: Request, stopped: KeyboardInterrupt) -> Record | None:
        """Keeps the best that was checked and timed before Ctrl-C, if the heuristic cfg was timed as well."""
        if not isinstance(stopped, TuningInterrupted) or not stopped.is_of_use:
            return None
        self._kept.accept(request, tuned(request, stopped.record, stopped.record.cfg), ())
        return stopped.record

    def _complete(self, request: Request, job: TuningJob, *, again: bool) -> TuningJob:
        """The job with what this selector knows: budget, seeds of similar calls, and where its journal lies."""
        # A race of a few candidates needs no start.
        similar = self._known_elsewhere(request, job.candidates) if len(job.candidates) > FEW else ()
        seeds, seconds = [*job.seeds, *similar], self._seconds_left(request, again=again)
        return replace(job, seconds=seconds, seeds=seeds, offline=again, journal=journal_folder())

    def _known_elsewhere(self, request: Request, offered: Sequence[Any]) -> list[Any]:
        """The cfgs that records of other calls speak for: what they predict, then the best of the nearest ones."""
        found = self._predictions.ask(request, offered) if self._parts.policy.allow_predictions else ""
        likely = [] if isinstance(found, str) else [found.cfg]
        return [*likely, *warm_start_configs(self._parts.stores(), request, offered)]

    @staticmethod
    def _lock_for(request: Request) -> Callable[[float], AbstractContextManager[None]]:
        return lambda wait: device_lock(turn_name(request.device), default_folder() / "locks", wait)

    def _seconds_left(self, request: Request, *, again: bool) -> float | None:
        limit = self._parts.settings.tune_seconds
        limits = [request.seconds, None if limit is None else max(limit - seconds_spent(), 0.0)]
        limits += [] if again else tuning_budget.seconds_for(self._parts.settings, self._parts.tuner)
        # `inf` lifts a default, and is no number of seconds.
        return min((seconds for seconds in limits if seconds is not None and seconds < math.inf), default=None)

    @staticmethod
    def _first_answer(answered: Callable[[], tuple[Any] | None], record: Record) -> Record:
        """The record of this tuning, or one with the answer that another process put into the store meanwhile.

        A turn ends before what it found is written, so that two may measure one after the other; both use the first.
        """
        first = answered() if record.stop != "settled" else None
        if first is None or len(distinct([first[0], record.cfg])) == 1:
            return record
        return found_meanwhile(record, record.trials, first[0])

    def _answer_in_store(self, request: Request) -> tuple[Any] | None:
        found = None if self._parts.store is None else StoreTier(self._parts.store).find(request)
        return (found.cfg,) if isinstance(found, Hit) else None
