"""Holds what a model says of itself against what came out for records that it had not seen. No JAX here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .example import FAILED

# Within this of the best counts as near it; the logarithm.
NEAR = math.log(1.05)
# How far a model's chances may be off, before anything is seen: by so much in the middle, and by so much in how
# far they spread, in logits and as a factor.
_SHIFT, _SPREAD = 2.0, 0.5
# Bounds are held against so many records that looked alike, and are kept in so many of them.
_ALIKE, _KEPT = 20, 0.9
_LEAST, _LEAST_BOUND = 4, 0.002


@dataclass(frozen=True)
class Checked:
    """A record that was predicted from the others: stated chance and bound, and how much slower the choice was."""

    chance: float
    bound: float
    slower: float


class Calibration:
    """Stated chances and bounds as they came out."""

    def __init__(self, checked: Sequence[Checked]) -> None:
        self.stated = np.array([_logit(one.chance) for one in checked])
        self.bounds = np.array([max(one.bound, _LEAST_BOUND) for one in checked])
        self.slower = np.array([one.slower for one in checked])
        self.shift, self.spread = self._fit()

    def _fit(self) -> tuple[float, float]:
        """Shift and spread of the logits of highest posterior density, by Newton's method."""
        came = (self.slower <= NEAR).astype(float)
        features = np.stack([np.ones(len(came)), self.stated], axis=1)
        middle, weights = np.array([0.0, 1.0]), np.diag([_SHIFT**-2, _SPREAD**-2])
        at = middle
        for _ in range(20):
            chance = 1 / (1 + np.exp(-features @ at))
            slope = features.T @ (came - chance) - weights @ (at - middle)
            curve = (features * (chance * (1 - chance))[:, None]).T @ features + weights
            at = at + np.clip(np.linalg.solve(curve, slope), -1.0, 1.0)
        # A surer model is never the less right one.
        return float(at[0]), max(float(at[1]), 0.1)

    def chance(self, stated: float) -> float:
        """The chance to be near the best."""
        return 1 / (1 + math.exp(-(self.shift + self.spread * _logit(stated))))

    def bound(self, stated: float) -> float:
        """A bound that holds in nine of ten: as the records with the most similar ones kept theirs."""
        stated = max(stated, _LEAST_BOUND)
        if len(self.bounds) < _LEAST:
            return stated
        alike = np.argsort(np.abs(np.log(self.bounds / stated)), kind="stable")[:_ALIKE]
        ratios = np.sort(self.slower[alike] / self.bounds[alike])
        place = min(math.ceil(_KEPT * (len(ratios) + 1)) - 1, len(ratios) - 1)
        # None is slower than a failure counts.
        return min(stated * float(ratios[place]), FAILED)


def _logit(chance: float) -> float:
    # What came out in all draws or in none is not certain.
    kept = min(max(chance, 0.01), 0.99)
    return math.log(kept / (1 - kept))
