"""Ragged products as layers of experts call them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.library import RaggedDot

from .case import Case, normal


def plain(lhs: Any, rhs: Any, group_sizes: Any) -> jax.Array:
    """JAX's own ragged product."""
    return jax.lax.ragged_dot(lhs, rhs, group_sizes)


def case(
    name: str,
    platform: str,
    shape: tuple[int, int, int, int],
    *,
    dtype: Any = jnp.bfloat16,
    spread: float = 4.0,
    backward: bool = False,
) -> Case:
    """A case from (rows, inner, columns, groups); the less spread, the more the groups differ in size."""
    rows, depth, width, groups = shape

    def make(rng: Any) -> Any:
        sizes = rng.multinomial(rows, rng.dirichlet(np.full(groups, spread)))
        arrays = normal(rng, (rows, depth), dtype), normal(rng, (groups, depth, width), dtype, depth**-0.5)
        return (*arrays, jnp.asarray(sizes, jnp.int32)), {}

    times = 3 if backward else 1
    size = jnp.dtype(dtype).itemsize
    flops = 2 * rows * depth * width * times
    traffic = size * (rows * depth + groups * depth * width + rows * width) * times
    return Case("ragged_dot", name, platform, make, RaggedDot, plain, flops, traffic, backward, {"xla": plain})


CASES = [
    case("8192x4096 by 8 of 4096", "gpu", (8192, 4096, 4096, 8)),
    case("8192x4096 by 8 of 4096, gradient", "gpu", (8192, 4096, 4096, 8), backward=True),
    case("8192x4096 by 8 of 14336, skewed", "gpu", (8192, 4096, 14336, 8), spread=0.5),
    case("16384x2048 by 128 of 768", "gpu", (16384, 2048, 768, 128)),
    case("8192x2048 by 64 of 1408, gradient", "gpu", (8192, 2048, 1408, 64), backward=True),
    case("128x4096 by 8 of 14336", "gpu", (128, 4096, 14336, 8)),
    case("512x256 by 8 of 512", "cpu", (512, 256, 512, 8), dtype=jnp.float32),
    case("512x256 by 8 of 512, gradient", "cpu", (512, 256, 512, 8), dtype=jnp.float32, backward=True),
    case("1024x128 by 16 of 256, skewed", "cpu", (1024, 128, 256, 16), dtype=jnp.float32, spread=0.5),
    case("1024x128 by 16 of 256, bfloat16", "cpu", (1024, 128, 256, 16)),
    case("64x256 by 8 of 512", "cpu", (64, 256, 512, 8), dtype=jnp.float32),
]
