"""The search itself, without clock, device or disk: starts, then batch after batch, until it is enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    starts: Sequence[int] = (),
    most: float,
    batch: int = 16,
    seed: int = 0,
    out_of_time: Callable[[], bool] = lambda: False,
) -> dict[int, float]:
    """Seconds of every config that was measured, in order; the same for the same seed and the same times."""
    rng = np.random.default_rng(seed)
    known: dict[int, float] = {}
    wanted: Sequence[int] = list(dict.fromkeys(starts))
    while True:
        room = int(min(most - len(known), len(space)))
        wanted = wanted[:room]
        if wanted:
            found = measure(wanted)
            known.update({i: found[i] for i in wanted if i in found})
            if len(found) < len(wanted) or out_of_time():
                return known
        room = int(min(most - len(known), len(space) - len(known)))
        if room <= 0:
            return known
        wanted = _fresh(strategy.propose(space, known, min(batch, room), rng), known, len(space))
        if not wanted:
            return known


def _fresh(proposed: Sequence[int], known: Mapping[int, float], count: int) -> list[int]:
    """What a strategy proposed, without what is known or no config at all: strategies may be the user's own."""
    return [i for i in dict.fromkeys(map(int, proposed)) if 0 <= i < count and i not in known]
