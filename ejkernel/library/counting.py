"""Running sums and searches of counts: of few of them by comparing all with all, which a GPU does in one launch.

JAX's own are loops, or a launch for each level of a tree; on an H200 those took longer than small grouped products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Pairs, each with all that lies behind it, up to which all are compared with all.
_FEW_PAIRS = 1 << 23


def running_sums(counts: jax.Array) -> jax.Array:
    """The sum of all counts up to each one, along the first axis."""
    length = counts.shape[0]
    if length * counts.size > _FEW_PAIRS:
        return jnp.cumsum(counts, axis=0, dtype=counts.dtype)
    place = jnp.arange(length)
    counted = (place <= place[:, None]).reshape(length, length, *(1,) * (counts.ndim - 1))
    return jnp.sum(jnp.where(counted, counts, 0), axis=1, dtype=counts.dtype)


def ended_before(ends: jax.Array, number: jax.Array) -> jax.Array:
    """The count of ends, which grow, at or before each number."""
    if ends.shape[0] * number.shape[0] > _FEW_PAIRS:
        return jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
    return jnp.sum(ends <= number[:, None], axis=1, dtype=jnp.int32)
