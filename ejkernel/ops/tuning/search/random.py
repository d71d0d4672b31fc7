"""Configs by chance: what is left where a config has no fields, and what other strategies are judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from .features import Space
from .strategy import Known, unknown


@final
@dataclass(frozen=True)
class RandomSearch:
    """Draws from what is not known yet, each with the same chance."""

    def propose(self, space: Space, known: Known, count: int, rng: np.random.Generator) -> Sequence[int]:
        """Some configs by chance."""
        left = unknown(space, known)
        return [int(i) for i in rng.choice(left, size=min(count, len(left)), replace=False)]
