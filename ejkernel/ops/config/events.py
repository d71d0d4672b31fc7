"""Who is told about a choice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ..core.key import Key


class ListenerWarning(UserWarning):
    """A listener that raised."""


class Teller:
    """Tells one listener; one that raises is reported once and then ignored."""

    def __init__(self, listener: Callable[..., Any] | None) -> None:
        self.listener = listener
        self._reported = False

    def __call__(self, event: str, key: Key, **data: Any) -> None:
        """Tells the listener what happened to a key."""
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
