"""A search on a device: batches are compiled and checked together, timed against the best so far, and learned from."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

from ...core.cfg import places
from ..job import TuningJob
from ..runner import NOT_TIMED, Rows, Runner
from .effort import Effort
from .features import Space, space_of
from .guided import GuidedSearch
from .loop import search
from .random import RandomSearch
from .strategy import Strategy, best_first

# One wave of a compile pool with sixteen threads.
BATCH = 16
# A first look: enough to rank a batch; the best few are raced properly at the end.
_BRIEF_ROUNDS = 2
FINALISTS = 10
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

    def __init__(
        self,
        cfgs: Sequence[Any],
        runner: Runner,
        *,
        deadline: float,
        device_lock: Callable[[float], AbstractContextManager[Any]] = contextlib.nullcontext,
        answered_elsewhere: Callable[[], tuple[Any] | None] = lambda: None,
        earlier: Mapping[int, float] | None = None,
    ) -> None:
        self.cfgs = cfgs
        self.runner = runner
        self.candidates = runner.candidates
        self.deadline = deadline
        self._device_lock = device_lock
        self._answered_elsewhere = answered_elsewhere
        # (cfg,) where another process found the answer meanwhile.
        self.answer: tuple[Any] | None = None
        # Seconds of each config of the space that was measured, and its number among the candidates.
        self.known: dict[int, float] = {}
        self.numbers: dict[int, int] = {}
        # What a search that was killed has timed: points to learn from, marked by having no number.
        self._earlier = dict(earlier or {})
        # Seconds of the last batch.
        self._took = 0.0
        left = deadline - time.perf_counter()
        self._until = deadline - _RESERVE * left if math.isfinite(left) else math.inf

    def run(self, strategy: Strategy | None, effort: Effort, seed: int) -> None:
        """Searches until the time or the evaluations are used up, or another process has found the answer."""
        space = space_for(self.runner.job, self.cfgs)
        strategy = strategy or (GuidedSearch() if space.has_fields else RandomSearch())
        known = search(
            space,
            self._measure,
            strategy,
            most=effort.evaluations,
            batch=BATCH,
            seed=seed,
            wave=self._wave,
            out_of_time=lambda: time.perf_counter() >= self._until or self.answer is not None,
            earlier=self._like_now,
        )
        # The finalists that only an earlier search has timed are measured now.
        again = [i for i in best_first(known)[:FINALISTS] if i not in self.numbers]
        if again and self.answer is None and time.perf_counter() < self._until:
            self._measure(again)

    def _wave(self, left: int) -> int:
        """The smallest batch with which the evaluations that are left fit into the time that is left.

        Configs of a batch compile side by side: where that takes most of the time, small batches waste it.
        """
        if not self._took or not math.isfinite(self._until):
            return 1
        waves = max(1, int((self._until - time.perf_counter()) / self._took))
        return min(BATCH, math.ceil(left / waves))

    def _like_now(self, known: Mapping[int, float]) -> Mapping[int, float]:
        """Seconds of the earlier search, scaled by the configs that both searches have timed."""
        shared = [i for i in known.keys() & self._earlier.keys() if self._earlier[i] > 0]
        both = [known[i] / self._earlier[i] for i in shared if math.isfinite(known[i])]
        scale = median(both) if both else 1.0
        return {i: seconds * scale for i, seconds in self._earlier.items()}

    def finalists(self) -> list[int]:
        """The numbers of the candidates to be raced: the best so far, the first candidate, then the next best.

        The best so far has the first turn: should the time be up, it wins by what is known of it.
        """
        best = [self._runs_as(i) for i in best_first(self.known)]
        runs = [number for number in dict.fromkeys([*best[:1], 0, *best]) if self.candidates.runs(number)]
        raced = runs[:1] if time.perf_counter() >= self.deadline else runs[: FINALISTS + 1]
        for number in self.candidates.having("compiled", "checked"):
            if number not in raced:
                self.candidates.advance(number, "timeout", message=NOT_TIMED)
        return raced

    def _measure(self, wanted: Sequence[int]) -> Mapping[int, float]:
        start = time.perf_counter()
        entered = self.candidates.enter([self.cfgs[i] for i in wanted])
        self.numbers.update(zip(wanted, entered, strict=True))
        self.runner.compile(self._until, self.deadline)
        with self._device_lock(self.deadline - time.perf_counter()):
            self.answer = self._answered_elsewhere()
            if self.answer is not None:
                return {}
            self.runner.check(self._until)
            found = self._time_briefly(wanted)
        late = time.perf_counter() >= self._until
        self._took = time.perf_counter() - start
        for i in wanted:
            number = self._runs_as(i)
            if number in found:
                self.known[i] = found[number]
            # A candidate for which the time was up is unmeasured; any other one that did not run has failed.
            elif not late or not self._has_no_time(number):
                self.known[i] = math.inf
        return {i: self.known[i] for i in wanted if i in self.known}

    def _has_no_time(self, number: int) -> bool:
        return self.candidates.runs(number) or self.candidates.state(number) == "timeout"

    def _time_briefly(self, wanted: Sequence[int]) -> dict[int, float]:
        """Seconds of a batch, relative to the best so far, which runs along in every round.

        So a batch that had to be timed by the host's clock can be compared with batches timed by the device's.
        """
        candidates = self.candidates
        # A candidate with the same program as one of an earlier batch has the seconds of that one.
        seconds = {self._runs_as(i): known for i, known in self.known.items() if candidates.runs(self._runs_as(i))}
        fresh = [n for n in dict.fromkeys(map(self._runs_as, wanted)) if candidates.runs(n) and n not in seconds]
        if not fresh:
            return seconds
        ran = [n for n in seconds if math.isfinite(seconds[n])]
        anchor = min(ran, key=lambda n: (seconds[n], n), default=None)
        numbers = fresh if anchor is None else [anchor, *fresh]
        rows = self.runner.time_briefly(
            numbers, rounds=_BRIEF_ROUNDS, kept=anchor, deadline=self._until, seed=len(self.known)
        )
        for number in fresh:
            if candidates.runs(number) and any(number in row for row in rows):
                seconds[number] = _seconds(number, rows, None if anchor is None else (anchor, seconds[anchor]))
        # The best candidate so far may have failed, or ended its process, in these very rounds.
        for i in [i for i in self.known if self._runs_as(i) == anchor and not candidates.runs(anchor)]:
            self.known[i] = math.inf
        self._write_down(seconds, fresh)
        return seconds

    def _write_down(self, seconds: Mapping[int, float], fresh: Sequence[int]) -> None:
        best = min(seconds.values(), default=math.inf)
        for number in fresh:
            if number in seconds:
                self.runner.note_seconds(number, seconds[number], seconds[number] / best if best > 0 else 1.0)

    def _runs_as(self, i: int) -> int:
        return self.candidates.runs_as(self.numbers[i])


def _seconds(number: int, rows: Rows, base: tuple[int, float] | None) -> float:
    """Seconds of a config: its ratio to the best so far in the same rounds, times the known seconds of that one."""
    own = [row for row in rows if number in row]
    ratios = [] if base is None else [row[number] / row[base[0]] for row in own if row.get(base[0], 0.0) > 0]
    return base[1] * median(ratios) if base and ratios else median(row[number] for row in own)
