"""Matrix products of transformers: projections, feed-forward layers with their activation, one token at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .case import Case, bytes_of, normal, wide


def plain(a, b, bias=None, *, activation=None):
    """In the factors' dtype, bias and activation included."""
    out = a @ b if bias is None else a @ b + bias
    return {None: lambda x: x, "gelu": jax.nn.gelu, "silu": jax.nn.silu}[activation](out)


def wide_product(a, b, bias=None, *, activation=None):
    """With the product in float32."""
    out = jnp.matmul(a, b, preferred_element_type=wide(a).dtype)
    out = out if bias is None else out + wide(bias)
    return {None: lambda x: x, "gelu": jax.nn.gelu, "silu": jax.nn.silu}[activation](out).astype(a.dtype)


def case(words, m, k, n, *, dtype=jnp.bfloat16, bias=False, activation=None, backward=False):
    """One product."""
    shapes = ((m, k), (k, n), (n,)) if bias else ((m, k), (k, n))
    traffic = bytes_of(*shapes, (m, n), dtype=dtype)
    return Case(
        "matmul",
        f"{words} {m}x{k} by {n} {jnp.dtype(dtype).name}",
        functools.partial(normal, *shapes, dtype=dtype, scale=k**-0.25),
        functools.partial(plain, activation=activation),
        {"activation": activation} if activation else {},
        {"float32 product": functools.partial(wide_product, activation=activation)},
        flops=2.0 * m * k * n,
        traffic=traffic,
        both_flops=6.0 * m * k * n,
        both_traffic=3 * traffic,
        backward=backward,
    )


GPU = [
    case("decode", 16, 4096, 14336, activation="silu"),
    case("decode, one row", 1, 4096, 4096),
    case("projection", 2048, 4096, 4096, backward=True),
    case("up", 8192, 4096, 14336, activation="silu", backward=True),
    case("down", 8192, 14336, 4096),
    case("square", 4096, 4096, 4096),
    case("gpt2 up", 4096, 768, 3072, bias=True, activation="gelu"),
]
CPU = [
    case("projection", 256, 512, 512),
    case("up", 256, 512, 2048, bias=True, activation="gelu"),
    case("up", 128, 256, 1024, dtype=jnp.float32, activation="silu"),
]
CHECK = [
    case("even", 256, 512, 256, bias=True, activation="gelu"),
    case("odd", 129, 257, 131, bias=True, activation="silu"),
    case("few rows", 3, 200, 72),
    case("odd", 65, 130, 70, dtype=jnp.float16),
    case("odd", 65, 130, 70, dtype=jnp.float32),
]
