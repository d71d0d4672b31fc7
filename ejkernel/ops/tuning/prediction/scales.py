"""Scales of a model of times: how much calls and cfgs matter, and over which distances, by likelihood. No JAX here.

What a time has in common with all others of its call drops out, so calls with other candidates teach all the same. What
is left is a sum: what a cfg is worth anywhere, what a kind of cfg is worth in calls like this one, what a cfg is worth
there, and a slope of each kind over the sizes. How much each of them counts, and over what distance in each size of a
call and of a cfg, has the highest posterior density.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..search.features import Array, Places
from ..search.model import matern

# The level of a call is unknown: the variance of its logarithm.
LEVEL = 4.0
# Logarithms before anything is seen, and how far they may be off. A call's size matters over two doublings (distances
# are in pairs of them), a cfg's over four; amplitudes are of a cfg, a kind in calls, a cfg in calls, a slope, a kind in
# one call, and noise.
_CALL_LENGTH, _CFG_LENGTH = 0.3, 1.4
_AMPLITUDES = tuple(map(math.log, (0.15, 0.1, 0.07, 0.05, 0.02, 0.01)))
_DOUBT, _FARTHEST = 1.0, 3.0
# Times that differ by less than half a percent are equal: nothing is measured better.
_LEAST_NOISE = math.log(0.005)
_STEPS = 24
# Keeps equal points from making a matrix singular.
JITTER = 1e-6


@dataclass(frozen=True)
class Points:
    """Pairs of a call and a cfg: rows of two tables, by their numbers."""

    # Of calls: how far they are apart, by column, and where they lie, from the middle.
    apart: Array
    slopes: Array
    # Of cfgs: sizes, and the number of their kind.
    sizes: Array
    kinds: Places
    # The pairs.
    call: Places
    cfg: Places

    def some(self, kept: Places) -> Points:
        """A few of the pairs."""
        return replace(self, call=self.call[kept], cfg=self.cfg[kept])

    def of(self, calls: Places) -> tuple[Points, Places]:
        """The pairs of some calls, which alone are left in the table of calls, and their places."""
        kept = np.flatnonzero(np.isin(self.call, calls))
        apart, slopes = self.apart[np.ix_(calls, calls)], self.slopes[calls]
        number = np.zeros(len(self.apart), int)
        number[calls] = np.arange(len(calls))
        return replace(self.some(kept), apart=apart, slopes=slopes, call=number[self.call[kept]]), kept


@dataclass(frozen=True)
class ModelScales:
    """Logarithms of lengths of calls, lengths of cfgs and amplitudes."""

    calls: Array
    cfgs: Array
    amplitudes: Array

    @staticmethod
    def before(columns: int, fields: int) -> ModelScales:
        """The scales before anything is seen."""
        return ModelScales(np.full(columns, _CALL_LENGTH), np.full(fields, _CFG_LENGTH), np.array(_AMPLITUDES))

    def flat(self) -> Array:
        """All scales in a row."""
        return np.concatenate([self.calls, self.cfgs, self.amplitudes])

    def like(self, flat: Array) -> ModelScales:
        """Scales from a row of numbers."""
        ends = len(self.calls), len(self.calls) + len(self.cfgs)
        return ModelScales(flat[: ends[0]], flat[ends[0] : ends[1]], flat[ends[1] :])

    def of_calls(self, apart: Array) -> Array:
        """Squared distances of calls, from differences by column."""
        return np.asarray(((apart * np.exp(-self.calls)) ** 2).sum(axis=-1))

    def of_cfgs(self, one: Array, other: Array, kinds: Places, others: Places) -> Array:
        """Likeness of cfgs: nothing where their kinds differ."""
        apart = np.abs(one[:, None, :] - other[None, :, :]) @ np.exp(-self.cfgs)
        return np.asarray(np.exp(-apart) * (kinds[:, None] == others[None, :]))


def fit(points: Points, slower: Array) -> ModelScales:
    """ModelScales of highest posterior density, by steps that grow while the slope keeps its sign."""
    before = ModelScales.before(points.apart.shape[-1], points.sizes.shape[1])
    middle = before.flat()
    low, high = middle - _FARTHEST, middle + _FARTHEST
    low[-1] = _LEAST_NOISE
    at, step, last = middle, np.full(len(middle), 0.4), np.zeros(len(middle))
    best, best_at = -math.inf, middle
    density = _Density(points, slower)
    for _ in range(_STEPS):
        value, slope = density(before.like(at))
        value -= 0.5 * float((((at - middle) / _DOUBT) ** 2).sum())
        slope = slope - (at - middle) / _DOUBT**2
        if value > best:
            best, best_at = value, at
        turned = slope * last
        step = np.clip(np.where(turned > 0, step * 1.3, np.where(turned < 0, step * 0.5, step)), 0.02, 1.0)
        last = slope
        at = np.clip(at + np.sign(slope) * step, low, high)
    return before.like(best_at)


class _Density:
    """The log likelihood of times given scales, and how it grows with each of them."""

    def __init__(self, points: Points, slower: Array) -> None:
        self.points, self.slower = points, slower
        call, cfg = points.call, points.cfg
        self.same_call = (call[:, None] == call[None, :]).astype(float)
        self.same_kind = (points.kinds[cfg][:, None] == points.kinds[cfg][None, :]).astype(float)
        self.linear = (points.slopes @ points.slopes.T)[np.ix_(call, call)] * self.same_kind
        self.cfg_apart = np.abs(points.sizes[:, None, :] - points.sizes[None, :, :])

    def __call__(self, scales: ModelScales) -> tuple[float, Array]:
        points = self.points
        call, cfg = points.call, points.cfg
        count = len(points.apart)
        squares = scales.of_calls(points.apart)
        calls = matern(squares)[np.ix_(call, call)]
        cfgs = np.exp(-(self.cfg_apart @ np.exp(-scales.cfgs)))[np.ix_(cfg, cfg)] * self.same_kind
        shares = np.exp(2 * scales.amplitudes)
        terms = (cfgs, self.same_kind * calls, cfgs * calls, self.linear, self.same_kind * self.same_call)
        kernel = LEVEL * self.same_call + sum(share * term for share, term in zip(shares, terms, strict=False))
        kernel.flat[:: len(kernel) + 1] += shares[-1] + JITTER
        inverse = np.linalg.inv(kernel)
        solved = inverse @ self.slower
        _, volume = np.linalg.slogdet(kernel)
        pull = 0.5 * (np.outer(solved, solved) - inverse)
        # By pairs of calls, and by pairs of cfgs: what hangs on a length is the same for all pairs of points of theirs.
        by_call = _summed(pull * (shares[1] * self.same_kind + shares[2] * cfgs), call, count)
        by_cfg = _summed(pull * cfgs * (shares[0] + shares[2] * calls), cfg, len(points.sizes))
        radius = math.sqrt(5.0) * np.sqrt(squares)
        steep = by_call * (5 / 3) * (1 + radius) * np.exp(-radius)
        slope = [
            *np.tensordot(steep, points.apart**2, axes=2) * np.exp(-2 * scales.calls),
            *np.tensordot(by_cfg, self.cfg_apart, axes=2) * np.exp(-scales.cfgs),
            *(2 * share * float((pull * term).sum()) for share, term in zip(shares, terms, strict=False)),
            2 * shares[-1] * float(np.trace(pull)),
        ]
        return -0.5 * float(self.slower @ solved + volume), np.array(slope)


def _summed(pairs: Array, group: Places, count: int) -> Array:
    """The sum of a square table over pairs of groups."""
    marks = np.zeros((count, len(group)))
    marks[group, np.arange(len(group))] = 1.0
    return np.asarray(marks @ pairs @ marks.T)
