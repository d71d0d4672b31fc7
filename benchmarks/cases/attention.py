"""Attention as real models call it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import Attention
from ejkernel.library.jax_pallas import gpu_kernels

from .case import Case, normal


def ready(q: Any, k: Any, v: Any, *, causal: bool, window: Any, scale: float, implementation: str) -> jax.Array:
    """`jax.nn.dot_product_attention` with a kernel's arguments."""
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, local_window_size=window, scale=scale, implementation=implementation
    )


def pallas(q: Any, k: Any, v: Any, *, causal: bool, window: Any, scale: float) -> jax.Array:
    """JAX's Pallas kernel for GPUs, with the block sizes that it brings."""
    return gpu_kernels("attention").mha(q, k, v, None, scale, causal)


def case(
    name: str,
    platform: str,
    shape: tuple[int, int, int, int, int, int],
    *,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    dtype: Any = jnp.bfloat16,
    backward: bool = False,
) -> Case:
    """A case from (batch, queries, keys, heads, key heads, head size)."""
    batch, queries, keys, heads, key_heads, depth = shape

    def make(rng: Any) -> Any:
        sizes = (batch, queries, heads, depth), (batch, keys, key_heads, depth), (batch, keys, key_heads, depth)
        arrays = tuple(normal(rng, size, dtype) for size in sizes)
        return arrays, {"causal": causal, "window": window, "scale": depth**-0.5}

    seen = sum(
        min(keys, row + 1 if causal else keys) - max(0, row - window[0] if window else 0) for row in range(queries)
    )
    # Two products forward, five more backward.
    flops = 4 * batch * heads * depth * seen * (3.5 if backward else 1)
    size = jnp.dtype(dtype).itemsize
    traffic = batch * depth * size * (2 * queries * heads + 2 * keys * key_heads) * (3 if backward else 1)
    found = {"xla": functools.partial(ready, implementation="xla")}
    if platform == "gpu" and jnp.dtype(dtype).itemsize == 2:
        found["cudnn"] = functools.partial(ready, implementation="cudnn")
    if platform == "gpu" and window is None and queries == keys and heads == key_heads and not queries % 128:
        found["pallas"] = pallas
    plain = functools.partial(ready, implementation="xla")
    return Case("attention", name, platform, make, Attention, plain, flops, traffic, backward, found)


CASES = [
    case("4x2048, 16 heads of 128", "gpu", (4, 2048, 2048, 16, 16, 128)),
    case("4x2048, 16 heads of 128, gradient", "gpu", (4, 2048, 2048, 16, 16, 128), backward=True),
    case("1x8192, 16 heads of 128", "gpu", (1, 8192, 8192, 16, 16, 128)),
    case("2x4096, 32 heads on 8 of 128", "gpu", (2, 4096, 4096, 32, 8, 128)),
    case("8x1024, 12 heads of 64, gradient", "gpu", (8, 1024, 1024, 12, 12, 64), backward=True),
    case("1x8192, 32 heads on 8 of 128, window 1024", "gpu", (1, 8192, 8192, 32, 8, 128), window=(1024, 0)),
    case("64x197, 12 heads of 64, all", "gpu", (64, 197, 197, 12, 12, 64), causal=False),
    case("32x1 of 4096, 32 heads on 8 of 128, all", "gpu", (32, 1, 4096, 32, 8, 128), causal=False),
    case("1x2048, 16 heads of 64, float32", "gpu", (1, 2048, 2048, 16, 16, 64), dtype=jnp.float32),
    case("1x1024, 8 heads on 2 of 64", "cpu", (1, 1024, 1024, 8, 2, 64), dtype=jnp.float32),
    case("4x256, 8 heads of 64, gradient", "cpu", (4, 256, 256, 8, 8, 64), dtype=jnp.float32, backward=True),
    case("1x1024, 4 heads of 64, window 128", "cpu", (1, 1024, 1024, 4, 4, 64), dtype=jnp.float32, window=(128, 0)),
    case("1x512, 8 heads of 64, bfloat16", "cpu", (1, 512, 512, 8, 8, 64)),
    case("8x100, 4 heads of 32, all", "cpu", (8, 100, 100, 4, 4, 32), causal=False, dtype=jnp.float32),
    case("4x1 of 1024, 8 heads of 64, all", "cpu", (4, 1, 1024, 8, 8, 64), causal=False, dtype=jnp.float32),
]
