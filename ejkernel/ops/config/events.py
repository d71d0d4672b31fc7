"""Events of a choice, for the counters, the log and a listener."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ..core import codec
from ..core.key import Key
from ..tuning.progress import log, outcome
from .counters import count

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
        return f"tuning {title} failed after {seconds:.1f} s" if record is None else outcome(title, record, seconds)
    if event == "error":
        return f"no configuration for {title}"
    if event == "autotune_start":
        return f"tuning {title}: {data.get('candidates')} candidates"
    reason = f": {data['reason']}" if data.get("reason") else ""
    return f"{title}: {codec.describe(data.get('cfg'))} from {tier}{reason}"
