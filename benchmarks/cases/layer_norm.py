"""Layer norms of encoders and of older decoders."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .case import Case, bytes_of, normal, wide


def plain(x, weight, bias):
    """In float32, the mean first."""
    rows = wide(x)
    off = rows - jnp.mean(rows, -1, keepdims=True)
    normed = off * jax.lax.rsqrt(jnp.mean(off * off, -1, keepdims=True) + 1e-6)
    return (normed * wide(weight) + wide(bias)).astype(x.dtype)


def standardized(x, weight, bias):
    """By `jax.nn.standardize`."""
    return (jax.nn.standardize(wide(x), axis=-1, epsilon=1e-6) * wide(weight) + wide(bias)).astype(x.dtype)


def case(rows, width, *, dtype=jnp.bfloat16, backward=False):
    """One norm."""
    once = bytes_of((rows, width), dtype=dtype)
    return Case(
        "layer_norm",
        f"{rows}x{width} {jnp.dtype(dtype).name}",
        functools.partial(normal, (rows, width), (width,), (width,), dtype=dtype),
        plain,
        # One pass is only as good as this dtype is coarse.
        ready={"standardize": standardized} if dtype == jnp.bfloat16 else {},
        traffic=2 * once,
        both_traffic=5 * once,
        backward=backward,
    )


GPU = [case(1, 1024), case(512, 768), case(4096, 1024), case(8192, 4096, backward=True), case(16384, 1280)]
CPU = [case(512, 768), case(2048, 2048), case(512, 768, dtype=jnp.float32)]
CHECK = [case(33, 1000), case(64, 1024), case(5, 100, dtype=jnp.float16), case(17, 513, dtype=jnp.float32)]
