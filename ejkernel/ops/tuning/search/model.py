"""Predicts the times of unmeasured configs from the measured ones: a Gaussian process over the fields of a config.

Each field has a length of its own, found by maximum likelihood, so that fields that do not matter drop out. A few
hundred samples are enough for spaces of tens of thousands, and one fit costs tens of milliseconds.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .features import Array, Space

Marks = NDArray[np.bool_]

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
# A kernel's time often hangs on a product or a quotient of two sizes. With so many samples the most telling of these
# become columns of their own; with fewer they would be chance.
_SAMPLES_FOR_PAIRS = 64
_MOST_PAIRS = 2
# And only where they explain the samples so much better, as a difference of log likelihoods: elsewhere they mislead.
_LEAST_GAIN = 8.0
# Failing or not is a step: what is near a failure may run all the same.
_LEAST_DOUBT = -4.0


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
        prior = matern(_distances(self.scaled[some], self.scaled[some]))
        known = self.explained[some]
        return np.asarray((prior - known @ known.T) * self.scale**2)


def learn(space: Space, seen: NDArray[np.int64], samples: Array, ran: Marks, asked: NDArray[np.int64]) -> Belief:
    """Belief about configs from samples of others (log seconds; any value for those that did not run)."""
    keep = _worth_keeping(samples, ran, _MOST_SAMPLES)
    seen, samples, ran = seen[keep], samples[keep], ran[keep]
    groups = space.groups
    points, ask = space.points[seen], space.points[asked]
    targets = _targets(samples, ran)
    middle, scale = targets.mean(), float(targets.std())
    # Of one sample, or of equal ones, nothing is known about the spread.
    scale = scale if scale > 1e-6 else 1.0
    wanted = (targets - middle) / scale
    few = _worth_keeping(samples, ran, _MOST_TO_FIT)
    lengths, noise, likely = _fit(points[few], groups, wanted[few])
    runs = np.ones(len(asked)) if ran.all() else _chance_to_run(points, groups, ran, ask)
    pairs = _telling_pairs(space, points[few], wanted[few], lengths, noise) if len(few) >= _SAMPLES_FOR_PAIRS else []
    if pairs:
        wider = [np.concatenate([x, *(_pair(space, x, *pair) for pair in pairs)], axis=1) for x in (points, ask)]
        more = np.append(groups, groups.max() + 1 + np.arange(len(pairs))).astype(np.int32)
        fitted = _fit(wider[0][few], more, wanted[few], np.append(lengths, np.full(len(pairs), 0.5)), noise)
        if fitted[2] > likely + _LEAST_GAIN:
            (points, ask), groups, (lengths, noise, _) = wider, more, fitted
    stretch = np.exp(-lengths)[groups]
    near, far = points * stretch, ask * stretch
    root = np.linalg.cholesky(_with_noise(matern(_distances(near, near)), noise))
    # One triangular solve serves mean, spread and covariance.
    inverse = np.linalg.inv(root)
    explained = matern(_distances(far, near)) @ inverse.T
    mean = explained @ (inverse @ wanted)
    spread = np.sqrt(np.maximum(1.0 - np.einsum("ij,ij->i", explained, explained), 1e-10))
    return Belief(mean * scale + middle, spread * scale, runs, explained, far, scale)


def _chance_to_run(points: Array, groups: NDArray[np.int32], ran: Marks, ask: Array) -> Array:
    """The chance that configs run, with lengths of its own: other fields decide it than decide the time."""
    share = ran.mean()
    wanted = (ran - share) / max(float(ran.std()), 1e-3)
    few = np.arange(len(ran))[-_MOST_TO_FIT:]
    lengths, noise, _ = _fit(points[few], groups, wanted[few])
    stretch = np.exp(-lengths)[groups]
    near = points * stretch
    solved = np.linalg.solve(_with_noise(matern(_distances(near, near)), max(noise, _LEAST_DOUBT)), ran - share)
    return np.asarray(np.clip(share + matern(_distances(ask * stretch, near)) @ solved, 0.02, 1.0))


def _telling_pairs(
    space: Space, points: Array, wanted: Array, lengths: Array, noise: float
) -> list[tuple[int, int, float]]:
    """Pairs of sizes with the product or quotient that would raise the likelihood most; none where none would."""
    near = points * np.exp(-lengths)[space.groups]
    radius = _ROOT5 * np.sqrt(_distances(near, near))
    decay = np.exp(-radius)
    inverse = np.linalg.inv(_with_noise((1 + radius + radius**2 / 3) * decay, noise))
    solved = inverse @ wanted
    # How the likelihood grows with the squared distance of two samples, over all of them.
    pull = (inverse - np.outer(solved, solved)) * (1 + radius) * decay
    found = []
    for one, other in itertools.combinations(np.flatnonzero(space.doublings).tolist(), 2):
        for sign in (1.0, -1.0):
            column = _pair(space, points, one, other, sign)
            apart = (column - column.T) ** 2
            size = math.sqrt(float((apart**2).mean()))
            found.append((float((pull * apart).sum()) / size if size else 0.0, (one, other, sign)))
    found.sort(key=lambda pair: -pair[0])
    return [pair for gain, pair in found[:_MOST_PAIRS] if gain > 0]


def _pair(space: Space, points: Array, one: int, other: int, sign: float) -> Array:
    """The logarithm of a product or quotient of two sizes, as a column that spans one."""
    left, right = space.doublings[one], space.doublings[other]
    return np.asarray((left * points[:, [one]] + sign * right * points[:, [other]]) / (left + right))


def _targets(samples: Array, ran: Marks) -> Array:
    """Targets of the model: differences above a ceiling do not matter, and a failure counts as the ceiling."""
    ceiling = np.quantile(samples[ran], 0.7)
    return np.where(ran, np.minimum(samples, ceiling), ceiling)


def _worth_keeping(samples: Array, ran: Marks, most: int) -> NDArray[np.int64]:
    """The fastest half, and of the rest every so many: all where there are few enough."""
    if len(samples) <= most:
        return np.arange(len(samples))
    order = np.argsort(np.where(ran, samples, np.inf), kind="stable")
    rest = order[most // 2 :]
    picked = np.linspace(0, len(rest) - 1, most - most // 2).astype(int)
    return np.sort(np.concatenate([order[: most // 2], rest[picked]]))


def _fit(
    points: Array, groups: NDArray[np.int32], wanted: Array, lengths: Array | None = None, noise: float = -4.0
) -> tuple[Array, float, float]:
    """Lengths of the groups of columns, the noise, and how likely they make the samples."""
    count = int(groups.max()) + 1
    apart = np.stack([_distances(points[:, groups == g], points[:, groups == g]) for g in range(count)])
    return fit_lengths(apart, wanted, lengths, noise)


def fit_lengths(
    apart: Array, wanted: Array, lengths: Array | None = None, noise: float = -4.0, *, steps: int = _FIT_STEPS
) -> tuple[Array, float, float]:
    """Logarithms of lengths and noise of highest posterior density, by steps that grow while the slope keeps its sign.

    `apart` has the squared distances of every pair of samples, by length; `wanted` one or several columns of targets.
    """
    count = len(apart)
    flat, wanted = apart.reshape(count, -1), wanted.reshape(len(wanted), -1)
    # The last one is the noise.
    at = np.append(np.zeros(count) if lengths is None else lengths, noise)
    low = np.append(np.full(count, _LENGTHS[0]), _NOISE[0])
    high = np.append(np.full(count, _LENGTHS[1]), _NOISE[1])
    step, before = np.full(count + 1, 0.4), np.zeros(count + 1)
    best, best_at = -math.inf, at
    for _ in range(steps):
        value, slope = _posterior(at, apart, flat, wanted)
        if value > best:
            best, best_at = value, at
        turned = slope * before
        step = np.clip(np.where(turned > 0, step * 1.3, np.where(turned < 0, step * 0.5, step)), 0.02, 1.0)
        before = slope
        at = np.clip(at + np.sign(slope) * step, low, high)
    return best_at[:-1], float(best_at[-1]), best


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
    columns = wanted.shape[1]
    value = -0.5 * ((wanted * solved).sum() + columns * volume + ((lengths / _LENGTH_SPREAD) ** 2).sum())
    slack = solved @ solved.T - columns * inverse
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


def matern(squares: Array) -> Array:
    """Covariance of two points by their squared distance: smooth, but not more so than times of kernels."""
    radius = _ROOT5 * np.sqrt(squares)
    return np.asarray((1 + radius + radius**2 / 3) * np.exp(-radius))
