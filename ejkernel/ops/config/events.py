"""Events of a choice, for the counters, the log and a listener; the counters are of the whole process. No JAX here."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..core import codec, formatting
from ..core.key import Key
from ..core.shown import Shown
from ..tuning.progress import log, outcome
from .tuning_budget import seconds_spent

# Hits come with every trace, tunings now and then; an error is raised as well.
_LEVELS = {
    **dict.fromkeys(("override", "overlay_hit", "cache_hit", "autotune_start"), logging.DEBUG),
    **dict.fromkeys(("autotune_finish", "heuristics"), logging.INFO),
    "error": logging.WARNING,
}


class ListenerWarning(UserWarning):
    """A listener that raised."""


class Teller:
    """Counts, logs, and tells one listener; one that raises is reported once and then ignored."""

    def __init__(self, listener: Callable[..., Any] | None) -> None:
        self.listener = listener
        self._reported = False

    def __call__(self, event: str, key: Key, tier: str | None, /, **data: Any) -> None:
        """Tells what happened to a key; a choice, or a tuning that ended, is counted under a tier."""
        if tier is not None:
            count(tier)
        level = _LEVELS[event]
        if log.isEnabledFor(level):
            told = {"event": event, **key._asdict(), **data}
            # One attribute of the record: the names that a log record has itself cannot be given twice.
            log.log(level, "%s", _sentence(event, key, tier, data), extra={"ejkernel": told})
        if self.listener is None:
            return
        try:
            self.listener(event, device=key.device, op_id=key.op_id, call_key=key.call_key, **data)
        # Whatever a listener raises must not reach the computation that it listens to.
        except Exception as error:
            if not self._reported:
                self._reported = True
                warnings.warn(
                    f"on_event raised {type(error).__name__}: {error} (at {event!r} for {key}); "
                    "it is called on, and further errors of it are not reported",
                    ListenerWarning,
                    stacklevel=3,
                )


def _sentence(event: str, key: Key, tier: str | None, data: Mapping[str, Any]) -> str:
    title = f"{key.op_id} {key.call_key}"
    if event == "autotune_finish":
        record, seconds = data.get("record"), data.get("seconds", 0.0)
        if record is None:
            return f"tuning {title} failed after {formatting.duration(seconds)}"
        return outcome(title, record, seconds)
    if event == "error":
        return f"no configuration for {title}"
    if event == "autotune_start":
        return f"tuning {title}: {data.get('candidates')} candidates"
    reason = f": {data['reason']}" if data.get("reason") else ""
    return f"{title}: {codec.describe(data.get('cfg'))} from {tier}{reason}"


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
