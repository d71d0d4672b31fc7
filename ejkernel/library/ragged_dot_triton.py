"""Grouped products as Pallas-Triton kernels: one program for each tile of rows of one group and block of columns."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .ragged_dot_tiles import most_visits, starts_of, visits_of
from .triton.launch import load, store
from .triton.served import backend
from .varying import all_alike

# What a Hopper GPU has of shared memory for a program: 227 KiB.
_SHARED_BYTES = 227 * 1024
# So many tiles of rows share a block of columns while it is in the cache.
_NEIGHBOURS = 8


@dataclass(frozen=True)
class TritonTile:
    """Block sizes and launch parameters, all blocks powers of two."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def holding(self, elements: int, itemsize: int) -> TritonTile:
        """The tile, with a smaller inner block where so many elements of each step do not fit its stages."""
        held = elements * self.k * itemsize * self.stages
        return self if held <= _SHARED_BYTES else replace(self, k=max(16, self.k // 2))


def triton(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    rest: Any = None,
    *,
    tile: TritonTile,
    transposed: bool,
    dtype: Any,
    interpret: bool,
) -> jax.Array:
    """Each row times its group's matrix, or that matrix transposed; rows of no group give zeros.

    `rest` is added to the rows, which are then two narrow numbers each.
    """
    rows = lhs.shape[0]
    lefts = (lhs,) if rest is None else (lhs, rest)
    tile = tile.holding(len(lefts) * tile.m + tile.n, lhs.dtype.itemsize)
    width = rhs.shape[1] if transposed else rhs.shape[2]
    starts, stops = starts_of(sizes, rows)
    # One more group: the rows that belong to none, so that their zeros are written too.
    groups = jnp.append(stops - starts, rows - stops[-1:])
    visits = visits_of(groups.astype(jnp.int32), rows, tile.m)
    tiles, columns = most_visits(rows, sizes.shape[0] + 1, tile.m), pl.cdiv(width, tile.n)
    body = functools.partial(_product, tile=tile, transposed=transposed, groups=rhs.shape[0], grid=(tiles, columns))
    given = (visits.group, visits.start, visits.stop, rhs, *lefts)
    (made,), operands = all_alike([jax.ShapeDtypeStruct((rows, width), dtype)], given)
    out: jax.Array = pl.pallas_call(
        body,
        out_shape=made,
        grid=(tiles * columns,),
        compiler_params=backend().CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="ragged_dot",
    )(*operands)
    return out


def _product(
    group_ref: Any,
    start_ref: Any,
    stop_ref: Any,
    rhs_ref: Any,
    *refs: Any,
    tile: TritonTile,
    transposed: bool,
    groups: int,
    grid: tuple[int, int],
) -> None:
    *lhs_refs, out_ref = refs
    depth, width = lhs_refs[0].shape[1], out_ref.shape[1]
    visit, block = _neighbourly(pl.program_id(0), *grid)
    group, start, stop = group_ref[visit], start_ref[visit], stop_ref[visit]
    row, column = start + jnp.arange(tile.m, dtype=jnp.int32), block * tile.n + jnp.arange(tile.n, dtype=jnp.int32)
    matrix = jnp.minimum(group, groups - 1)
    mine, inside = (row < stop)[:, None], column < width

    def step(number: Any, total: Any) -> Any:
        inner = number * tile.k + jnp.arange(tile.k, dtype=jnp.int32)
        whole = depth % tile.k == 0
        within = jnp.ones(tile.k, bool) if whole else inner < depth
        lefts = [load(ref.at[row[:, None], inner[None, :]], mine & within[None, :]) for ref in lhs_refs]
        if transposed:
            place = rhs_ref.at[matrix, column[:, None], inner[None, :]]
            right = load(place, inside[:, None] & within[None, :]).T
        else:
            place = rhs_ref.at[matrix, inner[:, None], column[None, :]]
            right = load(place, within[:, None] & inside[None, :])
        for left in lefts:
            total = total + jnp.dot(left, right, preferred_element_type=jnp.float32)
        return total

    # Nothing to add up for rows of no group, and nothing at all for an empty tile.
    some = (group < groups) & (start < stop)
    # Not a choice between two numbers: Triton's loop does not take its type.
    steps = some.astype(jnp.int32) * jnp.int32(pl.cdiv(depth, tile.k))
    total = jax.lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros((tile.m, tile.n), jnp.float32))
    store(out_ref.at[row[:, None], column[None, :]], total.astype(out_ref.dtype), mine & inside[None, :])


def _neighbourly(number: Any, tiles: int, columns: int) -> tuple[Any, Any]:
    """Tile of rows and block of columns of a program, so that those that run together share both."""
    # Python's numbers have 64 bits where JAX has.
    share = jnp.int32(_NEIGHBOURS * columns)
    first = jax.lax.div(number, share) * _NEIGHBOURS
    count = jnp.minimum(tiles - first, _NEIGHBOURS)
    within = jax.lax.rem(number, share)
    return first + jax.lax.rem(within, count), jax.lax.div(within, count)


def triton_outer(
    lhs: Any, out: Any, sizes: Any, rest: Any = None, *, tile: TritonTile, dtype: Any, interpret: bool
) -> jax.Array:
    """The product of each group's rows of `lhs`, transposed, and of `out`: the gradient of the group's matrix.

    `rest` is added to `out`.
    """
    (rows, depth), width = lhs.shape, out.shape[1]
    rights = (out,) if rest is None else (out, rest)
    tile = tile.holding(tile.m + len(rights) * tile.n, lhs.dtype.itemsize)
    starts, stops = starts_of(sizes, rows)
    grid = (pl.cdiv(width, tile.n), pl.cdiv(depth, tile.m), sizes.shape[0])
    places = (starts.astype(jnp.int32), stops.astype(jnp.int32))
    shapes = [jax.ShapeDtypeStruct((sizes.shape[0], depth, width), dtype)]
    (shape,), operands = all_alike(shapes, (*places, lhs, *rights))
    made: jax.Array = pl.pallas_call(
        functools.partial(_outer, tile=tile),
        out_shape=shape,
        grid=grid,
        compiler_params=backend().CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="ragged_dot_outer",
    )(*operands)
    return made


def _outer(start_ref: Any, stop_ref: Any, lhs_ref: Any, *refs: Any, tile: TritonTile) -> None:
    *out_refs, made_ref = refs
    depth, width = lhs_ref.shape[1], out_refs[0].shape[1]
    group = pl.program_id(2)
    start, stop = start_ref[group], stop_ref[group]
    inner = pl.program_id(1) * tile.m + jnp.arange(tile.m, dtype=jnp.int32)
    column = pl.program_id(0) * tile.n + jnp.arange(tile.n, dtype=jnp.int32)

    def step(number: Any, total: Any) -> Any:
        row = start + number * tile.k + jnp.arange(tile.k, dtype=jnp.int32)
        mine = (row < stop)[:, None]
        left = load(lhs_ref.at[row[:, None], inner[None, :]], mine & (inner < depth)[None, :])
        within = mine & (column < width)[None, :]
        for out_ref in out_refs:
            right = load(out_ref.at[row[:, None], column[None, :]], within)
            total = total + jnp.dot(left.T, right, preferred_element_type=jnp.float32)
        return total

    steps = jax.lax.div(stop - start + tile.k - 1, jnp.int32(tile.k))
    total = jax.lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros((tile.m, tile.n), jnp.float32))
    store(
        made_ref.at[group, inner[:, None], column[None, :]],
        total.astype(made_ref.dtype),
        (inner < depth)[:, None] & (column < width)[None, :],
    )
