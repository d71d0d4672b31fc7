"""What changed in any cache or policy of this process, so that whoever built on an answer can tell. No JAX here."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

# Far more than a program learns between two calls of one kernel; whoever is further behind looks at everything.
_KEPT = 4096

# Moves with every change; read on every call, so a plain module attribute.
epoch = 0

_log: deque[tuple[Any, Any]] = deque(maxlen=_KEPT)
_lock = threading.Lock()


def note(key: Any, cfg: Any) -> None:
    """A key has this cfg now."""
    global epoch
    with _lock:
        _log.append((key, cfg))
        epoch += 1


def note_everything() -> None:
    """Any key may have another cfg now."""
    note(None, None)


def since(seen: int) -> list[tuple[Any, Any]] | None:
    """The changes after an epoch as (key, cfg); None where everything may have changed."""
    with _lock:
        count = epoch - seen
        if count > len(_log):
            return None
        recent = [_log[i] for i in range(len(_log) - count, len(_log))]
    return None if any(key is None for key, _ in recent) else recent
