"""Attention of a few queries to many keys: partial results of some keys, and how these are joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .narrow import exp_in, product_in
from .varying import varying_like


@dataclass(frozen=True)
class CacheSight:
    """Static options of a call: the keys before its own place that a query sees, cap and scale of scores."""

    window: int | None
    soft_cap: float | None
    scale: float


def grouped(q: jax.Array, heads: int) -> jax.Array:
    """Queries (batch, queries, heads, head_dim) by the key head that they share."""
    return q.reshape(*q.shape[:2], heads, -1, q.shape[-1])


def partial_of(
    q: Any, k: Any, v: Any, start: Any, lengths: Any, sight: CacheSight, *, fused: bool
) -> tuple[Any, Any, Any]:
    """Largest score, sum of exponentials and weighted values of keys (batch, some, heads, head_dim) from `start` on.

    `fused` multiplies and adds up instead of calling a product, so that a gather of keys may be in the same program.
    """
    queries = q.shape[1]
    place = start + jnp.arange(k.shape[1], dtype=jnp.int32)
    own = lengths[:, None] - queries + jnp.arange(queries, dtype=jnp.int32)[None]
    seen = place[None, None, :] <= own[:, :, None]
    if sight.window is not None:
        seen = seen & (place[None, None, :] >= own[:, :, None] - sight.window)
    # Places that no sequence uses may hold anything, which zero times it would show, in gradients too.
    real = (place[None] < lengths[:, None])[:, :, None, None]
    k, v = (jnp.where(real, x, 0) for x in (k, v))
    if fused:
        wide = q.astype(jnp.float32)[:, :, :, :, None, :]
        scores = jnp.sum(wide * jnp.moveaxis(k, 1, 2).astype(jnp.float32)[:, None, :, None], axis=-1)
    else:
        scores = product_in(q.dtype, "bqhgd,bshd->bqhgs", q.astype(jnp.float32), k.astype(jnp.float32))
    scores = scores * sight.scale
    if sight.soft_cap is not None:
        scores = sight.soft_cap * jnp.tanh(scores / sight.soft_cap)
    scores = jnp.where(seen[:, :, None, None, :], scores, -jnp.inf)
    # The result is the same whatever is taken off, so that its gradient is nothing but rounding.
    most = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    # A query that sees no key yet: minus infinity taken from itself is no number.
    # Weights are what the product makes of them, so that they, their sum and both gradients agree.
    weights = exp_in(v.dtype, scores - jnp.where(most == -jnp.inf, 0, most)[..., None])
    if fused:
        near = jnp.moveaxis(v, 1, 2).astype(jnp.float32)[:, None, :, None]
        mixed = jnp.sum(weights[..., None] * near, axis=-2)
    else:
        mixed = product_in(v.dtype, "bqhgs,bshd->bqhgd", weights, v.astype(jnp.float32))
    return most, jnp.sum(weights, axis=-1), mixed


def joined(one: Any, other: Any) -> tuple[Any, Any, Any]:
    """Two partial results as one."""
    most = jnp.maximum(one[0], other[0])
    factors = [jnp.where(part[0] == -jnp.inf, 0, jnp.exp(part[0] - most)) for part in (one, other)]
    sums = one[1] * factors[0] + other[1] * factors[1]
    return most, sums, one[2] * factors[0][..., None] + other[2] * factors[1][..., None]


def finished(part: Any, sinks: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The result; a sink is a score of each head without a value. A query that sees no key gives zeros."""
    most, sums, mixed = part
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, 1, *most.shape[2:])
        larger = jnp.maximum(most, sink)
        factor = jnp.where(most == -jnp.inf, 0, jnp.exp(most - larger))
        # Lifted as the weights are.
        own = jnp.exp(sink - larger) * exp_in(dtype, jnp.zeros(()))
        sums, mixed = sums * factor + own, mixed * factor[..., None]
    out = jnp.where(sums[..., None] > 0, mixed / jnp.where(sums > 0, sums, 1)[..., None], 0)
    return out.reshape(shape).astype(dtype)


