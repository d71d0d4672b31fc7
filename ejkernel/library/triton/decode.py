"""Attention of a few queries to pages of keys: a program for each sequence, key head and part of the pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import launch_all, power_of_two

# Lower than any score, and finite: it can be taken from itself.
_LOWEST = -1e30


def parts_of_pages(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    *,
    queries: int,
    window: int | None,
    soft_cap: float | None,
    scale: float,
    parts: int,
    block: int,
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Largest scores, sums and weighted values of each part: (batch, heads, parts, rows, ...).

    `q` is (batch, heads, rows, head_dim), the rows of a key head being its queries, those of one token side by side.
    """
    batch, heads, count, size = q.shape
    page = k.shape[1]
    rows, group = max(16, power_of_two(count)), count // queries
    # Pages of a step, steps of a part.
    some = max(1, block // page)
    each = pl.cdiv(pl.cdiv(table.shape[1], parts), some) * some
    table = jnp.pad(jnp.clip(table, 0, k.shape[0] - 1), ((0, 0), (0, each * parts - table.shape[1])))
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - count), (0, 0)))

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, table_ref: Any, length_ref: Any, *out_refs: Any) -> None:
        part = pl.program_id(2)
        length = length_ref[0]
        shape = (rows, some * page)
        own = length - queries + jax.lax.broadcasted_iota(jnp.int32, shape, 0) // group
        near = q_ref[...]

        def step(number: Any, state: Any) -> Any:
            mixed, most, total = state
            pages = table_ref[pl.ds(number * some, some)]
            keys = k_ref[pages].reshape(some * page, size)
            values = v_ref[pages].reshape(some * page, size)
            start = (part * each + number * some) * page
            place = start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
            scores = jnp.dot(near, keys.T, preferred_element_type=jnp.float32) * scale
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            seen = place <= own
            if window is not None:
                seen = seen & (place >= own - window)
            scores = jnp.where(seen, scores, _LOWEST)
            larger = jnp.maximum(most, jnp.max(scores, axis=1))
            weights = jnp.where(seen, jnp.exp(scores - larger[:, None]), 0.0)
            factor = jnp.exp(most - larger)
            # Places beyond the length may hold anything, which zero times it would show.
            real = start + jax.lax.broadcasted_iota(jnp.int32, (some * page, size), 0) < length
            values = jnp.where(real, values, jnp.zeros_like(values))
            added = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
            return mixed * factor[:, None] + added, larger, total * factor + jnp.sum(weights, axis=1)

        # As far as the sequence goes, and no further back than the window.
        stop = jnp.clip((length + page - 1) // page - part * each, 0, each)
        first: Any = 0
        if window is not None:
            first = jnp.clip((length - queries - window) // page - part * each, 0, each) // some
        empty = jnp.zeros((rows, size), jnp.float32), jnp.full((rows,), _LOWEST), jnp.zeros((rows,), jnp.float32)
        mixed, most, total = jax.lax.fori_loop(first, (stop + some - 1) // some, step, empty)
        for ref, value in zip(out_refs, (mixed, most, total), strict=True):
            ref[...] = value

    whole = pl.BlockSpec((k.shape[0], page, None, size), lambda b, h, p: (0, 0, h, 0))
    shapes = [(batch, heads, parts, rows, size), (batch, heads, parts, rows), (batch, heads, parts, rows)]
    mixed, most, total = launch_all(
        kernel,
        [q, k, v, table, lengths],
        out=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(batch, heads, parts),
        in_specs=[
            pl.BlockSpec((None, None, rows, size), lambda b, h, p: (b, h, 0, 0)),
            whole,
            whole,
            pl.BlockSpec((None, each), lambda b, h, p: (b, p)),
            pl.BlockSpec((1,), lambda b, h, p: (b,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, rows, size), lambda b, h, p: (b, h, p, 0, 0)),
            *(pl.BlockSpec((None, None, None, rows), lambda b, h, p: (b, h, p, 0)) for _ in range(2)),
        ],
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
        name="library_decode_attention",
    )
    most = jnp.where(most <= _LOWEST, -jnp.inf, most)
    return most[..., :count], total[..., :count], mixed[..., :count, :]
