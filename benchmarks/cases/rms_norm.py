"""Norms of transformers: by the width of the model, for one token and for many."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import RmsNorm

from .case import Case, normal


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def plain(x: Any, weight: Any) -> jax.Array:
    """Computes the norm in float32, the obvious way."""
    wide = _wide(x)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (normed * _wide(weight)).astype(x.dtype)


def case(rows: int, width: int, platform: str, *, dtype: Any = jnp.bfloat16, backward: bool = False) -> Case:
    """A case of so many rows."""

    def make(rng: Any) -> Any:
        shapes = ((rows, width), (width,))
        return tuple(normal(rng, size, dtype) for size in shapes), {}

    # x is read and y written; then x and dy are read and dx is written.
    traffic = jnp.dtype(dtype).itemsize * rows * width * (5 if backward else 2)
    kind = "" if dtype == jnp.bfloat16 else f" {jnp.dtype(dtype).name}"
    title = f"{rows}x{width}{kind}{', gradient' if backward else ''}"
    ready: dict[str, Any] = {}
    return Case("rms_norm", title, platform, make, RmsNorm, plain, 0, traffic, backward, ready)


CASES = [
    case(1, 4096, "gpu"),
    case(128, 8192, "gpu"),
    case(1024, 2048, "gpu"),
    case(4096, 4096, "gpu"),
    case(4096, 4096, "gpu", backward=True),
    case(16384, 8192, "gpu"),
    case(16384, 8192, "gpu", backward=True),
    case(512, 1024, "cpu"),
    case(2048, 2048, "cpu"),
    case(512, 1024, "cpu", dtype=jnp.float32),
    case(512, 1024, "cpu", backward=True),
    case(33, 1000, "check"),
    case(64, 4096, "check"),
    case(5, 100, "check", dtype=jnp.float16),
    case(17, 513, "check", dtype=jnp.float32),
    # Narrow and wide rows of which a program of the gradient takes several, the last one fewer.
    case(20_001, 100, "check"),
    case(1001, 4096, "check"),
]
