"""Layer norms of encoders and of older decoders."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import LayerNorm

from .case import Case, normal


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def plain(x: Any, weight: Any, bias: Any) -> jax.Array:
    """Computes the norm in float32, the mean first."""
    wide = _wide(x)
    off = wide - jnp.mean(wide, -1, keepdims=True)
    normed = off * jax.lax.rsqrt(jnp.mean(off * off, -1, keepdims=True) + 1e-6)
    return (normed * _wide(weight) + _wide(bias)).astype(x.dtype)


def standardized(x: Any, weight: Any, bias: Any) -> jax.Array:
    """Computes the norm by `jax.nn.standardize`, which takes both sums at once."""
    return (jax.nn.standardize(_wide(x), axis=-1, epsilon=1e-6) * _wide(weight) + _wide(bias)).astype(x.dtype)


def case(rows: int, width: int, platform: str, *, dtype: Any = jnp.bfloat16, backward: bool = False) -> Case:
    """A case of so many rows."""

    def make(rng: Any) -> Any:
        shapes = ((rows, width), (width,), (width,))
        return tuple(normal(rng, size, dtype) for size in shapes), {}

    # x is read and y written; then x and dy are read and dx is written.
    traffic = jnp.dtype(dtype).itemsize * rows * width * (5 if backward else 2)
    kind = "" if dtype == jnp.bfloat16 else f" {jnp.dtype(dtype).name}"
    title = f"{rows}x{width}{kind}{', gradient' if backward else ''}"
    # One pass is only as good as this dtype is coarse.
    ready = {"standardize": standardized} if dtype == jnp.bfloat16 else {}
    return Case("layer_norm", title, platform, make, LayerNorm, plain, 0, traffic, backward, ready)


CASES = [
    case(1, 1024, "gpu"),
    case(512, 768, "gpu"),
    case(4096, 1024, "gpu"),
    case(8192, 4096, "gpu"),
    case(8192, 4096, "gpu", backward=True),
    case(16384, 1280, "gpu"),
    case(512, 768, "cpu"),
    case(2048, 2048, "cpu"),
    case(512, 768, "cpu", dtype=jnp.float32),
    case(512, 768, "cpu", backward=True),
    case(33, 1000, "check"),
    case(64, 1024, "check"),
    case(5, 100, "check", dtype=jnp.float16),
    case(17, 513, "check", dtype=jnp.float32),
    # Narrow and wide rows of which a program of the gradient takes several, the last one fewer.
    case(20_001, 100, "check"),
    case(1001, 4096, "check"),
]
