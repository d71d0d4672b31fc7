"""Seconds that this process has spent on tuning."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_spent = 0.0
_lock = threading.Lock()
_depth = threading.local()


def seconds_spent() -> float:
    """Seconds of tuning so far, in all threads."""
    return _spent


@contextlib.contextmanager
def spending() -> Iterator[None]:
    """Counts a `with` block; a tuning inside a tuning counts once."""
    global _spent
    nested = getattr(_depth, "value", 0)
    _depth.value = nested + 1
    start = time.perf_counter()
    try:
        yield
    finally:
        _depth.value = nested
        if not nested:
            with _lock:
                _spent += time.perf_counter() - start
