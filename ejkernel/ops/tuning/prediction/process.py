"""A Gaussian process over pairs of a call and a cfg: what some times say of others. No JAX here."""

from __future__ import annotations

import math

import numpy as np

from ..search.features import Array, Places
from ..search.model import matern
from .scales import JITTER, LEVEL, ModelScales, Points

# A point about which the others say all but this share of the noise says nothing new.
_UNSAID = 0.1
_PIECES = 8


class Process:
    """A process that some times have taught, by means of a few of the points; exact where there are not more."""

    def __init__(self, points: Points, slower: Array, scales: ModelScales, most: int) -> None:
        self.points, self.scales = points, scales
        self._calls = matern(scales.of_calls(points.apart))
        self._cfgs = scales.of_cfgs(points.sizes, points.sizes, points.kinds, points.kinds)
        self._linear = points.slopes @ points.slopes.T
        self.few = points.some(self._telling(most))
        self._by_call = [np.flatnonzero(points.call == number) for number in range(len(points.apart))]
        within = self._between(self.few, self.few)
        within.flat[:: len(within) + 1] += JITTER
        cross = self._between(self.few, points)
        inverse = np.linalg.inv(within)
        total, pulled = within.copy(), np.zeros(len(within))
        self._own = []
        for mine in self._by_call:
            # What the few cannot say of a call's times is noise of its own: it would else be taken for theirs.
            same = points.some(mine)
            unsaid = self._between(same, same) - cross[:, mine].T @ inverse @ cross[:, mine]
            root = np.linalg.inv(np.linalg.cholesky(unsaid + self._own_noise(points.cfg[mine])))
            one, seen = cross[:, mine] @ root.T, root @ slower[mine]
            total += one @ one.T
            pulled += one @ seen
            self._own.append((cross[:, mine], one, seen))
        self._total = np.linalg.inv(total)
        self._known = inverse - self._total
        self._pulled, self._weights = pulled, self._total @ pulled
        self._pieces = [np.ascontiguousarray(piece) for piece in np.array_split(self._known, _PIECES, axis=1)]
        self._used = np.unique(self.few.cfg, return_inverse=True)

    def _telling(self, most: int) -> Places:
        """The points that say most about all others: always the one about which least is known."""
        points = self.points
        count = len(points.call)
        shares = np.exp(2 * self.scales.amplitudes)
        left = shares[0] + shares[1] + shares[2] + shares[3] * np.diag(self._linear)[points.call]
        least = _UNSAID * shares[5]
        said = np.zeros((most, count))
        found: list[int] = []
        for step in range(min(most, count)):
            place = int(np.argmax(left))
            if left[place] < least:
                break
            row = self._between(points.some(np.array([place])), points)[0] - said[:step, place] @ said[:step]
            said[step] = row / math.sqrt(left[place])
            left = left - said[step] ** 2
            left[place] = 0.0
            found.append(place)
        return np.sort(np.array(found, int))

    def _between(self, one: Points, other: Points) -> Array:
        calls = self._calls[np.ix_(one.call, other.call)]
        linear = self._linear[np.ix_(one.call, other.call)]
        return self._sum(calls, linear, self._cfgs[np.ix_(one.cfg, other.cfg)], self._kinds(one.cfg, other.cfg))

    def _kinds(self, one: Places, other: Places) -> Array:
        kinds = self.points.kinds
        return np.asarray((kinds[one][:, None] == kinds[other][None, :]).astype(float))

    def _sum(self, calls: Array, linear: Array, cfgs: Array, kinds: Array) -> Array:
        shares = np.exp(2 * self.scales.amplitudes)
        return np.asarray(cfgs * (shares[0] + shares[2] * calls) + kinds * (shares[1] * calls + shares[3] * linear))

    def _own_noise(self, cfgs: Places) -> Array:
        """The covariance of what one call's times have of their own."""
        return self._noise(self._kinds(cfgs, cfgs))

    def _noise(self, kinds: Array) -> Array:
        shares = np.exp(2 * self.scales.amplitudes)
        return np.asarray(LEVEL + shares[4] * kinds + (shares[5] + JITTER) * np.eye(len(kinds)))

    def without(self, number: int) -> tuple[Array, Array]:
        """Mean and covariance of a call's times from those of all others."""
        mine = self._by_call[number]
        cross, one, seen = self._own[number]
        # The inverse without this call's part, by its low rank.
        half = self._total @ one
        inner = np.linalg.inv(np.eye(len(mine)) - one.T @ half)
        pulled = self._pulled - one @ seen
        weights = self._total @ pulled + half @ (inner @ (half.T @ pulled))
        cfgs = self.points.cfg[mine]
        same = self.points.some(mine)
        known = self._known @ cross - half @ (inner @ (half.T @ cross))
        return cross.T @ weights, self._between(same, same) - cross.T @ known + self._own_noise(cfgs)

    def ask(self, apart: Array, slopes: Array, sizes: Array, kinds: Places, most: int) -> tuple[Places, Array, Array]:
        """Places of the cfgs that promise most in another call, with mean and covariance of their times.

        The call is known by its differences from all others, by column, and by where it lies.
        """
        points, scales = self.points, self.scales
        calls = matern(scales.of_calls(apart))[self.few.call]
        linear = (points.slopes @ slopes)[self.few.call]
        used, at = self._used
        cfgs = scales.of_cfgs(sizes, points.sizes[used], kinds, points.kinds[used])[:, at]
        same = (kinds[:, None] == points.kinds[used][None, :])[:, at]
        cross = self._sum(calls, linear, cfgs, same)
        mean = cross @ self._weights
        first = np.sort(np.argsort(mean, kind="stable")[:most])
        sizes, kinds, cross = sizes[first], kinds[first], cross[first]
        own = (kinds[:, None] == kinds[None, :]).astype(float)
        prior = self._sum(np.ones(1), slopes @ slopes, scales.of_cfgs(sizes, sizes, kinds, kinds), own)
        # In pieces for which no library starts threads: on a busy machine these wait for each other.
        said = np.concatenate([cross @ piece for piece in self._pieces], axis=1)
        return first, mean[first], prior - said @ cross.T + self._noise(own)
