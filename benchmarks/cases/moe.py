"""Whole layers of experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import moe

from .case import Case, normal
from .moe_dispatch import added, routed


def plain(
    x: Any, logits: Any, w_gate: Any, w_up: Any, w_down: Any, *, k: int, product: Any = jax.lax.ragged_dot
) -> jax.Array:
    """Rows in order of experts by sorting, JAX's ragged products, and each row added to its token."""
    token, weights, sizes = routed(logits, k)
    rows = x[token]
    inner = jax.nn.silu(product(rows, w_gate, sizes).astype(jnp.float32))
    rows = product((inner * product(rows, w_up, sizes)).astype(x.dtype), w_down, sizes)
    return added(rows, token, weights, x)


def case(shape: tuple[int, int, int, int, int], *, dtype: Any = jnp.float32, backward: bool = False) -> Case:
    """A case from (tokens, width, inner width, experts, experts of a token)."""
    tokens, width, inner, count, k = shape

    def make(rng: Any) -> Any:
        x, logits = normal(rng, (tokens, width), dtype), normal(rng, (tokens, count), jnp.float32)
        gate, up = (normal(rng, (count, width, inner), dtype, width**-0.5) for _ in range(2))
        return (x, logits, gate, up, normal(rng, (count, inner, width), dtype, inner**-0.5)), {"k": k}

    times = 3 if backward else 1
    flops = 6 * tokens * k * width * inner * times
    traffic = jnp.dtype(dtype).itemsize * 3 * count * width * inner * times
    title = f"{tokens}x{width} by {count} of {inner}, {k} each{', gradient' if backward else ''}"
    return Case("moe", title, "cpu", make, moe, plain, flops, traffic, backward)


CASES = [case((256, 128, 128, 16, 2)), case((256, 128, 128, 16, 2), backward=True)]
