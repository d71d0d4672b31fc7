"""Norms of transformers: by the width of the model, for one token and for many."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .case import Case, bytes_of, normal, wide


def plain(x, weight):
    """In float32."""
    rows = wide(x)
    normed = rows * jax.lax.rsqrt(jnp.mean(rows * rows, -1, keepdims=True) + 1e-6)
    return (normed * wide(weight)).astype(x.dtype)


def case(rows, width, *, dtype=jnp.bfloat16, backward=False):
    """One norm."""
    once = bytes_of((rows, width), dtype=dtype)
    return Case(
        "rms_norm",
        f"{rows}x{width} {jnp.dtype(dtype).name}",
        functools.partial(normal, (rows, width), (width,), dtype=dtype),
        plain,
        traffic=2 * once,
        # x, dy and the output on the way forward and back: read x, write y, read x and dy, write dx.
        both_traffic=5 * once,
        backward=backward,
    )


GPU = [
    case(1, 4096),
    case(128, 8192),
    case(1024, 2048),
    case(4096, 4096, backward=True),
    case(16384, 8192, backward=True),
]
CPU = [case(512, 1024), case(2048, 2048), case(512, 1024, dtype=jnp.float32)]
CHECK = [case(33, 1000), case(64, 4096), case(5, 100, dtype=jnp.float16), case(17, 513, dtype=jnp.float32)]
