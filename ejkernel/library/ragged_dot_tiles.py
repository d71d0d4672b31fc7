"""Grouped products tile by tile: which rows belong to which group, and XLA loops over that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .counting import ended_before, running_sums
from .extent import are_known
from .varying import varying_like


@dataclass(frozen=True)
class Visits:
    """Tiles, each of rows of one group alone, from `start` to before `stop`; the first `count` of them are used."""

    group: jax.Array
    start: jax.Array
    stop: jax.Array
    count: jax.Array


def most_visits(rows: int, groups: int, tile: int) -> int:
    """The longest such list, whatever the sizes: every group may end in a tile of its own."""
    return -(-rows // tile) + groups


def starts_of(sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """The first row of each group, and the row after its last; sizes that do not fit are cut at the last row."""
    stops = jnp.minimum(stops_of(sizes, rows), rows)
    return jnp.concatenate([jnp.zeros_like(stops[:1]), stops[:-1]]), stops


def stops_of(sizes: jax.Array, rows: int) -> jax.Array:
    """The row after the last of each group, or one after the last row of all where the sizes do not fit."""
    stops = running_sums(jnp.clip(sizes, 0, rows))
    if not are_known(rows) or sizes.shape[0] * rows >= 1 << 31:
        # Only then can a sum be too large for 32 bits, and that is after it has passed the last row.
        stops = jax.lax.cummax(jnp.minimum(stops, rows))
    return stops


def visits_of(sizes: jax.Array, rows: int, tile: int) -> Visits:
    """Tiles of every group, in order of rows, each group's from its own first row on."""
    starts, stops = starts_of(sizes, rows)
    tiles = -(-(stops - starts) // tile)
    ends = running_sums(tiles)
    number = jnp.arange(most_visits(rows, sizes.shape[0], tile), dtype=jnp.int32)
    group = jnp.minimum(ended_before(ends, number), sizes.shape[0] - 1)
    start = starts[group] + (number - (ends - tiles)[group]) * tile
    # A number beyond the count is an empty tile.
    stop = jnp.where(number < ends[-1], jnp.minimum(start + tile, stops[group]), start)
    return Visits(group, start.astype(jnp.int32), stop.astype(jnp.int32), ends[-1].astype(jnp.int32))


def tiled(lhs: Any, rhs: Any, sizes: Any, *, tile: int, transposed: bool, dtype: Any) -> jax.Array:
    """Each row times its group's matrix, or that matrix transposed; rows of no group give zeros."""
    rows = lhs.shape[0]
    width = rhs.shape[1] if transposed else rhs.shape[2]
    visits = visits_of(sizes, rows, tile)
    # Room for the last tile, which may reach beyond the last row.
    padded = jnp.pad(lhs, ((0, tile), (0, 0)))
    out = varying_like(jnp.zeros((rows + tile, width), dtype), lhs, rhs, sizes)

    def step(number: jax.Array, out: jax.Array) -> Any:
        start = visits.start[number]
        mine = jax.lax.dynamic_slice_in_dim(padded, start, tile)
        matrix = jax.lax.dynamic_index_in_dim(rhs, visits.group[number], keepdims=False)
        part = _product(mine, matrix, transposed).astype(dtype)
        # The next tiles write over what is beyond this group's rows, so only the last one's surplus must be zero.
        part = jnp.where((start + jnp.arange(tile) < visits.stop[number])[:, None], part, 0)
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, 0)

    made: jax.Array = jax.lax.fori_loop(0, visits.count, step, out)
    return made[:rows]


def tiled_outer(lhs: Any, out: Any, sizes: Any, *, tile: int, dtype: Any) -> jax.Array:
    """The product of each group's rows of `lhs`, transposed, and of `out`: the gradient of the group's matrix."""
    rows = lhs.shape[0]
    visits = visits_of(sizes, rows, tile)
    padded = [jnp.pad(x, ((0, tile), (0, 0))) for x in (lhs, out)]
    total = varying_like(jnp.zeros((sizes.shape[0], lhs.shape[1], out.shape[1]), jnp.float32), lhs, out, sizes)

    def step(number: jax.Array, total: jax.Array) -> Any:
        start, group = visits.start[number], visits.group[number]
        one, other = (jax.lax.dynamic_slice_in_dim(x, start, tile) for x in padded)
        one = jnp.where((start + jnp.arange(tile) < visits.stop[number])[:, None], one, 0)
        known = jax.lax.dynamic_index_in_dim(total, group, keepdims=False)
        part = jnp.einsum("mk,mn->kn", one, other, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_index_in_dim(total, known + part, group, 0)

    made: jax.Array = jax.lax.fori_loop(0, visits.count, step, total)
    return made.astype(dtype)


def masked(lhs: Any, rhs: Any, sizes: Any, *, transposed: bool, dtype: Any) -> jax.Array:
    """Group by group over all rows: good where the groups are few or the rows are."""
    row = jnp.arange(lhs.shape[0])

    def step(total: jax.Array, group: Any) -> tuple[jax.Array, None]:
        matrix, start, stop = group
        mine = jnp.where(((row >= start) & (row < stop))[:, None], lhs, 0)
        return total + _product(mine, matrix, transposed), None

    width = rhs.shape[1] if transposed else rhs.shape[2]
    zeros = varying_like(jnp.zeros((lhs.shape[0], width), jnp.float32), lhs, rhs, sizes)
    return jax.lax.scan(step, zeros, (rhs, *starts_of(sizes, lhs.shape[0])))[0].astype(dtype)


def masked_outer(lhs: Any, out: Any, sizes: Any, *, dtype: Any) -> jax.Array:
    """The gradient of the matrices, with every row masked for every group."""
    row = jnp.arange(lhs.shape[0])

    def of_group(group: Any) -> Any:
        mine = jnp.where(((row >= group[0]) & (row < group[1]))[:, None], lhs, 0)
        return jnp.einsum("mk,mn->kn", mine, out, preferred_element_type=jnp.float32).astype(dtype)

    made: jax.Array = jax.lax.map(of_group, starts_of(sizes, lhs.shape[0]))
    return made


def in_parts(way: Callable[..., jax.Array], place: int) -> Callable[..., jax.Array]:
    """A way with a factor, at this place, that may be the sum of two arrays: the fourth argument is the second."""

    def summed(one: Any, other: Any, sizes: Any, rest: Any = None, *, dtype: Any, **how: Any) -> jax.Array:
        if rest is None:
            return way(one, other, sizes, dtype=dtype, **how)
        parts = ((one, other), (rest, other) if place == 0 else (one, rest))
        near, far = (way(*part, sizes, dtype=jnp.float32, **how) for part in parts)
        return (near + far).astype(dtype)

    return summed


def _product(rows: Any, matrix: Any, transposed: bool) -> jax.Array:
    form = "mk,nk->mn" if transposed else "mk,kn->mn"
    return jnp.einsum(form, rows, matrix, preferred_element_type=jnp.float32)
