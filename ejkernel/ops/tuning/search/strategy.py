"""The interface of a search strategy: from what is known so far to what should be measured next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .features import Space

# Seconds of each config that was measured, in order of measuring; infinity for one that failed.
Known = Mapping[int, float]


@runtime_checkable
class Strategy(Protocol):
    """Proposes what to measure next; it keeps nothing between calls, so that the same knowledge gives the same path."""

    def propose(self, space: Space, known: Known, count: int, rng: np.random.Generator) -> Sequence[int]:
        """Up to `count` configs that are not known yet; none ends the search."""


def unknown(space: Space, known: Known) -> NDArray[np.int64]:
    """The configs that were not measured yet."""
    left = np.ones(len(space), bool)
    left[list(known)] = False
    return np.flatnonzero(left)


def best_first(known: Known) -> list[int]:
    """The configs that ran, fastest first."""
    return sorted((i for i, seconds in known.items() if math.isfinite(seconds)), key=lambda i: (known[i], i))


def neighbours(space: Space, centres: Iterable[int], *, within: int = 1) -> NDArray[np.bool_]:
    """Marks the configs that differ from one of these in no more than so many fields."""
    near = np.zeros(len(space), bool)
    for centre in centres:
        near |= space.distance(centre) <= within
    return near


def steps(space: Space, centres: Iterable[int]) -> NDArray[np.bool_]:
    """Marks the configs that differ from one of these in one field, by the next value above or below in the space."""
    near = np.zeros(len(space), bool)
    for centre in centres:
        differ = space.codes != space.codes[centre]
        line = np.flatnonzero(differ.sum(axis=1) == 1)
        field = differ[line].argmax(axis=1)
        moved = space.codes[line, field] - space.codes[centre, field]
        for side in {(f, up) for f, up in zip(field.tolist(), (moved > 0).tolist(), strict=True)}:
            here = (field == side[0]) & ((moved > 0) == side[1])
            far = np.abs(moved[here])
            near[line[here][far == far.min()]] = True
    return near
