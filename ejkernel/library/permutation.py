"""Rows put in order of their groups: where each row goes, and which row came from where."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .counting import running_sums

# Rows that are compared with each other; blocks of them are added up.
_BLOCK = 256


def by_sorting(groups: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The place of each element in order of groups, equal ones as they were, and the size of each group."""
    order = jnp.argsort(groups, stable=True)
    return inverse(order, groups.shape[0]), _sizes(groups, count)


def by_counting(groups: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Places and sizes without sorting: elements of the same group are counted, in its block and in those before."""
    total = groups.shape[0]
    # What fills the last block is of a group of its own, behind the others.
    blocks = jnp.pad(groups, (0, -total % _BLOCK), constant_values=count).reshape(-1, _BLOCK)
    earlier = jnp.tril(jnp.ones((_BLOCK, _BLOCK), bool), -1)
    within = jnp.sum((blocks[:, :, None] == blocks[:, None, :]) & earlier[None], axis=2, dtype=jnp.int32)
    names = jnp.arange(count + 1, dtype=groups.dtype)
    counts = jnp.sum(blocks[:, :, None] == names[None, None], axis=1, dtype=jnp.int32)
    # In 32 bits as all others, also where JAX's own numbers have 64.
    running = running_sums(counts)
    before, sizes = running - counts, running[-1] if total else jnp.zeros(count + 1, jnp.int32)
    start = before + (running_sums(sizes) - sizes)[None]
    places = jnp.take_along_axis(start, blocks, axis=1) + within
    return places.reshape(-1)[:total], sizes[:count]


def inverse(places: jax.Array, rows: int) -> jax.Array:
    """The number of the element at each place; where there is none, the number of elements."""
    total = places.shape[0]
    numbers = jnp.arange(total, dtype=jnp.int32)
    # Integers, each to a place of its own: nothing is added up, and nothing waits.
    return jnp.full((rows,), total, jnp.int32).at[places].set(numbers, unique_indices=True, mode="drop")


def _sizes(groups: jax.Array, count: int) -> jax.Array:
    return jnp.sum(groups[:, None] == jnp.arange(count, dtype=groups.dtype)[None], axis=0, dtype=jnp.int32)


def gathered_sum(rows: jax.Array, places: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """The sum of each token's rows, times its weights, in float32: one read of each row and no scatter."""
    total = jnp.zeros((places.shape[0], rows.shape[1]), jnp.float32)
    for at in range(places.shape[1]):
        part = jnp.take(rows, places[:, at], axis=0, mode="clip").astype(jnp.float32)
        total = total + (part if weights is None else part * weights[:, at, None].astype(jnp.float32))
    return total
