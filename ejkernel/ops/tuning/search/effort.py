"""Limits of a search: wall-clock seconds and evaluations, under four names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from ...core.errors import SettingError

# Up to so many candidates are raced whole: nothing can be learned from fewer.
FEW = 32


@final
@dataclass(frozen=True, slots=True)
class Effort:
    """A budget: the search ends with whichever is used up first."""

    name: str
    seconds: float
    # Distinct configs, those that fail included.
    evaluations: float


EFFORTS = {
    effort.name: effort
    for effort in (
        Effort("quick", 10.0, 50),
        Effort("default", 60.0, 200),
        Effort("full", 600.0, 2000),
        Effort("exhaustive", math.inf, math.inf),
    )
}


def effort_named(name: str) -> Effort:
    """The effort of a name; a `SettingError` lists the names there are."""
    if not isinstance(name, str) or name not in EFFORTS:
        raise SettingError(f"effort={name!r} is unknown; use one of {', '.join(map(repr, EFFORTS))}")
    return EFFORTS[name]
