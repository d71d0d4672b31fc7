"""A model of an operation, learned from its records: the cfg for another call, and how sure that is. No JAX here.

What the model says of itself is held against the records: each of them is predicted from the others, and the stated
chances and bounds are what came out there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..search.features import Array
from .calibration import NEAR, Calibration, Checked
from .calls import CallPoint, CallTable
from .cfgs import CfgTable, cfg_point
from .example import Example
from .process import Process
from .regions import found_scales, process_of, regions_of
from .scales import Points

# With fewer tuned calls nothing can be held against anything.
LEAST = 4
# Records are held against scales that were found without them, in so many parts; the golden ratio spreads these.
_FOLDS, _GOLDEN = 3, 0.6180339887
# Of more calls every so many is learned from.
_MOST_CALLS = 320
# A call with a size so many doublings beyond every tuned one is not answered.
FARTHEST = 2.5
# How much slower a slow cfg is hardly matters: from here on differences of logarithms count less and less.
_SLOW = 0.35
# A cfg that so many calls have measured, and that was never within this of the best, is not asked for.
_CALLS_TO_DROP, _NEVER = 4, math.log(1.3)
# An answer is drawn among so many candidates, and names so many calls.
_MOST_DRAWN, _NAMED = 32, 16
_DRAWS = 256
# What an average percent of time counts beside a percent of chance.
_LOSS = 1.0


@dataclass(frozen=True)
class Choice:
    """A cfg, the chance that it is near the best, a bound of its time over the best's that holds in 90%, and calls."""

    place: int
    chance: float
    bound: float
    near: tuple[int, ...] = ()
    distances: tuple[float, ...] = ()


class Learned:
    """A model of an operation, learned from its records."""

    def __init__(self, examples: Sequence[Example]) -> None:
        # Of very many calls every so many: the others would cost memory, and change little.
        self.examples = [examples[i] for i in np.unique(np.linspace(0, len(examples) - 1, _MOST_CALLS).astype(int))]
        self.table = CallTable.of([e.point for e in self.examples])
        self.cfgs = CfgTable([e.cfgs for e in self.examples])
        self.ranges = self._ranges()
        self.dropped = self._never_near()
        points, slower = self._points()
        self.scales = found_scales(points, slower)
        self.lengths = self.scales.calls
        self.regions = regions_of(points, slower, self.scales)
        self.calibration = Calibration(self._check(points, slower))

    def ask(self, point: CallPoint, cfgs: Sequence[Any], heuristic: int) -> Choice | str:
        """The choice among encoded candidates for a call; else the reason why there is none."""
        row = self.table.row(point)
        reason = self._too_far(point, row)
        if reason:
            return reason
        asked = [cfg_point(cfg) for cfg in cfgs]
        sizes, kinds, known = self.cfgs.rows(asked)
        if known.mean() < 0.5:
            return "the records hold too few of this call's candidates"
        kept = np.flatnonzero(known & [cfg.text not in self.dropped for cfg in asked])
        if not len(kept):
            return "the records know none of this call's candidates as fast"
        apart = self.table.apart(row[None], self.table.rows)[0] / 2.0
        slopes = self._slopes(row[None])[0]
        distance = np.sqrt(self.scales.of_calls(apart))
        region = min(self.regions, key=lambda region: distance[region.centre])
        found = region.process.ask(apart[region.calls], slopes, sizes[kept], kinds[kept], _MOST_DRAWN)
        first, mean, covariance = found
        kept = kept[first]
        at = np.flatnonzero(kept == heuristic)
        place, chance, bound = _chosen(mean, covariance, int(at[0]) if len(at) else None)
        nearest = np.argsort(distance, kind="stable")[:_NAMED]
        return Choice(
            int(kept[place]),
            self.calibration.chance(chance),
            self.calibration.bound(bound),
            tuple(nearest.tolist()),
            tuple(distance[nearest].tolist()),
        )

    def _too_far(self, point: CallPoint, row: Array) -> str:
        for name, text in self.table.common.items():
            if point.names.get(name, "") != text:
                return f"{name} is {point.names.get(name, 'not given')} here and {text} in all records"
        for name in point.names:
            if name not in self.table.common and name not in self.table.names:
                return f"{name} is given here and in no record"
        for place, name in enumerate(self.table.names, len(self.table.sizes)):
            if row[place] < 0:
                return f"no record has {name} = {point.names.get(name, 'not given')}"
        for name, size in point.sizes.items():
            low, high = self.ranges.get(name, (size, size))
            beyond = max(low - size, size - high)
            if beyond > FARTHEST:
                return f"{name} is {beyond:.1f} doublings beyond every record"
        return ""

    def _ranges(self) -> dict[str, tuple[float, float]]:
        """The least and the largest of each size, over all records."""
        found: dict[str, list[float]] = {}
        for example in self.examples:
            for name, size in example.point.sizes.items():
                found.setdefault(name, []).append(size)
        return {name: (min(sizes), max(sizes)) for name, sizes in found.items()}

    def _never_near(self) -> set[str]:
        """Texts of cfgs that many calls have measured, and that were near the best in none."""
        found: dict[str, list[float]] = {}
        for example in self.examples:
            for cfg, slow in zip(example.cfgs, example.slower, strict=True):
                found.setdefault(cfg.text, []).append(float(slow))
        return {text for text, slow in found.items() if len(slow) >= _CALLS_TO_DROP and min(slow) > _NEVER}

    def _slopes(self, rows: Array) -> Array:
        """Places of calls, from the middle: sizes in pairs of doublings, so that many columns count as one."""
        count = len(self.table.sizes)
        return (rows[:, :count] - self.table.middle[:count]) / 2.0 / math.sqrt(max(count, 1))

    def _points(self) -> tuple[Points, Array]:
        """All pairs of a call and a cfg but those that are dropped, and how much slower each is."""
        pairs = [
            (number, place, slow)
            for number, (example, places) in enumerate(zip(self.examples, self.cfgs.places, strict=True))
            for cfg, place, slow in zip(example.cfgs, places, example.slower, strict=True)
            if cfg.text not in self.dropped
        ]
        calls, places, slower = zip(*pairs, strict=True)
        rows = self.table.rows
        apart = self.table.apart(rows, rows) / 2.0
        points = Points(
            apart, self._slopes(rows), self.cfgs.sizes, self.cfgs.kinds, np.array(calls, int), np.array(places, int)
        )
        return points, _less_and_less(np.array(slower))

    def _check(self, points: Points, slower: Array) -> list[Checked]:
        """Each record, predicted from the others."""
        found = []
        for process, calls, numbers in self._folds(points, slower):
            for number in numbers:
                example = self.examples[calls[number]]
                kept = [place for place, cfg in enumerate(example.cfgs) if cfg.text not in self.dropped]
                if kept:
                    place, chance, bound = _chosen(*process.without(number), None)
                    found.append(Checked(chance, bound, float(example.slower[kept[place]])))
        return found

    def _folds(self, points: Points, slower: Array) -> Iterator[tuple[Process, Sequence[int], Sequence[int]]]:
        """Processes with their calls, and numbers of those to leave out in turn: no scales were found from these."""
        if len(self.regions) > 1:
            # Scales come from a small part of so many records.
            yield from ((region.process, region.calls.tolist(), region.own) for region in self.regions)
            return
        every = np.arange(len(self.examples))
        fold = (every * _GOLDEN % 1.0 * _FOLDS).astype(int)
        for number in range(_FOLDS):
            others, kept = points.of(every[fold != number])
            scales = found_scales(others, slower[kept])
            yield process_of(points, slower, scales), every.tolist(), every[fold == number].tolist()


def _less_and_less(slower: Array) -> Array:
    beyond = np.maximum(slower - _SLOW, 0.0)
    return np.minimum(slower, _SLOW) + _SLOW * np.log1p(beyond / _SLOW)


def _chosen(mean: Array, covariance: Array, heuristic: int | None) -> tuple[int, float, float]:
    """The candidate with the best chance to be near the best, else the heuristic's; its chance and bound."""
    # What all times have in common says nothing.
    centred = covariance - covariance.mean(axis=0) - covariance.mean(axis=1)[:, None] + covariance.mean()
    sizes, ways = np.linalg.eigh(centred)
    draws = mean + (_normal(len(mean)) * np.sqrt(np.maximum(sizes, 0.0))) @ ways.T
    slower = draws - draws.min(axis=1, keepdims=True)
    worth = (slower <= NEAR).mean(axis=0) - _LOSS * slower.mean(axis=0)
    place = int(np.argmax(worth))
    if heuristic is not None and worth[heuristic] >= worth[place] - 0.01:
        place = heuristic
    return place, float((slower[:, place] <= NEAR).mean()), float(np.quantile(slower[:, place], 0.9))


@functools.lru_cache(maxsize=64)
def _normal(count: int) -> Array:
    """Normal draws that are the same in every process."""
    return np.random.default_rng(0).standard_normal((_DRAWS, count))
