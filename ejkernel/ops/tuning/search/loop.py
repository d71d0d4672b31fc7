"""The search itself, without clock, device or disk: starts, then batch after batch, until it is enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .features import Space
from .strategy import Strategy

# Seconds of each config of a batch; infinity for one that failed. One that is left out was not measured: time is up.
Measure = Callable[[Sequence[int]], Mapping[int, float]]


def search(
    space: Space,
    measure: Measure,
    strategy: Strategy,
    *,
    most: float,
    batch: int = 16,
    seed: int = 0,
    wave: Callable[[int], int] = lambda left: 1,
    out_of_time: Callable[[], bool] = lambda: False,
    earlier: Callable[[Mapping[int, float]], Mapping[int, float]] = lambda known: {},
) -> dict[int, float]:
    """Seconds of every config that was measured, in order; the same for the same seed and the same times.

    `wave` says how many configs the next batch should have at least, from how many may still be measured. `earlier`
    gives what another search knows, from what the first batch of this one has shown.
    """
    rng = np.random.default_rng(seed)
    known: dict[int, float] = {}
    most = int(min(most, len(space)))
    space = replace(space, budget=most)
    wanted = _fresh(space.starts, known, len(space))
    # A lone start would compile alone: it goes with the first batch.
    if len(wanted) < 2:
        wanted = _fresh([*wanted, *strategy.propose(space, known, batch, rng)], known, len(space))
    while wanted:
        wanted = wanted[: most - len(known)]
        found = measure(wanted)
        is_first = not known
        known.update({i: found[i] for i in wanted if i in found})
        if is_first:
            known = {**earlier(known), **known}
        if len(known) >= most or any(i not in found for i in wanted) or out_of_time():
            break
        left = most - len(known)
        space = replace(space, wave=wave(left))
        wanted = _fresh(strategy.propose(space, known, min(batch, left), rng), known, len(space))
    return known


def _fresh(proposed: Sequence[int], known: Mapping[int, float], count: int) -> list[int]:
    """The proposals of a strategy, without known ones and numbers of no config: strategies may be the user's own."""
    return [i for i in dict.fromkeys(map(int, proposed)) if 0 <= i < count and i not in known]
