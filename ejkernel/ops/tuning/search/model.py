"""Predicts the times of unmeasured configs from the measured ones: a Gaussian process over the fields of a config.

Each field has a length of its own, found by maximum likelihood, so that fields that do not matter drop out. A few
hundred samples are enough for spaces of tens of thousands, and one fit costs tens of milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Lengths are looked for with no more samples than this, and no more are kept: the cost grows with the cube.
_MOST_TO_FIT = 160
_MOST_SAMPLES = 512
_FIT_STEPS = 20
_ROOT5 = math.sqrt(5.0)
# Logarithms: a field's length spans 0.05 to 20 times its range, the noise 0.0001 to 0.6 of the spread.
_LENGTHS = (-3.0, 3.0)
_NOISE = (-9.0, -0.5)
# How far a length is believed to be from the width of its field, before anything is seen.
_LENGTH_SPREAD = 1.5


@dataclass(frozen=True)
class Belief:
    """Mean and spread of log seconds for some configs, the chance that they run, and how they hang together."""

    mean: Array
    spread: Array
    runs: Array
    # What is left of a config once the samples are known: inner products of rows are what the samples explain.
    explained: Array
    scaled: Array
    scale: float

    def covariance(self, some: NDArray[np.int64]) -> Array:
        """The covariance of the times of some of the configs, given the samples."""
        prior = _matern(_distances(self.scaled[some], self.scaled[some]))
        known = self.explained[some]
        return np.asarray((prior - known @ known.T) * self.scale**2)


def learn(points: Array, groups: NDArray[np.int32], samples: Array, ran: NDArray[np.bool_], ask: Array) -> Belief:
    """Belief about other points from samples (log seconds at points; any value for those that did not run)."""
    keep = _worth_keeping(samples, ran, _MOST_SAMPLES)
    points, samples, ran = points[keep], samples[keep], ran[keep]
    targets = _targets(samples, ran)
    middle, scale = targets.mean(), max(float(targets.std()), 1e-6)
    wanted = (targets - middle) / scale
    few = _worth_keeping(samples, ran, _MOST_TO_FIT)
    lengths, noise = _fit(points[few], groups, wanted[few])
    stretch = np.exp(-lengths)[groups] if len(groups) else np.ones(points.shape[1])
    near, far = points * stretch, ask * stretch
    root = np.linalg.cholesky(_with_noise(_matern(_distances(near, near)), noise))
    cross = _matern(_distances(far, near))
    # One triangular solve serves mean, spread and covariance.
    inverse = np.linalg.inv(root)
    explained = cross @ inverse.T
    mean = explained @ (inverse @ wanted)
    spread = np.sqrt(np.maximum(1.0 - np.einsum("ij,ij->i", explained, explained), 1e-10))
    share = ran.mean()
    # The same lengths serve for what fails: near a failure the chance to run is low.
    runs = np.clip(share + explained @ (inverse @ (ran - share)), 0.02, 1.0)
    return Belief(mean * scale + middle, spread * scale, runs, explained, far, scale)


def _targets(samples: Array, ran: NDArray[np.bool_]) -> Array:
    """Targets of the model: differences above a ceiling do not matter, and a failure counts as the ceiling."""
    ceiling = np.quantile(samples[ran], 0.7)
    return np.where(ran, np.minimum(samples, ceiling), ceiling)


def _worth_keeping(samples: Array, ran: NDArray[np.bool_], most: int) -> NDArray[np.int64]:
    """The fastest half, and of the rest every so many: all where there are few enough."""
    if len(samples) <= most:
        return np.arange(len(samples))
    order = np.argsort(np.where(ran, samples, np.inf), kind="stable")
    rest = order[most // 2 :]
    picked = np.linspace(0, len(rest) - 1, most - most // 2).astype(int)
    return np.sort(np.concatenate([order[: most // 2], rest[picked]]))


def _fit(points: Array, groups: NDArray[np.int32], wanted: Array) -> tuple[Array, float]:
    """Lengths and noise of the highest posterior density, by steps that grow while the slope keeps its sign."""
    count = int(groups.max()) + 1 if len(groups) else 0
    apart = np.stack([_distances(points[:, groups == g], points[:, groups == g]) for g in range(count)])
    flat = apart.reshape(count, -1)
    # The last one is the noise.
    at = np.append(np.zeros(count), -4.0)
    low = np.append(np.full(count, _LENGTHS[0]), _NOISE[0])
    high = np.append(np.full(count, _LENGTHS[1]), _NOISE[1])
    step, before = np.full(count + 1, 0.4), np.zeros(count + 1)
    best, best_at = -math.inf, at
    for _ in range(_FIT_STEPS):
        value, slope = _posterior(at, apart, flat, wanted)
        if value > best:
            best, best_at = value, at
        turned = slope * before
        step = np.clip(np.where(turned > 0, step * 1.3, np.where(turned < 0, step * 0.5, step)), 0.02, 1.0)
        before = slope
        at = np.clip(at + np.sign(slope) * step, low, high)
    return best_at[:-1], float(best_at[-1])


def _posterior(at: Array, apart: Array, flat: Array, wanted: Array) -> tuple[float, Array]:
    lengths, noise = at[:-1], at[-1]
    weights = np.exp(-2 * lengths)
    distance = np.tensordot(weights, apart, axes=1)
    radius = _ROOT5 * np.sqrt(distance)
    decay = np.exp(-radius)
    kernel = (1 + radius + radius**2 / 3) * decay
    noisy = _with_noise(kernel, noise)
    inverse = np.linalg.inv(noisy)
    solved = inverse @ wanted
    _, volume = np.linalg.slogdet(noisy)
    value = -0.5 * (wanted @ solved + volume + ((lengths / _LENGTH_SPREAD) ** 2).sum())
    slack = np.outer(solved, solved) - inverse
    pull = (slack * (5 / 3) * (1 + radius) * decay).reshape(-1)
    slope = 0.5 * weights * (flat @ pull) - lengths / _LENGTH_SPREAD**2
    return float(value), np.append(slope, 0.5 * math.exp(noise) * np.trace(slack))


def _with_noise(kernel: Array, noise: float) -> Array:
    # A trace of it, always, keeps equal points from making the matrix singular.
    return np.asarray(kernel + (math.exp(noise) + 1e-6) * np.eye(len(kernel)))


def _distances(one: Array, other: Array) -> Array:
    """Squared distances of every pair."""
    squares = (one**2).sum(axis=1)[:, None] + (other**2).sum(axis=1)[None] - 2 * one @ other.T
    return np.asarray(np.maximum(squares, 0.0))


def _matern(squares: Array) -> Array:
    """Covariance of two points by their distance: smooth, but not more so than times of kernels."""
    radius = _ROOT5 * np.sqrt(squares)
    return np.asarray((1 + radius + radius**2 / 3) * np.exp(-radius))
