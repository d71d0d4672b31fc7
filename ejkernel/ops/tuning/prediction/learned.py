"""A model of how much slower than the best each cfg is, over the calls that were tuned. No JAX here.

The nearest calls answer, by a Gaussian process over the logarithms of sizes: each size has a length of its own, found
by maximum likelihood, so that sizes that do not matter drop out. What the model says of itself is held against the
records: each of some is predicted from the others, and the stated chances and intervals are what came out there.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..search.model import fit_lengths, matern
from .calls import CallPoint, CallTable
from .cfgs import CfgPoint, Matching, by_rank, by_size, cfg_point, ranks
from .example import FAILED, Example

Array = NDArray[np.float64]

# With fewer tuned calls nothing can be held against anything.
LEAST = 4
# So many of the nearest calls answer; more change nothing, and cost time.
_NEAREST = 16
# Lengths are found from so many calls, and the stated chances are checked on so many.
_MOST_TO_FIT, _MOST_TO_CHECK = 64, 48
# A call with a size so many doublings beyond every tuned one is not answered.
FARTHEST = 2.5
# Within this of the best counts as near it; the logarithm.
NEAR = math.log(1.05)
# A cfg that has no counterpart within so many doublings in another call is not compared with that call.
_NO_COUNTERPART = 1.5
# The variance of one doubling between two cfgs that are taken for each other, over the variance of the cfg.
_UNLIKE = 0.3
# Noise of records, as a share of time.
_LEAST_NOISE = 0.01
_DRAWS = 256


@dataclass(frozen=True)
class Raw:
    """Statements of the model before they are held against the records, by candidate, and the calls behind them."""

    mean: Array
    spread: Array
    near: tuple[int, ...]
    distances: tuple[float, ...]
    # The share of the candidates about which something is known.
    covered: float


@dataclass(frozen=True)
class Choice:
    """A cfg, the chance that it is near the best, and a bound of its time over the best's that holds in 90%."""

    place: int
    chance: float
    bound: float
    expected: float


