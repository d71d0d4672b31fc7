"""Integers to measure with, where a trace or a shape hides the real ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import known_values

# Larger arrays are drawn where they are needed: sending one takes longer than compiling what draws it.
_MANY = 1 << 22


def drawn(rng: np.random.Generator, value: Any, low: int, high: int) -> Any:
    """Integers from `low` to before `high`, as far as the dtype goes; an array that can be read stays as it is."""
    if known_values(value) is not None:
        return value
    dtype = np.dtype(value.dtype)
    stop = max(low + 1, min(high, int(np.iinfo(dtype).max) + 1))
    if value.size <= _MANY:
        return rng.integers(low, stop, value.shape, dtype)
    return jax.random.randint(jax.random.key(int(rng.integers(1 << 31))), value.shape, low, stop, jnp.dtype(dtype))
