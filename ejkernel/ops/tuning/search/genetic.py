"""A genetic algorithm: children of the best configs so far, each field from one of two parents or by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from .features import Space
from .random import RandomSearch
from .strategy import Known, best_first


@final
@dataclass(frozen=True)
class GeneticSearch:
    """Breeds from the best; a child that is no config of the space is replaced by the nearest that is unknown."""

    parents: int = 20
    mutation: float = 0.15

    def propose(self, space: Space, known: Known, count: int, rng: np.random.Generator) -> Sequence[int]:
        """The children of the best so far; by chance where there are no two parents."""
        pool = best_first(known)[: self.parents]
        if len(pool) < 2 or not space.has_fields:
            return RandomSearch().propose(space, known, count, rng)
        taken = np.zeros(len(space), bool)
        taken[list(known)] = True
        children: list[int] = []
        while len(children) < count and not taken.all():
            child = self._child(space, pool, rng)
            apart = (space.codes != child).sum(axis=1)
            nearest = np.flatnonzero((apart == apart[~taken].min()) & ~taken)
            children.append(int(rng.choice(nearest)))
            taken[children[-1]] = True
        return children

    def _child(self, space: Space, pool: Sequence[int], rng: np.random.Generator) -> NDArray[np.int32]:
        # The better of two draws is a parent.
        mother, father = (pool[int(rng.integers(len(pool), size=2).min())] for _ in range(2))
        fields = space.codes.shape[1]
        child = np.where(rng.random(fields) < 0.5, space.codes[mother], space.codes[father])
        changed = rng.random(fields) < self.mutation
        return np.where(changed, rng.integers(space.sizes), child).astype(np.int32)