class Learned:
    """A model of an operation, learned from its records."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = list(examples)
        self.table = CallTable.of([e.point for e in self.examples])
        self.ranges = self._ranges()
        # Cfgs that are the same in most calls are compared as they are. Others are shares of an axis or sizes of
        # their own: the way that predicts the records better is taken.
        self.matching: Matching = by_size
        self.lengths, self.noise = self._fit()
        self._checked = self._check()
        if not self._share_cfgs():
            first = self.matching, self.lengths, self.noise, self._checked
            self.matching = by_rank
            self.lengths, self.noise = self._fit()
            self._checked = self._check()
            if _lost(self._checked) >= _lost(first[-1]):
                self.matching, self.lengths, self.noise, self._checked = first

    def _share_cfgs(self) -> bool:
        """Do most calls have the same candidates?"""
        known = [{cfg.text for cfg in example.cfgs} for example in self.examples]
        pairs = list(itertools.pairwise(known))
        return sum(len(one & other) for one, other in pairs) >= 0.8 * sum(min(map(len, pair)) for pair in pairs)

    def ask(self, point: CallPoint, cfgs: Sequence[Any], heuristic: int) -> tuple[Choice, Raw] | str:
        """The choice among encoded candidates for a call; else the reason why there is none."""
        row = self.table.row(point)
        reason = self._too_far(point, row)
        if reason:
            return reason
        raw = self._raw(row, [cfg_point(cfg) for cfg in cfgs])
        if raw is None or raw.covered < 0.5:
            return "the records hold too few of this call's candidates"
        choice = _chosen(raw, heuristic)
        return self._calibrated(choice), raw

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

    def _fit(self) -> tuple[Array, float]:
        """Lengths by column, and the noise."""
        columns = self.table.rows.shape[1]
        if not columns:
            return np.zeros(0), -2.0
        few = np.unique(np.linspace(0, len(self.examples) - 1, min(len(self.examples), _MOST_TO_FIT)).astype(int))
        wanted = self._common_columns(few)
        if wanted is None:
            return np.ones(columns), -2.0
        rows = self.table.rows[few]
        apart_by_column = np.moveaxis(self.table.apart(rows, rows), -1, 0) ** 2
        # Two doublings are about what a length is before anything is seen.
        lengths, noise, _ = fit_lengths(apart_by_column / 4.0, wanted, steps=16)
        return lengths, noise

    def _common_columns(self, few: NDArray[np.int64]) -> Array | None:
        """Slowdowns of candidates that many records share, one column each, about its middle; else None."""
        names = _by_rank if self.matching is by_rank or not self._share_cfgs() else _by_text
        tables = [names(self.examples[i]) for i in few]
        made = []
        for name in _often(tables):
            column = np.array([table.get(name, math.nan) for table in tables])
            column = np.where(np.isnan(column), np.nanmean(column), column)
            spread = float(column.std())
            if spread > _LEAST_NOISE:
                made.append((column - column.mean()) / spread)
        return _principal(np.stack(made, axis=1)) if made else None

    def _raw(self, row: Array, cfgs: Sequence[CfgPoint], leave_out: int | None = None) -> Raw | None:
        stretched = self.table.apart(row[None], self.table.rows)[0] / 2.0 * np.exp(-self.lengths)
        distance = np.sqrt((stretched**2).sum(axis=1))
        if leave_out is not None:
            distance[leave_out] = math.inf
        order = np.argsort(distance, kind="stable")[: min(_NEAREST, len(distance) - (leave_out is not None))]
        values, doubt = self._aligned(order, cfgs)
        known = np.isfinite(values)
        if not known.any():
            return None
        rows = self.table.rows[order] / 2.0
        pairs = self.table.apart(rows * 2.0, rows * 2.0) / 2.0 * np.exp(-self.lengths)
        kernel = matern((pairs**2).sum(axis=-1))
        cross = matern(distance[order] ** 2)
        return self._posterior(values, doubt, known, kernel, cross, order, distance)

    def _posterior(
        self,
        values: Array,
        doubt: Array,
        known: NDArray[np.bool_],
        kernel: Array,
        cross: Array,
        order: NDArray[np.int64],
        distance: Array,
    ) -> Raw:
        # Slowdowns of one cfg over calls: their middle and spread are those of all that is known of it.
        counts = known.sum(axis=0)
        filled = np.where(known, values, 0.0)
        weights = np.where(known, cross[:, None] + 0.02, 0.0)
        total = np.maximum(weights.sum(axis=0), 1e-9)
        middle = (filled * weights).sum(axis=0) / total
        scale = np.sqrt(((filled - middle) ** 2 * weights).sum(axis=0) / total + _LEAST_NOISE**2)
        noise = math.exp(self.noise) + (_LEAST_NOISE / scale) ** 2
        # One system for each cfg: what is not known of it is all noise.
        own = noise[:, None] + np.where(known, _UNLIKE * doubt**2, 1e6).T
        systems = kernel[None] + own[:, :, None] * np.eye(len(kernel))
        solved = np.linalg.solve(systems, np.broadcast_to(cross[None, :, None], (*own.shape, 1)))[..., 0]
        mean = middle + (solved * np.where(known, values - middle, 0.0).T).sum(axis=1)
        left = np.maximum(1.0 - solved @ cross, 1e-4)
        spread = scale * np.sqrt(left + noise)
        # A cfg that is in no near record says nothing.
        mean, spread = np.where(counts > 0, mean, math.inf), np.where(counts > 0, spread, 0.0)
        return Raw(mean, spread, tuple(map(int, order)), tuple(distance[order].tolist()), float((counts > 0).mean()))

    def _aligned(self, order: NDArray[np.int64], cfgs: Sequence[CfgPoint]) -> tuple[Array, Array]:
        """Slowdowns of these cfgs in some calls, nan where unknown, and how far the cfg there is from the one here."""
        values = np.full((len(order), len(cfgs)), math.nan)
        doubt = np.zeros((len(order), len(cfgs)))
        for at, number in enumerate(order):
            example = self.examples[number]
            for column, match in enumerate(self.matching(cfgs, example.cfgs)):
                if match is not None and match[1] <= _NO_COUNTERPART:
                    values[at, column], doubt[at, column] = example.slower[match[0]], match[1]
        return values, doubt

    def _check(self) -> list[tuple[float, float, float]]:
        """For some records, predicted from the others: stated chance and bound, and how much slower it came out."""
        count = len(self.examples)
        found = []
        for number in np.unique(np.linspace(0, count - 1, min(count, _MOST_TO_CHECK)).astype(int)):
            example = self.examples[number]
            raw = self._raw(self.table.rows[number], example.cfgs, leave_out=int(number))
            if raw is not None and raw.covered >= 0.5:
                choice = _chosen(raw, None)
                found.append((choice.chance, choice.bound, float(example.slower[choice.place])))
        return found

    def _calibrated(self, choice: Choice) -> Choice:
        """The choice with a chance and a bound as they came out for records that looked alike."""
        if len(self._checked) < LEAST:
            return choice
        checked = np.array(self._checked)
        # The records with the most similar chance, and the model's own word for a few more.
        like = np.argsort(np.abs(checked[:, 0] - choice.chance), kind="stable")[:16]
        came_true = float((checked[like, 2] <= NEAR).sum())
        chance = (came_true + 1.5 * choice.chance) / (len(like) + 2)
        alike = np.argsort(np.abs(np.log(checked[:, 1] / choice.bound)), kind="stable")[:20]
        ratio = np.sort(checked[alike, 2] / checked[alike, 1])
        place = min(math.ceil(0.92 * (len(ratio) + 1)) - 1, len(ratio) - 1)
        return Choice(choice.place, chance, choice.bound * float(ratio[place]), choice.expected)


def _chosen(raw: Raw, heuristic: int | None) -> Choice:
    """The candidate with the best chance to be near the best; the heuristic's where nothing is clearly better."""
    known = np.isfinite(raw.mean)
    mean = np.where(known, raw.mean, FAILED)
    draws = mean + raw.spread * _normal(len(mean))
    slower = draws - draws.min(axis=1, keepdims=True)
    chances = np.where(known, (slower <= NEAR).mean(axis=0), 0.0)
    expected = np.where(known, slower.mean(axis=0), math.inf)
    place = int(np.argmin(expected))
    if heuristic is not None and known[heuristic] and expected[heuristic] <= expected[place] + 0.002:
        place = heuristic
    bound = float(np.quantile(slower[:, place], 0.9))
    return Choice(place, float(chances[place]), max(bound, 0.002), float(expected[place]))


