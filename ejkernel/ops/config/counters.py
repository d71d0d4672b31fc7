"""How often each tier answered in this process, and what tuning took. No JAX here."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..tuning.budget import seconds_spent


@dataclass(frozen=True, slots=True)
class Counters:
    """Choices by the tier that answered; the difference of two is what happened between them."""

    override: int = 0
    overlay: int = 0
    memory: int = 0
    persistent: int = 0
    # Tunings that ended with a cfg, explicit ones included.
    autotune: int = 0
    heuristics: int = 0
    # Choices that no tier had an answer for.
    error: int = 0
    # Tunings that ended without a cfg.
    failed_tunings: int = 0
    # In all threads; a tuning inside a tuning counts once.
    tuning_seconds: float = 0.0

    def __sub__(self, other: Counters) -> Counters:
        mine, before = asdict(self), asdict(other)
        return Counters(**{name: value - before[name] for name, value in mine.items()})

    def as_dict(self) -> dict[str, int | float]:
        """The same as plain data, for a metrics library."""
        return asdict(self)


_TIERS = {"override": "override", "overlay_hit": "overlay", "heuristics": "heuristics", "error": "error"}
_counts: dict[str, int] = {field.name: 0 for field in fields(Counters) if field.name != "tuning_seconds"}
_lock = threading.Lock()


def counters() -> Counters:
    """What was chosen since the process began, by all selectors: once a trace, as events are told, not once a call."""
    with _lock:
        return Counters(**_counts, tuning_seconds=seconds_spent())


def count(event: str, data: Mapping[str, Any]) -> None:
    """Counts one event of a selector."""
    tier = _TIERS.get(event)
    if event == "cache_hit":
        tier = "persistent" if data.get("level") == "persistent" else "memory"
    elif event == "autotune_finish":
        tier = "failed_tunings" if data.get("record") is None else "autotune"
    # Whoever starts will also finish.
    if tier is not None:
        with _lock:
            _counts[tier] += 1