def pages_of(pages: jax.Array, table: jax.Array | None) -> jax.Array:
    """Keys or values of the table's pages side by side; for a page out of range the nearest one."""
    if table is None:
        return pages
    taken = jnp.take(pages, table, axis=0, mode="clip")
    return taken.reshape(table.shape[0], -1, *pages.shape[2:])


def whole(q: Any, k: Any, v: Any, table: Any, lengths: Any, sinks: Any, sight: CacheSight, *, fused: bool) -> jax.Array:
    """Attention to all keys at once."""
    part = partial_of(grouped(q, k.shape[2]), pages_of(k, table), pages_of(v, table), 0, lengths, sight, fused=fused)
    return finished(part, sinks, q.shape, q.dtype)


def split(q: Any, k: Any, v: Any, table: Any, lengths: Any, sinks: Any, sight: CacheSight, *, parts: int) -> jax.Array:
    """Keys in so many parts side by side, joined at the end: few sequences keep many cores busy."""
    keys, values = (pages_of(x, table) for x in (k, v))
    missing = -keys.shape[1] % parts
    keys, values = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in (keys, values))
    size = keys.shape[1] // parts
    keys, values = (x.reshape(x.shape[0], parts, size, *x.shape[2:]) for x in (keys, values))
    near = grouped(q, k.shape[2])

    def of_part(k: Any, v: Any, start: Any) -> Any:
        return partial_of(near, k, v, start, lengths, sight, fused=False)

    most, sums, mixed = jax.vmap(of_part, in_axes=(1, 1, 0))(keys, values, jnp.arange(parts, dtype=jnp.int32) * size)
    largest = jnp.max(most, axis=0)
    factor = jnp.where(most == -jnp.inf, 0, jnp.exp(most - jnp.where(largest == -jnp.inf, 0, largest)[None]))
    part = largest, jnp.sum(sums * factor, axis=0), jnp.sum(mixed * factor[..., None], axis=0)
    return finished(part, sinks, q.shape, q.dtype)


def looped(q: Any, k: Any, v: Any, table: Any, lengths: Any, sinks: Any, sight: CacheSight, *, block: int) -> jax.Array:
    """Some keys after the other, as far as the longest sequence goes: what a table has room for costs nothing."""
    near = grouped(q, k.shape[2])
    if table is None:
        step = min(block, k.shape[1])
        length = k.shape[1]
    else:
        pages = min(max(1, block // k.shape[1]), table.shape[1])
        step, length = pages * k.shape[1], table.shape[1] * k.shape[1]
        table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))

    def keys_at(number: Any, x: Any) -> Any:
        if table is None:
            # The last block begins earlier where it would reach beyond the end.
            return jax.lax.dynamic_slice_in_dim(x, jnp.minimum(number * step, length - step), step, 1)
        return pages_of(x, jax.lax.dynamic_slice_in_dim(table, number * pages, pages, 1))

    def body(number: Any, part: Any) -> Any:
        start = jnp.asarray(number * step, jnp.int32)
        keys, values = keys_at(number, k), keys_at(number, v)
        if table is None and length % step:
            # Rolled back by as much as it began earlier, so that places are those of a block that did not.
            back = jnp.maximum(start + step - length, 0)
            keys, values = (jnp.roll(x, -back, axis=1) for x in (keys, values))
        return joined(part, partial_of(near, keys, values, start, lengths, sight, fused=False))

    shape = near.shape[:-1]
    start_of = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(near.shape, jnp.float32)
    empty = tuple(varying_like(x, q, k, v, lengths) for x in start_of)
    count = jnp.minimum(-(-jnp.max(lengths) // step), -(-length // step)).astype(jnp.int32)
    return finished(jax.lax.fori_loop(jnp.int32(0), count, body, empty), sinks, q.shape, q.dtype)