@functools.lru_cache(maxsize=64)
def _normal(count: int) -> Array:
    """Normal draws that are the same in every process."""
    return np.random.default_rng(0).standard_normal((_DRAWS, count))


def _by_text(example: Example) -> dict[str, float]:
    return {cfg.text: float(slow) for cfg, slow in zip(example.cfgs, example.slower, strict=True)}


def _by_rank(example: Example) -> dict[str, float]:
    return {
        f"{kind} {rank}": float(slow) for (kind, rank), slow in zip(ranks(example.cfgs), example.slower, strict=True)
    }


def _principal(columns: Array) -> Array:
    """The few ways in which the columns vary together: twenty that say the same are one witness, not twenty."""
    left, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    share = sizes**2 / (sizes**2).sum()
    kept = np.flatnonzero(share >= 0.1)[:3]
    return np.asarray(left[:, kept] * math.sqrt(len(columns)))


def _lost(checked: Sequence[tuple[float, float, float]]) -> float:
    """Time lost by the predictions of records, on average; one that is far off counts little."""
    return float(np.mean([min(slower, 0.5) for _, _, slower in checked])) if checked else math.inf


def _often(tables: Sequence[dict[str, float]], most: int = 16) -> list[str]:
    counts: dict[str, int] = {}
    for table in tables:
        for name in table:
            counts[name] = counts.get(name, 0) + 1
    often = [name for name, count in counts.items() if count * 2 >= len(tables)]
    return sorted(often, key=lambda name: -counts[name])[:most]
