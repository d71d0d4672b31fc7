"""Recurrences over chunks of a sequence: how arrays are cut, and how the states between chunks are found."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .rows import across
from .varying import varying_like

# Far below what leaves anything, and far above what sums of a chunk would overflow with.
_FORGETS = -1e30


def masked_to(lengths: jax.Array | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, (batch, length, ...), with zeros beyond each sequence's length, whatever was there."""
    if lengths is None:
        return arrays
    real = jnp.arange(arrays[0].shape[1])[None] < lengths[:, None]
    return tuple(jnp.where(real.reshape(*real.shape, *[1] * (a.ndim - 2)), a, 0) for a in arrays)


def in_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """(batch, length, heads, ...) as (batch, heads, chunks, chunk, ...), with zeros after the last element."""
    missing = -x.shape[1] % chunk
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:])


def out_of_chunks(x: jax.Array, length: int) -> jax.Array:
    """(batch, heads, chunks, chunk, width) as (batch, length, heads, width)."""
    x = x.reshape(*x.shape[:2], -1, x.shape[-1])
    return jnp.moveaxis(x, 1, 2)[:, :length]


def decays(gates: jax.Array) -> jax.Array:
    """`exp` of the sum of gates after j up to i, for j up to i, else 0: what is left at i of what came at j.

    The sum itself and not a difference of two: where decay is strong, these are large and nearly equal.
    """
    size = gates.shape[-1]
    place = jnp.arange(size)
    up_to = (place[:, None] >= place[None]).astype(gates.dtype)
    after = jnp.where(across(place[:, None] > place[None], gates[..., None]), gates[..., :, None], 0)
    sums = jnp.einsum("il,...lj->...ij", up_to, after, precision=jax.lax.Precision.HIGHEST)
    # Later ones are left out before: they would else be one, and their gradient something.
    return jnp.exp(jnp.where(across(up_to > 0, sums), sums, -jnp.inf))


def nearly_decays(gates: jax.Array) -> jax.Array:
    """Decays as differences of sums, without a product: off by 7e-4 at most, for numbers of 16 bits.

    A gate of -90 leaves nothing, so sums of 128 are no larger than 11,520, and rounded by less than that.
    """
    sums = jnp.cumsum(jnp.maximum(gates, -90.0), axis=-1)
    place = jnp.arange(gates.shape[-1])
    after = sums[..., :, None] - sums[..., None, :]
    return jnp.exp(jnp.where(across(place[:, None] >= place[None], after), after, -jnp.inf))


def left_at_the_end(gates: jax.Array, axis: int) -> jax.Array:
    """`exp` of the sum of all later gates: what is left at the end of a chunk.

    Added up without the gate itself, not taken off again: after a gate of -1e9 a difference has nothing of the others.
    """
    later = jax.lax.slice_in_dim(gates, 1, None, axis=axis)
    none = jnp.zeros_like(jax.lax.slice_in_dim(gates, 0, 1, axis=axis))
    return jnp.exp(jax.lax.cumsum(jnp.concatenate([later, none], axis=axis), axis=axis, reverse=True))


def finite_gates(gates: jax.Array) -> jax.Array:
    """Gates in float32, with a large number for minus infinity: zeros of a product times that would be no number."""
    return jnp.maximum(gates.astype(jnp.float32), _FORGETS)


def states_of(moves: jax.Array, added: jax.Array, start: jax.Array, *, levels: bool, how: Any) -> tuple[Any, Any]:
    """States before each chunk, and the one after the last, of `state = moves @ state + added`.

    `moves` (batch, heads, chunks, k, k) or, where each row is only scaled, (batch, heads, chunks, k). By `levels` pairs
    of chunks are joined, and pairs of pairs: few large products instead of many small ones after each other.
    """
    full = moves.ndim == added.ndim

    def after(move: jax.Array, state: jax.Array) -> jax.Array:
        return jnp.matmul(move, state, precision=how) if full else move[..., None] * state

    if levels:

        def join(first: Any, second: Any) -> Any:
            moved = jnp.matmul(second[0], first[0], precision=how) if full else second[0] * first[0]
            return moved, after(second[0], first[1]) + second[1]

        all_moves, all_added = jax.lax.associative_scan(join, (moves, added), axis=2)
        ends = after(all_moves, start[:, :, None]) + all_added
        return jnp.concatenate([start[:, :, None], ends[:, :, :-1]], axis=2), ends[:, :, -1]

    def step(state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        return after(now[0], state) + now[1], state

    start = varying_like(start, moves, added)
    last, before = jax.lax.scan(step, start, tuple(jnp.moveaxis(a, 2, 0) for a in (moves, added)))
    return jnp.moveaxis(before, 0, 2), last


@jax.custom_jvp
def unit_inverse(lower: jax.Array) -> jax.Array:
    """The inverse of one plus a strictly lower triangular matrix, by halves: exact as a substitution is."""
    size = lower.shape[-1]
    if size == 1:
        return jnp.ones_like(lower)
    half = size // 2
    if size <= 16 or size % 2:
        return _small_inverse(lower)
    corners = unit_inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    first, second = corners[0], corners[1]
    below = -_product(_product(second, lower[..., half:, :half]), first)
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)


@unit_inverse.defjvp
def _unit_inverse_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    made = unit_inverse(*primals)
    return made, -_product(_product(made, tangents[0]), made)


def _small_inverse(lower: jax.Array) -> jax.Array:
    """Inverses of blocks on the diagonal, joined to those of twice the size until there is one."""
    size = lower.shape[-1]
    row = jnp.arange(size)
    made = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    step = 1
    while step < size:
        block = row // step
        # The lower half's columns of the upper half, of each pair of blocks.
        between = (block[:, None] % 2 == 1) & (block[:, None] - 1 == block[None, :])
        part = jnp.where(across(between, lower), lower, 0)
        made = made - (part if step == 1 else _product(_product(made, part), made))
        step *= 2
    return made


def _product(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.matmul(one, other, precision=jax.lax.Precision.HIGHEST)
