"""Rows of attention scores, of router logits and of words."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import Softmax

from .case import Case, normal


def plain(x: Any) -> jax.Array:
    """JAX's own softmax, in the argument's dtype."""
    return jax.nn.softmax(x, axis=-1)


def in_float32(x: Any) -> jax.Array:
    """JAX's own softmax, in float32."""
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


def case(rows: int, width: int, platform: str, *, dtype: Any = jnp.bfloat16, backward: bool = False) -> Case:
    """A case of so many rows."""

    def make(rng: Any) -> Any:
        shapes = ((rows, width),)
        return tuple(normal(rng, size, dtype) for size in shapes), {}

    # x is read and y written; then x and dy are read and dx is written.
    traffic = jnp.dtype(dtype).itemsize * rows * width * (5 if backward else 2)
    kind = "" if dtype == jnp.bfloat16 else f" {jnp.dtype(dtype).name}"
    title = f"{rows}x{width}{kind}{', gradient' if backward else ''}"
    ready = {"float32": in_float32} if dtype != jnp.float32 else {}
    return Case("softmax", title, platform, make, Softmax, plain, 0, traffic, backward, ready)


CASES = [
    case(8192, 64, "gpu"),
    case(8192, 2048, "gpu"),
    case(16384, 4096, "gpu"),
    case(65536, 1024, "gpu"),
    case(65536, 1024, "gpu", backward=True),
    case(4096, 32000, "gpu"),
    case(32, 131072, "gpu", dtype=jnp.float32),
    case(512, 1024, "cpu"),
    case(16, 50304, "cpu"),
    case(512, 1024, "cpu", dtype=jnp.float32),
    case(33, 1000, "check"),
    case(64, 4096, "check"),
    case(3, 8192, "check", dtype=jnp.float32),
    case(5, 100, "check", dtype=jnp.float16),
]
