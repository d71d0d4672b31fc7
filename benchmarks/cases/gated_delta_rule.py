"""Layers of linear attention with a gated delta rule."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.library import GatedDeltaRule
from ejkernel.library.gated_delta_ways import stepwise as plain

from .case import Case, normal


def case(name: str, shape: tuple[int, int, int, int], *, backward: bool = False) -> Case:
    """A case in float32, against a scan over the tokens."""
    batch, length, heads, size = shape
    # Three products with the state for each token.
    flops = 6 * batch * length * heads * size * size * (3 if backward else 1)
    traffic = 16 * batch * length * heads * size * (3 if backward else 1)

    def make(rng: Any) -> Any:
        q, k, v = (normal(rng, shape, jnp.float32) for _ in range(3))
        # Keys of length one and gates that keep most, as models have them.
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        g, beta = (jnp.asarray(rng.uniform(*ends, shape[:3]), jnp.float32) for ends in ((-0.25, 0), (0, 1)))
        return (q, k, v, g, beta, jnp.zeros((batch, heads, size, size))), {}

    return Case("gated_delta_rule", name, "cpu", make, GatedDeltaRule, plain, flops, traffic, backward)


CASES = [
    case("1x512, 4 heads of 64", (1, 512, 4, 64)),
    case("1x256, 4 heads of 64, gradient", (1, 256, 4, 64), backward=True),
]
