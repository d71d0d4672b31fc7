"""The default strategy: a model of the whole space proposes, and a share of each batch stays near the best so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from .features import Array, Space
from .model import Belief, learn
from .random import RandomSearch
from .strategy import Known, best_first, neighbours, steps, unknown

# The model is asked about no more configs than this: beyond, about as many by chance, and all near the best.
_MOST_ASKED = 20_000
# The batch is put together from so many of the most promising configs.
_SHORTLIST = 768
# Small budgets: below so many evaluations in all, so many are spread out first, so many are a batch, and this share
# of it stays near the best so far. A design of 32 eats a budget of 50, and a batch of 16 teaches nothing until its end.
_SMALL_BUDGETS = ((64, 16, 4, 0.25), (160, 16, 8, 0.5))
# Where hardly anything runs, what runs is near what ran.
_NEAR_WHAT_RAN = 0.5


@final
@dataclass(frozen=True)
class GuidedSearch:
    """Spreads out first, or looks around the configs of a warm start; then goes where the model expects most."""

    # With fewer samples than this there is nothing to learn from yet; less for small budgets.
    design: int = 32
    # The share of a batch that differs in one field from one of the best so far: a model can be wrong.
    near: float = 0.25
    centres: int = 5
    # Where configs are known from elsewhere, so many samples look around them before anything else, in small batches.
    around: int = 15
    around_batch: int = 4

    def propose(self, space: Space, known: Known, count: int, rng: np.random.Generator) -> Sequence[int]:
        """The next batch."""
        # Far from every sample terms vanish and quotients overflow, as they should.
        with np.errstate(all="ignore"):
            return self._propose(space, known, count, rng)

    def _propose(self, space: Space, known: Known, count: int, rng: np.random.Generator) -> Sequence[int]:
        left = unknown(space, known)
        best = best_first(known)
        if len(left) <= count:
            return [int(i) for i in left]
        if not space.has_fields:
            return RandomSearch().propose(space, known, count, rng)
        seeded = len(space.starts) > 1
        design, batch, near = self._terms(space, count)
        if len(known) < design and not (seeded and best):
            return spread_out(space, known, min(count, max(design - len(known), 1)), rng)
        if not best:
            # Limits of a device are exceeded on one side of a field, so half of the batch goes to corners.
            wanted = corners(space, left, batch // 2, rng)
            return [*wanted, *spread_out(space, {**known, **dict.fromkeys(wanted, math.inf)}, batch - len(wanted), rng)]
        asked = self._asked(space, left, best, rng)
        if seeded and len(known) < self.around and len(best) > 1:
            batch = min(count, max(self.around_batch, space.wave))
            # What is best elsewhere is often a step from what is best here, and the model alone prefers long ways.
            step = steps(space, best[: self.centres])[asked]
            far = batch // 2
            return self._batch(space, known, asked, batch, [step] * (batch - far), from_near=far)
        near = max(near, _NEAR_WHAT_RAN) if len(best) < len(known) / 8 else near
        return self._batch(space, known, asked, batch, from_near=math.ceil(near * batch))

    def _terms(self, space: Space, count: int) -> tuple[int, int, float]:
        """The samples of the design, the next batch, and the share of it that stays near."""
        for most, design, batch, near in _SMALL_BUDGETS:
            if space.budget is not None and space.budget < most:
                return min(self.design, design), min(count, max(batch, space.wave)), max(self.near, near)
        return self.design, count, self.near

    def _asked(
        self, space: Space, left: NDArray[np.int64], best: Sequence[int], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        if len(left) <= _MOST_ASKED:
            return left
        near = neighbours(space, best[: self.centres], within=2)[left]
        chance = rng.choice(left, size=_MOST_ASKED, replace=False)
        return np.union1d(left[near], chance)

    def _batch(
        self,
        space: Space,
        known: Known,
        asked: NDArray[np.int64],
        count: int,
        first: Sequence[NDArray[np.bool_]] = (),
        *,
        from_near: int,
    ) -> list[int]:
        seen = np.array(list(known))
        seconds = np.array(list(known.values()))
        ran = np.isfinite(seconds)
        samples = _logarithms(seconds, ran)
        belief = learn(space, seen, samples, ran, asked)
        goal = float(samples[ran].min())
        near = neighbours(space, best_first(known)[: self.centres])[asked]
        return [int(asked[i]) for i in _pick(belief, goal, [*first, *[near] * from_near], count)]


def _logarithms(seconds: Array, ran: NDArray[np.bool_]) -> Array:
    """Log seconds; a clock that says zero or less means less than it can tell, half of the least that it told."""
    told = seconds[ran & (seconds > 0)]
    least = 0.5 * float(told.min()) if len(told) else 1e-9
    return np.asarray(np.log(np.where(ran, np.maximum(seconds, least), 1.0)))


def corners(space: Space, left: NDArray[np.int64], count: int, rng: np.random.Generator) -> list[int]:
    """Configs at the ends of their fields, each the last one in a direction by chance."""
    found: list[int] = []
    points = space.points[left]
    for _ in range(count):
        direction = rng.choice((-1.0, 1.0), size=points.shape[1])
        far = points @ direction
        far[np.isin(left, found)] = -math.inf
        found.append(int(left[int(np.argmax(far))]))
    return found


def spread_out(space: Space, known: Known, count: int, rng: np.random.Generator) -> list[int]:
    """Configs far from each other and from what is known: each the farthest of some by chance."""
    left = unknown(space, known)
    pool = rng.choice(left, size=min(len(left), 8 * count), replace=False)
    apart = np.full(len(pool), math.inf)
    for i in known:
        apart = np.minimum(apart, _apart(space, pool, i))
    found: list[int] = []
    for _ in range(min(count, len(pool))):
        place = int(np.argmax(apart))
        found.append(int(pool[place]))
        apart = np.minimum(apart, _apart(space, pool, found[-1]))
        apart[place] = -1.0
    return found


def _apart(space: Space, pool: NDArray[np.int64], one: int) -> Array:
    return np.asarray(np.abs(space.points[pool] - space.points[one]).sum(axis=1))


def _promise(mean: Array, spread: Array, runs: Array, goal: float) -> Array:
    """The logarithm of how much faster than the goal a config may be, on average over what is believed."""
    z = (goal - mean) / spread
    # A close approximation of the normal distribution.
    below = 0.5 * (1 + np.tanh(0.7978845608 * (z + 0.044715 * z**3)))
    gain = z * below + np.exp(-0.5 * z**2) / 2.5066282746
    # Far out both terms vanish against each other: there the leading term of the series.
    far = np.minimum(z, -4.0)
    gain = np.where(z > -4.0, np.log(np.maximum(gain, 1e-300)), -0.5 * far**2 - np.log(2.5066282746 * far**2))
    return np.asarray(gain + np.log(spread) + np.log(runs))


def _pick(belief: Belief, goal: float, among: Sequence[NDArray[np.bool_]], count: int) -> list[int]:
    """The most promising, one after the other, the first of them among these in turn, where there are any.

    What each will teach about the others counts as known already.
    """
    order = np.argsort(-_promise(belief.mean, belief.spread, belief.runs, goal), kind="stable")
    close = [order[some[order]][: 4 * count] for some in among]
    short = np.unique(np.concatenate([order[:_SHORTLIST], *close]))
    covariance = belief.covariance(short)
    mean, runs = belief.mean[short], belief.runs[short]
    free = np.ones(len(short), bool)
    found: list[int] = []
    for number in range(min(count, len(short))):
        spread = np.sqrt(np.maximum(np.diag(covariance), 1e-12))
        hope = np.where(free, _promise(mean, spread, runs, goal), -math.inf)
        if number < len(among) and (free & among[number][short]).any():
            hope = np.where(among[number][short], hope, -math.inf)
        place = int(np.argmax(hope))
        found.append(int(short[place]))
        free[place] = False
        taught = covariance[:, place] / math.sqrt(covariance[place, place] + 1e-9)
        covariance = covariance - np.outer(taught, taught)
    return found
