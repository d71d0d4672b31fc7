"""Products of float8 with scales, as layers that were trained so have them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import ScaledMatmul, quantize

from .case import Case, normal

Blocks = tuple[tuple[int, int] | None, tuple[int, int] | None]


def plain(a: Any, b: Any, a_scales: Any, b_scales: Any) -> jax.Array:
    """Both factors scaled and in bfloat16, then a product."""
    wide = []
    for x, s in ((a, a_scales), (b, b_scales)):
        for axis in (0, 1):
            s = jnp.repeat(s, x.shape[axis] // s.shape[axis], axis=axis)
        wide.append((x.astype(jnp.float32) * s).astype(jnp.bfloat16))
    return wide[0] @ wide[1]


def scaled(a: Any, b: Any, blocks: Blocks) -> tuple[jax.Array, ...]:
    """Both in float8, and their scales in two dimensions."""
    near, other = (quantize(x, jnp.float8_e4m3fn, block=size) for x, size in zip((a, b), blocks, strict=True))
    return near[0], other[0], *(s.reshape((1,) * (2 - s.ndim) + s.shape) for s in (near[1], other[1]))


def case(name: str, shape: tuple[int, int, int], blocks: Blocks) -> Case:
    """A case from (rows, inner, columns)."""
    m, k, n = shape

    def make(rng: Any) -> Any:
        return scaled(normal(rng, (m, k), jnp.float32), normal(rng, (k, n), jnp.float32, k**-0.5), blocks), {}

    title = f"{m}x{k} by {n}, scales by {name}"
    return Case("scaled_matmul", title, "cpu", make, ScaledMatmul, plain, 2 * m * k * n, m * k + k * n + 2 * m * n)


CASES = [
    case("row", (256, 1024, 1024), ((1, 1024), (1024, 1))),
    case("block", (256, 1024, 1024), ((1, 128), (128, 128))),
]
