"""Rows of attention scores, of router logits and of words."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .case import Case, bytes_of, normal, wide


def plain(x):
    """As JAX has it, in the argument's dtype."""
    return jax.nn.softmax(x, axis=-1)


def in_float32(x):
    """The same in float32."""
    return jax.nn.softmax(wide(x), axis=-1).astype(x.dtype)


def case(rows, width, *, dtype=jnp.bfloat16, backward=False):
    """One softmax."""
    once = bytes_of((rows, width), dtype=dtype)
    return Case(
        "softmax",
        f"{rows}x{width} {jnp.dtype(dtype).name}",
        functools.partial(normal, (rows, width), dtype=dtype),
        plain,
        ready={"float32": in_float32},
        traffic=2 * once,
        both_traffic=5 * once,
        backward=backward,
    )


GPU = [
    case(8192, 64),
    case(8192, 2048),
    case(65536, 1024, backward=True),
    case(16384, 4096),
    case(32, 131072, dtype=jnp.float32),
    case(4096, 32000),
]
CPU = [case(512, 1024), case(16, 50304), case(512, 1024, dtype=jnp.float32)]
CHECK = [case(33, 1000), case(64, 4096), case(3, 8192, dtype=jnp.float32), case(5, 100, dtype=jnp.float16)]
