"""A search on a device: batches are compiled and checked together, timed against the best so far, and learned from."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ..timing.clock import Clock
from ..timing.program import first_line
from .field import Field, status_of
from .job import Job, places
from .race import Lane
from .search.effort import Effort
from .search.features import Space, space_of
from .search.guided import GuidedSearch
from .search.loop import search
from .search.random import RandomSearch
from .search.strategy import Strategy, best_first
from .stopwatch import Stopwatch

# One wave of a compile pool with sixteen threads.
BATCH = 16
# A first look: enough to rank a batch; the best few are raced properly at the end.
_LOOKS = 2
FINALISTS = 10
# The share of the time that is kept for their race.
_RESERVE = 0.15


class SearchWarning(UserWarning):
    """A search that could not go as it should."""


# Kinds of config of which it was said that they have no fields.
_said: set[type] = set()


def space_for(job: Job, cfgs: Sequence[Any]) -> Space:
    """The space of a job: it starts with the first candidate, then the seeds."""
    space = space_of(cfgs, starts=list(dict.fromkeys([0, *places(cfgs, job.seeds)])))
    kind = type(cfgs[0])
    if not space.has_fields and kind not in _said:
        _said.add(kind)
        warnings.warn(
            f"candidates of type {kind.__qualname__} have no fields to learn from, so {len(cfgs):,} of them are "
            "sampled at random; use a dataclass, a dict, a named tuple or a pydantic model for the cfg",
            SearchWarning,
            stacklevel=2,
        )
    return space


class Hunt:
    """One search: which candidates were measured, and how fast they were at a first look."""

    def __init__(
        self, job: Job, cfgs: Sequence[Any], field: Field, *, clock: Clock | None, warmup: int, deadline: float
    ) -> None:
        self.job = job
        self.cfgs = cfgs
        self.field = field
        self.clock = clock
        self.warmup = warmup
        self.deadline = deadline
        self.settled: tuple[Any] | None = None
        # Seconds of each config of the space that was measured, and its number in the field.
        self.known: dict[int, float] = {}
        self.numbers: dict[int, int] = {}
        left = deadline - time.perf_counter()
        self._until = deadline - _RESERVE * left if math.isfinite(left) else math.inf

    def run(self, strategy: Strategy | None, effort: Effort, seed: int) -> None:
        """Searches until the time or the evaluations are used up, or another process has found the answer."""
        space = space_for(self.job, self.cfgs)
        strategy = strategy or (GuidedSearch() if space.has_fields else RandomSearch())
        search(
            space,
            self._measure,
            strategy,
            most=effort.evaluations,
            batch=BATCH,
            seed=seed,
            out_of_time=lambda: time.perf_counter() >= self._until,
        )
        self._bring_back()

    def _bring_back(self) -> None:
        """Who is among the best by an earlier search's journal alone is compiled now, for the final race."""
        best = best_first(self.known)[:FINALISTS]
        absent = [i for i in best if self.field.runs_as(self.numbers[i]) not in self.field.programs]
        if absent and self.settled is None and time.perf_counter() < self._until:
            self.field.job = replace(self.field.job, past=self.job.past.afresh())
            self._measure(absent)

    def finalists(self) -> list[int]:
        """The numbers of those to be raced: the best so far, the first candidate, then the next best.

        The best so far has the first turn: should the time be up, it wins by what is known of it.
        """
        best = [self.field.runs_as(self.numbers[i]) for i in best_first(self.known)]
        runs = [number for number in dict.fromkeys([*best[:1], 0, *best]) if number in self.field.programs]
        return runs[:1] if time.perf_counter() >= self.deadline else runs[: FINALISTS + 1]

    def _measure(self, wanted: Sequence[int]) -> Mapping[int, float]:
        entered = self.field.enter([self.cfgs[i] for i in wanted])
        self.numbers.update(zip(wanted, entered, strict=True))
        self.field.compile(self._until)
        self.field.prepare()
        with self.job.turn(self.deadline - time.perf_counter()):
            self.settled = self.job.settled()
            if self.settled is not None:
                return {}
            self.field.check(self._until)
            found = self._look(entered)
        late = time.perf_counter() >= self._until
        for i in wanted:
            number = self.field.runs_as(self.numbers[i])
            earlier = self.field.trials[number]
            if number in found:
                self.known[i] = found[number]
            # Timed by a search that was killed: its journal knows.
            elif earlier.status == "ok" and earlier.samples_s and number not in self.field.programs:
                self.known[i] = median(earlier.samples_s)
            # One that the clock cut off was not measured; any other that did not run has failed.
            elif not late or self.field.trials[self.numbers[i]].status not in ("ok", "timeout"):
                self.known[i] = math.inf
        return {i: self.known[i] for i in wanted if i in self.known}

    def _look(self, entered: Sequence[int]) -> dict[int, float]:
        """Seconds of a batch, relative to the best so far, which runs along in every round.

        So a batch for which the device's clock could not be had, and the host's served, still fits the others.
        """
        best = best_first(self.known)
        anchor = self.field.runs_as(self.numbers[best[0]]) if best else None
        fresh = dict.fromkeys(self.field.runs_as(number) for number in entered)
        # A program that an earlier batch timed already stands for its equals.
        earlier = {self.field.runs_as(self.numbers[i]): seconds for i, seconds in self.known.items()}
        fresh = {number: None for number in fresh if number in self.field.programs and number not in earlier}
        if not fresh:
            return earlier
        numbers = [*([] if anchor is None else [anchor]), *fresh]
        programs, leaves = self.field.programs, self.field.leaves
        watch = Stopwatch(
            self.clock,
            programs,
            leaves,
            numbers,
            warmup=self.warmup,
            deadline=self._until,
            cfgs=[self.field.trials[number].cfg for number in numbers],
            witness=self.job.witness,
        )
        protected = None if anchor is None else 0
        outcome = watch.race(least_rounds=_LOOKS, most_rounds=_LOOKS, protected=protected, seed=len(self.known))
        seconds = dict(earlier)
        for number, lane in zip(numbers, outcome.lanes, strict=True):
            if number != anchor:
                self._note(number, lane)
                if lane.samples and lane.failure is None:
                    base = None if anchor is None else (outcome.lanes[0], earlier[anchor])
                    seconds[number] = _seconds(lane, base)
        return seconds

    def _note(self, number: int, lane: Lane) -> None:
        trial = replace(self.field.trials[number], samples_s=lane.seconds, dropped_round=len(lane.samples))
        if lane.failure is not None:
            trial = replace(trial, status=status_of(lane.failure, "runtime"), message=first_line(lane.failure))
            del self.field.programs[number]
        self.field.trials[number] = trial


def _seconds(lane: Lane, base: tuple[Lane, float] | None) -> float:
    """What a config takes: its ratio to the best so far in the same rounds, times what that one is known to take."""
    if base is None:
        return median(lane.seconds)
    anchor, seconds = base
    ratios = [value - anchor.samples[r] for r, value in lane.samples.items() if r in anchor.samples]
    return seconds * math.exp(median(ratios)) if ratios else median(lane.seconds)
