"""Matrix products of transformers: projections, feed-forward layers with their activation, one token at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import Matmul

from .case import Case, normal

_ACTIVATIONS: dict[Any, Any] = {None: lambda x: x, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


def plain(a: Any, b: Any, bias: Any = None, *, activation: Any = None) -> jax.Array:
    """The product in the factors' dtype, bias and activation included."""
    return _ACTIVATIONS[activation](a @ b if bias is None else a @ b + bias)


def wide_product(a: Any, b: Any, bias: Any = None, *, activation: Any = None) -> jax.Array:
    """The product, bias and activation in float32."""
    out = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    return _ACTIVATIONS[activation](out if bias is None else out + bias.astype(jnp.float32)).astype(a.dtype)


def case(
    name: str,
    platform: str,
    shape: tuple[int, int, int],
    *,
    dtype: Any = jnp.bfloat16,
    bias: bool = False,
    activation: str | None = None,
    backward: bool = False,
) -> Case:
    """A case from (rows, inner, columns)."""
    m, k, n = shape

    def make(rng: Any) -> Any:
        shapes = ((m, k), (k, n), (n,)) if bias else ((m, k), (k, n))
        arrays = tuple(normal(rng, size, dtype, k**-0.25) for size in shapes)
        return arrays, {"activation": activation} if activation else {}

    times = 3 if backward else 1
    flops = 2 * m * k * n * times
    traffic = jnp.dtype(dtype).itemsize * (m * k + k * n + m * n) * times
    title = f"{name} {m}x{k} by {n}{' ' + activation if activation else ''}{', gradient' if backward else ''}"
    ready = {"float32 product": wide_product} if dtype != jnp.float32 else {}
    return Case("matmul", title, platform, make, Matmul, plain, flops, traffic, backward, ready)


CASES = [
    case("decode", "gpu", (1, 4096, 4096)),
    case("decode", "gpu", (16, 4096, 14336), activation="silu"),
    case("projection", "gpu", (2048, 4096, 4096)),
    case("projection", "gpu", (2048, 4096, 4096), backward=True),
    case("up", "gpu", (8192, 4096, 14336), activation="silu"),
    case("down", "gpu", (8192, 14336, 4096)),
    case("square", "gpu", (4096, 4096, 4096)),
    case("gpt2 up", "gpu", (4096, 768, 3072), bias=True, activation="gelu"),
    case("projection", "cpu", (256, 512, 512)),
    case("up", "cpu", (256, 512, 2048), bias=True, activation="gelu"),
    case("up, float32", "cpu", (128, 256, 1024), dtype=jnp.float32, activation="silu"),
    case("projection", "cpu", (256, 256, 512), backward=True),
    case("even", "check", (256, 512, 256), bias=True, activation="gelu"),
    case("odd", "check", (129, 257, 131), bias=True, activation="silu"),
    case("few rows", "check", (3, 200, 72)),
    case("odd, float16", "check", (65, 130, 70), dtype=jnp.float16),
    case("odd, float32", "check", (65, 130, 70), dtype=jnp.float32),
]
