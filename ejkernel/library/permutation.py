"""Rows put in order of their groups: where each row goes, and which row came from where."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .counting import FEW_PAIRS, running_sums
from .extent import are_known

# Rows that are compared with each other; blocks of them are added up.
_BLOCK = 256


def by_sorting(groups: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The place of each element in order of groups, equal ones as they were, and the size of each group."""
    order = jnp.argsort(groups, stable=True)
    return inverse(order, groups.shape[0]), _sizes(groups, count)


def by_counting(groups: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Places and sizes without sorting: elements of the same group are counted, in its block and in those before."""
    total = groups.shape[0]
    if not are_known(total):
        # What fills the last block cannot be said, nor how many there are.
        return by_sorting(groups, count)
    if not total:
        return jnp.zeros(0, jnp.int32), jnp.zeros(count, jnp.int32)
    # What fills the last block is of a group of its own, behind the others.
    blocks = jnp.pad(groups, (0, -total % _BLOCK), constant_values=count).reshape(-1, _BLOCK)
    # Numbers of all pairs: XLA may make a mask that all blocks share in a launch of its own.
    one, other = (jax.lax.broadcasted_iota(jnp.int32, (*blocks.shape, _BLOCK), axis) for axis in (1, 2))
    within = jnp.sum((blocks[:, :, None] == blocks[:, None, :]) & (other < one), axis=2, dtype=jnp.int32)
    names = jnp.arange(count + 1, dtype=groups.dtype)[None, None]
    counts = jnp.sum(blocks[:, :, None] == names, axis=1, dtype=jnp.int32)
    start = _starts(blocks, names, counts)
    places = jnp.take_along_axis(start, blocks, axis=1) + within
    # From what the last block adds to those before it, without a sum, which would be a launch.
    sizes = start[-1] - start[0] + counts[-1]
    return places.reshape(-1)[:total], sizes[:count]


def _starts(blocks: jax.Array, names: jax.Array, counts: jax.Array) -> jax.Array:
    """The place of each block's first element of each group, from how many elements of it each block has."""

    # In 32 bits as all others, also where JAX's own numbers have 64.
    def in_steps(blocks: jax.Array, counts: jax.Array) -> jax.Array:
        running = running_sums(counts)
        return running - counts + (running_sums(running[-1]) - running[-1])[None]

    # Behind all elements of the groups before, and its own group's of the blocks before: one sum of both.
    def at_once(blocks: jax.Array, counts: jax.Array) -> jax.Array:
        smaller = jnp.sum(blocks[:, :, None] < names, axis=1, dtype=jnp.int32)
        place = jnp.arange(counts.shape[0])
        earlier = (place[None] < place[:, None])[:, :, None]
        return jnp.sum(jnp.where(earlier, counts[None], 0) + smaller[None], axis=1, dtype=jnp.int32)

    if counts.shape[0] * counts.size > FEW_PAIRS:
        return in_steps(blocks, counts)
    made: jax.Array = jax.lax.platform_dependent(blocks, counts, cpu=in_steps, default=at_once)
    return made


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
