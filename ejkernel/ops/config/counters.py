"""Counts of the answers of each tier in this process, and of what tuning took. No JAX here."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..core.shown import Shown
from ..tuning.budget import seconds_spent


@dataclass(frozen=True, slots=True, repr=False)
class Counters(Shown):
    """Choices by the tier that answered; the difference of two is what happened between them."""

    override: int = 0
    overlay: int = 0
    memory: int = 0
    persistent: int = 0
    remote: int = 0
    packs: int = 0
    # Tunings that ended with a cfg, explicit ones included.
    autotune: int = 0
    seeds: int = 0
    predicted: int = 0
    heuristics: int = 0
    # Choices that no tier had an answer for.
    error: int = 0
    # Tunings that ended without a cfg.
    failed_tunings: int = 0
    # In all threads; a tuning inside a tuning counts once.
    tuning_seconds: float = 0.0
    # Tiers that have no field here, by name.
    others: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __sub__(self, other: Counters) -> Counters:
        mine, before = self.as_dict(), other.as_dict()
        return _counters({name: value - before.get(name, 0) for name, value in mine.items()})

    def as_dict(self) -> dict[str, int | float]:
        """The counts as plain data, for a metrics library."""
        known = {name: getattr(self, name) for name in _FIELDS}
        return {**known, **self.others}


_FIELDS = tuple(field.name for field in fields(Counters) if field.name != "others")
_counts: dict[str, int] = {}
_lock = threading.Lock()


def _counters(counts: Mapping[str, Any]) -> Counters:
    others = {name: count for name, count in counts.items() if name not in _FIELDS}
    return Counters(**{name: count for name, count in counts.items() if name not in others}, others=others)


def counters() -> Counters:
    """Choices of all selectors since the process began: counted once a trace, as events are told, not once a call."""
    with _lock:
        return _counters({**_counts, "tuning_seconds": seconds_spent()})


def count(tier: str) -> None:
    """Counts one answer of a tier, or one tuning that failed."""
    with _lock:
        _counts[tier] = _counts.get(tier, 0) + 1
