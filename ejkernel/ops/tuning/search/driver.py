"""A search on a device: batches are compiled and checked together, timed against the best so far, and learned from."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ...core.cfg import places
from ..job import TuningJob
from ..runner import Rows, Runner
from .effort import Effort
from .features import Space, space_of
from .guided import GuidedSearch
from .loop import search
from .random import RandomSearch
from .strategy import Strategy, best_first

# One wave of a compile pool with sixteen threads.
BATCH = 16
# A first look: enough to rank a batch; the best few are raced properly at the end.
_LOOKS = 2
FINALISTS = 10
# What was timed twice, by a search that was killed and by this one, may differ by so much.
_LIKE = 1.25
# The share of the time that is kept for their race.
_RESERVE = 0.15


class SearchWarning(UserWarning):
    """A search that could not go as it should."""


# Kinds of config of which it was said that they have no fields.
_said: set[type] = set()


def space_for(job: TuningJob, cfgs: Sequence[Any]) -> Space:
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


class SearchDriver:
    """One search: which candidates were measured, and how fast they were at a first look."""

    def __init__(self, cfgs: Sequence[Any], track: Runner, *, deadline: float) -> None:
        self.cfgs = cfgs
        self.track = track
        self.field = track.field
        self.job = track.field.job
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
        absent = [i for i in best if self._runs_as(i) not in self.field.programs]
        if absent and self.settled is None and time.perf_counter() < self._until:
            self.field.job = replace(self.field.job, past=self.field.job.past.afresh())
            self._measure(absent)

    def finalists(self) -> list[int]:
        """The numbers of those to be raced: the best so far, the first candidate, then the next best.

        The best so far has the first turn: should the time be up, it wins by what is known of it.
        """
        best = [self._runs_as(i) for i in best_first(self.known)]
        runs = [number for number in dict.fromkeys([*best[:1], 0, *best]) if number in self.field.programs]
        raced = runs[:1] if time.perf_counter() >= self.deadline else runs[: FINALISTS + 1]
        for number in self.field.programs.keys() - set(raced):
            trial = self.field.trials[number]
            if trial.status == "ok" and not trial.samples_s:
                self.field.trials[number] = replace(trial, status="timeout", message="not timed when the time was up")
        return raced

    def _measure(self, wanted: Sequence[int]) -> Mapping[int, float]:
        entered = self.field.enter([self.cfgs[i] for i in wanted])
        self.numbers.update(zip(wanted, entered, strict=True))
        self.track.compile(self._until, self.deadline)
        with self.job.turn(self.deadline - time.perf_counter()):
            self.settled = self.job.settled()
            if self.settled is not None:
                return {}
            self.track.check(self._until)
            found = self._look(wanted)
        late = time.perf_counter() >= self._until
        for i in wanted:
            number = self._runs_as(i)
            trial = self.field.trials[number]
            if number in found:
                self.known[i] = found[number]
            # Timed by a search that was killed: its journal knows.
            elif self._is_carried(i):
                self.known[i] = median(trial.samples_s)
            # One that the clock cut off was not measured; any other that did not run has failed.
            elif not late or self.field.trials[self.numbers[i]].status not in ("ok", "timeout"):
                self.known[i] = math.inf
        again = self._anew() if self._times_have_changed() else {}
        return {**again, **{i: self.known[i] for i in wanted if i in self.known}}

    def _is_carried(self, i: int) -> bool:
        """Was it timed by an earlier search alone?"""
        number = self._runs_as(i)
        trial = self.field.trials[number]
        return trial.status == "ok" and bool(trial.samples_s) and number not in self.field.programs

    def _times_have_changed(self) -> bool:
        """Do those who were timed then and now say that times of then are not those of now?"""
        if not any(map(self._is_carried, self.known)):
            return False
        past = self.field.job.past
        ran = [i for i in self.known if math.isfinite(self.known[i]) and self._runs_as(i) in self.field.programs]
        then = {i: past.samples(self.cfgs[i]) for i in ran}
        ratios = [self.known[i] / median(then[i]) for i in ran if then[i]]
        return bool(ratios) and not 1 / _LIKE < median(ratios) < _LIKE

    def _anew(self) -> Mapping[int, float]:
        """Measures what was taken over; from here on nothing is."""
        self.field.job = replace(self.field.job, past=self.field.job.past.afresh())
        stale = [i for i in self.known if self._is_carried(i)]
        for i in stale:
            del self.known[i]
            trial = self.field.trials[self.numbers[i]]
            message = "timed by an earlier tuning under other conditions, and measured again"
            self.field.trials[self.numbers[i]] = replace(trial, status="skipped", message=message, samples_s=())
        return self._measure(stale)

    def _look(self, wanted: Sequence[int]) -> dict[int, float]:
        """Seconds of a batch, relative to the best so far, which runs along in every round.

        So a batch for which the device's clock could not be had, and the host's served, still fits the others.
        """
        programs = self.field.programs
        # A program that an earlier batch timed already stands for its equals.
        seconds = {self._runs_as(i): known for i, known in self.known.items() if self._runs_as(i) in programs}
        fresh = [n for n in dict.fromkeys(map(self._runs_as, wanted)) if n in programs and n not in seconds]
        if not fresh:
            return seconds
        # What an earlier search timed was not compiled, and cannot run along.
        ran = [n for n in seconds if math.isfinite(seconds[n])]
        anchor = min(ran, key=lambda n: (seconds[n], n), default=None)
        numbers = fresh if anchor is None else [anchor, *fresh]
        rows = self.track.look(numbers, rounds=_LOOKS, kept=anchor, deadline=self._until, seed=len(self.known))
        for number in fresh:
            samples = tuple(row[number] for row in rows if number in row)
            if number in programs:
                trial = self.field.trials[number]
                self.field.trials[number] = replace(trial, samples_s=samples, dropped_round=len(samples))
            if number in programs and samples:
                seconds[number] = _seconds(number, rows, None if anchor is None else (anchor, seconds[anchor]))
        # The best so far can fail, or take its process down, as late as now.
        for i in [i for i in self.known if self._runs_as(i) == anchor and anchor not in programs]:
            self.known[i] = math.inf
        return seconds

    def _runs_as(self, i: int) -> int:
        return self.field.runs_as(self.numbers[i])


def _seconds(number: int, rows: Rows, base: tuple[int, float] | None) -> float:
    """What a config takes: its ratio to the best so far in the same rounds, times what that one is known to take."""
    own = [row for row in rows if number in row]
    ratios = [] if base is None else [row[number] / row[base[0]] for row in own if base[0] in row]
    return base[1] * median(ratios) if base and ratios else median(row[number] for row in own)
