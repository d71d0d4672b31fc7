"""How long one call takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax


class Clock(Protocol):
    """Seconds of one call; a test brings its own."""

    name: str

    def time(self, call: Callable[..., Any], leaves: Sequence[Any], calls: int) -> float:
        """Seconds per call over so many calls in a row."""


class WallClock:
    """The host's clock around calls that are waited for."""

    name = "wall"

    def time(self, call: Callable[..., Any], leaves: Sequence[Any], calls: int) -> float:
        """Seconds per call, the wait for the last one included."""
        start = time.perf_counter()
        for _ in range(calls):
            out = call(*leaves)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls
