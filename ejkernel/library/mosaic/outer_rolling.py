"""Gradients of grouped products' matrices, by blocks that stay on their multiprocessors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..ragged_dot_tiles import starts_of
from .handover import Columns, by_chunks
from .launch import load, plgpu
from .matmul import lines, turned
from .ragged_dot import holding
from .rolling import StepTiles, TileWork, rolling
from .tiles import CHUNK, Tile, buffers


@dataclass(frozen=True)
class _Place:
    """A tile of a group's matrix: the group, the tile's row and column, and the group's rows of both factors."""

    owner: Any
    row: Any
    column: Any
    first: Any
    start: Any
    stop: Any


def outer(
    lhs: jax.Array, out: jax.Array, sizes: jax.Array, *, tile: Tile, dtype: Any, interpret: bool, **launched: Any
) -> jax.Array:
    """For each group the product of its rows of `lhs`, transposed, and of `out`: the gradient of its matrix."""
    (rows, depth), width, groups = lhs.shape, out.shape[1], sizes.shape[0]
    tile = holding(tile, lhs.dtype, dtype)
    columns, high = pl.cdiv(width, tile.n), pl.cdiv(depth, tile.m)

    def spot(number: Any) -> tuple[Any, Any]:
        each = jnp.int32(high * columns)
        return jax.lax.div(number, each), jax.lax.rem(number, each)

    def read(known: Any, number: Any, start_ref: Any, stop_ref: Any, *refs: Any) -> list[Any]:
        return [ref[spot(number)[0]] for ref in (start_ref, stop_ref)]

    def find(known: Any, number: Any, part: Any, start: Any, stop: Any) -> tuple[_Place, Any, Any]:
        owner, rest = spot(number)
        row, column = (op(rest, jnp.int32(columns)) for op in (jax.lax.div, jax.lax.rem))
        first = jax.lax.div(start, jnp.int32(tile.k))
        steps = jnp.where(start < stop, jax.lax.div(stop + (tile.k - 1), jnp.int32(tile.k)) - first, 0)
        # The matrix of an empty group is written too: zeros.
        return _Place(owner, row, column, first, start, stop), number >= 0, steps

    def fill(place: _Place, at: Any, step: StepTiles, *refs: Any) -> None:
        inner = pl.ds((place.first + at) * tile.k, tile.k)
        plgpu.copy_gmem_to_smem(refs[2].at[inner, pl.ds(place.row * tile.m, tile.m)], step.left, step.full)
        plgpu.copy_gmem_to_smem(refs[3].at[inner, pl.ds(place.column * tile.n, tile.n)], step.right[0], step.full)

    def multiply(place: _Place, at: Any, totals: Sequence[Any], step: StepTiles) -> None:
        begin = (place.first + at) * tile.k
        part = step.left.at[:, pl.ds(jax.lax.axis_index("group") * tile.share, tile.share)]

        # Rows of other groups, at either end, count for nothing.
        @pl.when((begin < place.start) | (begin + tile.k > place.stop))
        def _() -> None:
            values = load(part, plgpu.Layout.WGMMA, interpret=interpret, optimized=False)
            row = jax.lax.broadcasted_iota("int32", (tile.k, tile.share), 0)
            row = begin + (row if interpret else plgpu.layout_cast(row, plgpu.Layout.WGMMA))
            part[...] = jnp.where((row >= place.start) & (row < place.stop), values, jnp.zeros_like(values))
            plgpu.commit_smem()

        plgpu.wgmma(totals[0], turned(part), step.right[0])

    def write(place: _Place, totals: Sequence[jax.Array], later: Sequence[StepTiles], *refs: Any) -> None:
        made_ref, staged = refs[4:]
        group = jax.lax.axis_index("group")
        mine = pl.ds(group * tile.share, tile.share)
        there = pl.ds(place.row * tile.m + group * tile.share, tile.share)

        def chunk(at: int) -> jax.Array:
            return totals[0][:, at : at + CHUNK].astype(dtype)

        def copy(buffer: Any, columns: Any) -> None:
            plgpu.copy_smem_to_gmem(buffer, made_ref.at[place.owner, there, columns])

        parts = [staged.at[number, mine] for number in range(held)]
        by_chunks([(chunk, copy)], Columns(place.column * tile.n, tile.n, width), parts, settled=False)

    held = buffers(tile, jnp.dtype(dtype).itemsize, tile.n)
    (made,) = rolling(
        TileWork(groups * high * columns, read, find, fill, multiply, write),
        [*(x.astype(jnp.int32) for x in starts_of(sizes, rows)), lhs, out],
        out=[jax.ShapeDtypeStruct((groups, depth, width), dtype)],
        scratch=[plgpu.SMEM((held, tile.m, CHUNK), dtype, transforms=lines(dtype))],
        left=(tile.k, tile.m),
        right=[(tile.k, tile.n)],
        tile=tile,
        interpret=interpret,
        name="library_ragged_dot_outer_rolling",
        **launched,
    )
    return made
