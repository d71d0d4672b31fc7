"""A tuned call: its parts, and the times of its candidates. No JAX here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.key import Key
from .calls import CallPoint, point_of
from .cfgs import CfgPoint, cfg_point

# A candidate that failed counts as so many times slower than the best: it is never near it.
FAILED = math.log(16.0)


@dataclass(frozen=True, eq=False)
class Example:
    """A tuning of another call: encoded cfgs with their seconds, None for those that failed."""

    key: Key
    call: Mapping[str, str]
    times: Sequence[tuple[Any, float | None]]

    @cached_property
    def point(self) -> CallPoint:
        """The call as numbers."""
        return point_of(self.call)

    @cached_property
    def cfgs(self) -> tuple[CfgPoint, ...]:
        """The candidates as numbers."""
        return tuple(cfg_point(cfg) for cfg, _ in self.times)

    @cached_property
    def slower(self) -> NDArray[np.float64]:
        """The difference of logarithms by which each candidate is slower than the best."""
        known = [seconds for _, seconds in self.times if seconds is not None]
        best = min(known, default=1.0)
        return np.array([FAILED if s is None else min(math.log(s / best), FAILED) for _, s in self.times])
