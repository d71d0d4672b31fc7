"""Selection of the largest of each row without sorting the row: by parts, and by bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .order import countable, first_by_counting, largest_with, ordered


def by_parts(x: jax.Array, k: int, *, block: int | None, sorts: bool) -> jax.Array:
    """Indices of the k largest of each row: the k blocks with the largest maxima hold all of them.

    Were one of the k in another block, then each of those k blocks had an element before it, which is k too many.
    """
    places = jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape)
    return _first(ordered(x), places, k, block, sorts)


def _first(keys: jax.Array, places: jax.Array, k: int, block: int | None, sorts: bool) -> jax.Array:
    """Positions of the k that come first, by key and then by place, in order."""
    rows, width = keys.shape
    block = block or _block_for(rows, width, k, sorts)
    if block < 2 or k * block >= width:
        return _directly(keys, places, k, sorts)
    missing = -width % block
    if missing:
        # The least there is, behind everything that is equal to it.
        keys = jnp.pad(keys, ((0, 0), (0, missing)), constant_values=jnp.iinfo(keys.dtype).min)
        places = jnp.pad(places, ((0, 0), (0, missing)), constant_values=jnp.iinfo(jnp.int32).max)
    keys, places = (a.reshape(rows, -1, block) for a in (keys, places))
    chosen = _first(jnp.max(keys, axis=2), places[:, :, 0], k, None, sorts)
    # Sorting breaks ties by position, so blocks must be in order; counting looks at the places.
    chosen = jnp.sort(chosen, axis=1) if sorts else chosen
    one, other = (jnp.take_along_axis(a, chosen[:, :, None], axis=1).reshape(rows, -1) for a in (keys, places))
    found = _first(one, other, k, None, sorts)
    return jnp.take_along_axis(chosen, found // block, axis=1) * block + found % block


def _directly(keys: jax.Array, places: jax.Array, k: int, sorts: bool) -> jax.Array:
    if sorts:
        return jax.lax.top_k(keys, k)[1]
    if countable(*keys.shape):
        return first_by_counting(keys, places, k)
    # Too many to count: sorted by key, and before by place.
    order = jnp.argsort(places, axis=1, stable=True)
    return jnp.take_along_axis(order, jax.lax.top_k(jnp.take_along_axis(keys, order, axis=1), k)[1], axis=1)


def _block_for(rows: int, width: int, k: int, sorts: bool) -> int:
    """A block that leaves about as many maxima as candidates; 1 where the row is short enough."""
    if not sorts and countable(rows, width):
        return 1
    if sorts and width <= 32 * k:
        return 1
    return 1 << max(1, int((width / k) ** 0.5).bit_length() - 1)


def by_bits(x: jax.Array, k: int, *, bits: int) -> jax.Array:
    """Indices of the k largest of each row: the k-th key is found digit by digit, and what is above it is collected."""
    rows, width = x.shape
    keys = ordered(x)

    def enough(tried: jax.Array) -> jax.Array:
        return _counted(keys, tried) >= k

    least = largest_with(enough, keys, bits)[:, None]
    above, equal = keys > least, keys == least
    room = k - jnp.sum(above, axis=1, keepdims=True, dtype=jnp.int32)
    taken = above | (equal & (jnp.cumsum(equal, axis=1, dtype=jnp.int32) <= room))
    slot = jnp.where(taken, jnp.cumsum(taken, axis=1, dtype=jnp.int32) - 1, k)
    places = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), x.shape)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    found = jnp.zeros((rows, k), jnp.int32).at[row, slot].set(places, mode="drop", unique_indices=True)
    # They are in order of their places.
    order = jax.lax.top_k(jnp.take_along_axis(keys, found, axis=1), k)[1]
    return jnp.take_along_axis(found, order, axis=1)


def _counted(keys: jax.Array, tried: jax.Array) -> jax.Array:
    """The number of a row's keys that are at least each of those tried: one sum each, over one read."""
    sums = [jnp.sum(keys >= tried[:, at, None], axis=1, dtype=jnp.int32) for at in range(tried.shape[1])]
    return jnp.stack(sums, axis=1)


def spread(tangent: Any, indices: jax.Array) -> jax.Array:
    """The tangents at the indices; of short rows by comparison, so that a gradient needs no scatter."""
    width, k = tangent.shape[-1], indices.shape[-1]
    if width * k > 1 << 14:
        return jnp.take_along_axis(tangent, indices, axis=-1)
    place = jnp.arange(width, dtype=jnp.int32).reshape(*[1] * indices.ndim, width)
    # One sum for each of the k, which are few; transposed it is one sum over k for each of the row.
    hit = indices[..., :, None] == place
    return jnp.sum(jnp.where(hit, tangent[..., None, :], 0), axis=-1)
