"""One call of a library operation, as the benchmarks compare it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Case:
    """A call, what JAX alone offers for it, and what the hardware must at least do."""

    # The function's name in `ejkernel.library`, and the case in words.
    operation: str
    name: str
    # The arrays of the call, made with JAX alone, so that shapes can be asked for without making them.
    make: Callable[[], tuple[Any, ...]]
    # The same from the arrays, as anybody would write it in JAX; keeps float64 where it is given that.
    plain: Callable[..., Any]
    # Static keywords of the library's function.
    static: Mapping[str, Any] = field(default_factory=dict)
    # What else JAX has ready-made, by name.
    ready: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # Of the forward pass, and of both passes; for the floor.
    flops: float = 0.0
    traffic: float = 0.0
    both_flops: float = 0.0
    both_traffic: float = 0.0
    # Compared forward and backward too?
    backward: bool = False


def normal(*shapes: tuple[int, ...], dtype: Any = jnp.bfloat16, scale: float = 1.0) -> tuple[jax.Array, ...]:
    """Random arrays."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple((scale * jax.random.normal(k, s)).astype(dtype) for k, s in zip(keys, shapes, strict=True))


def wide(x: Any) -> Any:
    """At least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def bytes_of(*shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> float:
    """What these arrays take."""
    import math

    return float(sum(math.prod(shape) for shape in shapes) * jnp.dtype(dtype).itemsize)
