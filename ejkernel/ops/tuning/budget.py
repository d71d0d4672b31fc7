"""Seconds that this process has spent on tuning."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_spent = 0.0
_inline = 0.0
_lock = threading.Lock()
_depth = threading.local()


def seconds_spent() -> float:
    """Seconds of tuning so far, in all threads."""
    return _spent


def inline_seconds_spent() -> float:
    """Seconds of those tunings that a call began by itself."""
    with _lock:
        return _inline


@contextlib.contextmanager
def spending(*, inline: bool = False) -> Iterator[None]:
    """Counts a `with` block; a tuning inside a tuning counts once."""
    global _spent, _inline
    nested = getattr(_depth, "value", 0)
    _depth.value = nested + 1
    start = time.perf_counter()
    try:
        yield
    finally:
        _depth.value = nested
        if not nested:
            taken = time.perf_counter() - start
            with _lock:
                _spent += taken
                _inline += taken if inline else 0.0
