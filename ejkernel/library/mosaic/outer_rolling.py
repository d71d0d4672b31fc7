"""Gradients of grouped products' matrices, by blocks that stay on their multiprocessors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..ragged_dot_tiles import stops_of
from .handover import Columns, by_chunks
from .launch import load, plgpu
from .matmul import lines, turned
from .ragged_dot import holding, rows_of, stops_at
from .rolling import StepTiles, TileWork, rolling
from .tiles import CHUNK, Tile, buffers


@dataclass(frozen=True)
class _Place:
    """A tile of a group's matrix: the pair of factors, the group, the tile's row and column, and the group's rows."""

    pair: Any
    owner: Any
    row: Any
    column: Any
    first: Any
    start: Any
    stop: Any


def outer(lhs: jax.Array, out: jax.Array, sizes: jax.Array, **how: Any) -> jax.Array:
    """The product of each group's rows of `lhs`, transposed, and of `out`: the gradient of the group's matrix."""
    (made,) = outers([(lhs, out)], sizes, **how)
    return made


def outers(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    sizes: jax.Array,
    *,
    tile: Tile,
    dtype: Any,
    interpret: bool,
    **launched: Any,
) -> list[jax.Array]:
    """The results of `outer` for several pairs with the same rows, in one launch: one last round, not one for each.

    Of several pairs, columns are whole tiles.
    """
    rows, groups = pairs[0][0].shape[0], sizes.shape[0]
    tile = holding(tile, pairs[0][0].dtype, dtype)
    # The first array of each pair among the references, and columns of its tiles.
    refs_of = [1 + 2 * number for number in range(len(pairs))]
    columns = [pl.cdiv(out.shape[1], tile.n) for _, out in pairs]
    begins = [0]
    for (lhs, _), wide in zip(pairs, columns, strict=True):
        begins.append(begins[-1] + pl.cdiv(lhs.shape[1], tile.m) * wide)
    if len(pairs) > 1 and any(out.shape[1] % tile.n for _, out in pairs):
        raise ValueError(f"columns of several pairs must be whole tiles of {tile.n}")

    def read(number: Any, stop_ref: Any, *refs: Any) -> Sequence[Any]:
        return stops_at(jax.lax.div(number, jnp.int32(begins[-1])), stop_ref)

    def find(number: Any, before: Any, stop: Any) -> tuple[_Place, Any, Any]:
        owner, rest = (op(number, jnp.int32(begins[-1])) for op in (jax.lax.div, jax.lax.rem))
        start, stop = rows_of(owner, before, stop, rows=rows)
        pair, begin, wide = jnp.int32(0), jnp.int32(0), jnp.int32(columns[0])
        for at in range(1, len(pairs)):
            is_behind = rest >= begins[at]
            pair, begin = jnp.where(is_behind, at, pair), jnp.where(is_behind, begins[at], begin)
            wide = jnp.where(is_behind, columns[at], wide)
        row, column = (op(rest - begin, wide) for op in (jax.lax.div, jax.lax.rem))
        first = jax.lax.div(start, jnp.int32(tile.k))
        steps = jnp.where(start < stop, jax.lax.div(stop + (tile.k - 1), jnp.int32(tile.k)) - first, 0)
        # The matrix of an empty group is written too: zeros.
        return _Place(pair, owner, row, column, first, start, stop), number >= 0, steps

    def of_pair(place: _Place, do: Callable[[int], None]) -> None:
        for number in range(len(pairs)):
            if len(pairs) == 1:
                do(number)
            else:
                pl.when(place.pair == number)(functools.partial(do, number))

    def fill(place: _Place, at: Any, step: StepTiles, *refs: Any) -> None:
        inner = pl.ds((place.first + at) * tile.k, tile.k)

        def copy(number: int) -> None:
            left, right = refs[refs_of[number] : refs_of[number] + 2]
            plgpu.copy_gmem_to_smem(left.at[inner, pl.ds(place.row * tile.m, tile.m)], step.left, step.full)
            plgpu.copy_gmem_to_smem(right.at[inner, pl.ds(place.column * tile.n, tile.n)], step.right[0], step.full)

        of_pair(place, copy)

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
        *made_refs, staged = refs[1 + 2 * len(pairs) :]
        group = jax.lax.axis_index("group")
        mine = pl.ds(group * tile.share, tile.share)
        there = pl.ds(place.row * tile.m + group * tile.share, tile.share)

        def chunk(at: int) -> jax.Array:
            return totals[0][:, at : at + CHUNK].astype(dtype)

        def copy(buffer: Any, columns: Any) -> None:
            def of(number: int) -> None:
                plgpu.copy_smem_to_gmem(buffer, made_refs[number].at[place.owner, there, columns])

            of_pair(place, of)

        parts = [staged.at[number, mine] for number in range(held)]
        width = pairs[0][1].shape[1]
        by_chunks(chunk, copy, Columns(place.column * tile.n, tile.n, width), parts, written=False)

    held = buffers(tile, jnp.dtype(dtype).itemsize, tile.n)
    made = rolling(
        TileWork(groups * begins[-1], read, find, fill, multiply, write),
        [stops_of(sizes, rows).astype(jnp.int32), *(x for pair in pairs for x in pair)],
        out=[jax.ShapeDtypeStruct((groups, lhs.shape[1], out.shape[1]), dtype) for lhs, out in pairs],
        scratch=[plgpu.SMEM((held, tile.m, CHUNK), dtype, transforms=lines(dtype))],
        left=(tile.k, tile.m),
        right=[(tile.k, tile.n)],
        tile=tile,
        interpret=interpret,
        name="library_ragged_dot_outer_rolling",
        **launched,
    )
    return list(made)
