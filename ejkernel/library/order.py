"""Total order of numbers by integers: the order that `lax.top_k` sorts by, and its search bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .arguments import ArgumentError

# As many comparisons in all take some microseconds on a GPU.
_MANY_PAIRS = 1 << 26


def ordered(x: jax.Array) -> jax.Array:
    """Signed integers that are ordered as `lax.top_k` orders the numbers: NaN by its sign, and -0 below 0."""
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        return x
    whole = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, whole)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return bits ^ jnp.iinfo(whole).min
    # All but the sign of negative numbers, which are else ordered the other way.
    return bits ^ ((bits >> (8 * x.dtype.itemsize - 1)) & jnp.iinfo(whole).max)


def numbers_of(keys: jax.Array, dtype: Any) -> jax.Array:
    """The numbers of a dtype that have these keys."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return keys
    info = jnp.iinfo(keys.dtype)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return jax.lax.bitcast_convert_type(keys ^ info.min, dtype)
    return jax.lax.bitcast_convert_type(keys ^ ((keys >> (info.bits - 1)) & info.max), dtype)


def bits_refused(dtype: Any, bits: int) -> str:
    """The reason why keys of numbers of a dtype are not found by so many bits a pass, or nothing."""
    width = 8 * jnp.dtype(dtype).itemsize
    if bits > 0 and width % bits == 0:
        return ""
    return f"passes of {bits} bits do not make up the {width} bits of {jnp.dtype(dtype).name}"


def largest_with(enough: Callable[[jax.Array], jax.Array], like: jax.Array, bits: int) -> jax.Array:
    """The largest key of each row for which `enough(keys)` holds, where it holds up to some key and not beyond.

    `enough` takes keys of shape (rows, some) and answers for each. Each pass over the row finds so many bits.
    """
    refused = bits_refused(like.dtype, bits)
    if refused:
        raise ArgumentError(refused)
    info = jnp.iinfo(like.dtype)
    digits = jnp.arange(1, 1 << bits, dtype=like.dtype)

    def next_bits(number: Any, low: jax.Array) -> jax.Array:
        # From the least key on the digits only add, so no sum leaves the dtype.
        place = jnp.asarray(info.bits - bits * (number + 1), like.dtype)
        step = jax.lax.shift_left(jnp.ones((), like.dtype), place)
        tried = low[:, None] + (digits * step)[None]
        return low + jnp.sum(enough(tried), axis=-1, dtype=like.dtype) * step

    start = jnp.full_like(like[:, 0], info.min)
    found: jax.Array = jax.lax.fori_loop(0, info.bits // bits, next_bits, start)
    return found


def ranks(keys: jax.Array, places: jax.Array) -> jax.Array:
    """The number of elements that precede each: larger keys, and of equal ones those at lower places."""
    mine, other = keys[..., :, None], keys[..., None, :]
    before = (other > mine) | ((other == mine) & (places[..., None, :] < places[..., :, None]))
    return jnp.sum(before, axis=-1, dtype=jnp.int32)


def first_by_counting(keys: jax.Array, places: jax.Array, k: int) -> jax.Array:
    """Positions of the k that come first, in order: each one's rank is counted, and nothing is sorted."""
    rank = ranks(keys, places)
    hit = rank[..., None, :] == jnp.arange(k, dtype=jnp.int32).reshape(*[1] * (rank.ndim - 1), k, 1)
    position = jax.lax.broadcasted_iota(jnp.int32, hit.shape, hit.ndim - 1)
    return jnp.max(jnp.where(hit, position, 0), axis=-1)


def countable(rows: int, width: int) -> bool:
    """Are so many ranks counted sooner than sorted?"""
    return width <= 1024 and rows * width * width <= _MANY_PAIRS
