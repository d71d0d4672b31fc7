"""Records that answer a call: all of them where there are few, else those around it. No JAX here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..search.features import Array, Places
from .process import Process
from .scales import ModelScales, Points, fit

# Scales are found from so many times of so many calls, and so many times stand for all of a region: the cost grows with
# the cube.
_MOST_TO_FIT, _CALLS_TO_FIT, _MOST_FEW = 256, 32, 256
# With more times than this calls are answered by so many times around them, of so many calls at least, and there is a
# centre for every so many calls.
_MOST_AT_ONCE, _MOST_POINTS, _LEAST, _CALLS_A_CENTRE = 800, 480, 8, 12


@dataclass(frozen=True, eq=False)
class Region:
    """Calls around one of them, and what they say of others there: all calls at once would take too long."""

    centre: int
    calls: Places
    process: Process
    # The numbers among these calls of those that are nearer to this centre than to others.
    own: tuple[int, ...]


def regions_of(points: Points, slower: Array, scales: ModelScales) -> list[Region]:
    """Regions that hold all calls: one if there are few."""
    distance = scales.of_calls(points.apart)
    counts = np.bincount(points.call, minlength=len(distance))
    centres, left = [0], distance[0]
    if len(points.call) > _MOST_AT_ONCE:
        # Always the call that is farthest from all centres is the next one.
        while len(centres) < math.ceil(len(distance) / _CALLS_A_CENTRE) and left.max() > 0:
            centres.append(int(np.argmax(left)))
            left = np.minimum(left, distance[centres[-1]])
    nearest = np.argmin(distance[centres], axis=0)
    found = []
    for number, centre in enumerate(centres):
        order = np.argsort(distance[centre], kind="stable")
        most = len(order) if len(centres) == 1 else int(np.searchsorted(np.cumsum(counts[order]), _MOST_POINTS))
        own = np.flatnonzero(nearest == number)
        calls = np.union1d(order[: max(most, _LEAST)], own)
        inside, kept = points.of(calls)
        process = process_of(inside, slower[kept], scales)
        found.append(Region(centre, calls, process, tuple(np.searchsorted(calls, own).tolist())))
    return found


def found_scales(points: Points, slower: Array) -> ModelScales:
    """Scales from the times that say most about them."""
    few = telling(points, slower)
    return fit(points.some(few), slower[few])


def process_of(points: Points, slower: Array, scales: ModelScales) -> Process:
    """The process of some times, by means of so many of them as take no time."""
    return Process(points, slower, scales, _MOST_FEW)


def telling(points: Points, slower: Array) -> Places:
    """The pairs that scales are found from: of some calls the cfgs that are fast anywhere, one of each call in turn."""
    count = len(points.apart)
    calls = np.arange(count)
    if count > _CALLS_TO_FIT:
        # Calls from everywhere, each with its nearest: lengths may be short.
        some = np.unique(np.linspace(0, count - 1, _CALLS_TO_FIT // 2).astype(int))
        apart = (points.apart[some] ** 2).sum(axis=-1)
        apart[np.arange(len(some)), some] = math.inf
        calls = np.union1d(some, np.argmin(apart, axis=1))
    inside, kept = points.of(calls)
    best = np.full(len(points.sizes), math.inf)
    np.minimum.at(best, points.cfg, slower)
    order = np.lexsort((slower[kept], best[inside.cfg], inside.call))
    starts = np.flatnonzero(np.diff(inside.call[order], prepend=-1))
    turn = np.zeros(len(order))
    turn[order] = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    # Calls in an order in which any first few of them are spread over all.
    spread = (inside.call * 0.6180339887) % 1.0
    return np.sort(kept[np.lexsort((spread, turn))[:_MOST_TO_FIT]])
