"""Grouped products of blocks that stay on their multiprocessors: one matrix, a gated pair, or a sum of two products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..gate import joined
from .handover import Columns, Either, OwnRows, by_group, share_of
from .launch import plgpu
from .matmul import lines, turned
from .ragged_dot import holding
from .ragged_slots import SlotOrder, slots_of
from .rolling import StepTiles, TileWork, rolling
from .tiles import CHUNK, LINE_ROWS, PROCESSORS, Tile, buffers, visits


@dataclass(frozen=True)
class GroupTile:
    """A tile: its group, its first row, the rows that are the group's, and its block of columns."""

    owner: Any
    start: Any
    first: Any
    last: Any
    column: Any

    def share(self, tile: Tile) -> OwnRows:
        """The rows of this warpgroup."""
        return share_of(jax.lax.axis_index("group"), tile.share, self.start, self.first, self.last)

    def own(self, groups: int, values: jax.Array) -> jax.Array:
        """Values of the tile's group, of which there are so many; one more has the rows that belong to none: zeros."""
        return jnp.where(jnp.broadcast_to(self.owner < groups, values.shape), values, jnp.zeros_like(values))


def product(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    sizes: jax.Array,
    *,
    tile: Tile,
    transposed: bool,
    dtype: Any,
    interpret: bool,
    **launched: Any,
) -> jax.Array:
    """Each row times its group's matrix, or that matrix transposed, added up over pairs of `lhs` and `rhs`."""
    depth, width = lhs[0].shape[1], rhs[0].shape[1 if transposed else 2]
    each = depth // tile.k

    def fill(place: GroupTile, at: Any, step: StepTiles, *refs: Any) -> None:
        columns = pl.ds(place.column * tile.n, tile.n)
        for number in range(len(lhs)):
            left, right = refs[1 + number], refs[1 + len(lhs) + number]
            inner = pl.ds((at - number * each) * tile.k, tile.k)

            def copy(left: Any = left, right: Any = right, inner: Any = inner) -> None:
                copy_tall(place, tile, left.at[:, inner], step)
                there = (columns, inner) if transposed else (inner, columns)
                plgpu.copy_gmem_to_smem(right.at[matrix(place, rhs[0]), *there], step.right[0], step.full)

            if len(lhs) == 1:
                copy()
            else:
                pl.when(jax.lax.div(at, jnp.int32(each)) == number)(copy)

    def chunk(totals: Sequence[jax.Array], at: int) -> jax.Array:
        return totals[0][:, at : at + CHUNK]

    shape = (tile.n, tile.k) if transposed else (tile.k, tile.n)
    how: dict[str, Any] = {"fill": fill, "chunk": chunk, "columns": (tile.n, width), "steps": each * len(lhs)}
    how |= {"right": [shape], "dtype": dtype, "tile": holding(tile, lhs[0].dtype, dtype)}
    how |= {"interpret": interpret, "name": "library_ragged_dot_rolling", "transposed": transposed}
    return _one(lhs, rhs, sizes, **how, **launched)


def gated(
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    sizes: jax.Array,
    *,
    tile: Tile,
    interpret: bool,
    **launched: Any,
) -> jax.Array:
    """`silu(lhs @ gate) * (lhs @ up)` of each row with its group's matrices.

    A tile has as many columns of either matrix, side by side, so that each warpgroup holds both sums of its elements.
    """
    half, dtype = tile.n // 2, lhs.dtype

    def fill(place: GroupTile, at: Any, step: StepTiles, *refs: Any) -> None:
        inner, columns = pl.ds(at * tile.k, tile.k), pl.ds(place.column * half, half)
        copy_tall(place, tile, refs[1].at[:, inner], step)
        for ref, there in zip(refs[2:4], step.right, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[matrix(place, gate), inner, columns], there, step.full)

    def chunk(totals: Sequence[jax.Array], at: int) -> jax.Array:
        return joined(*(total[:, at : at + CHUNK] for total in totals))

    how: dict[str, Any] = {"fill": fill, "chunk": chunk, "columns": (half, gate.shape[2])}
    how |= {"steps": lhs.shape[1] // tile.k, "right": [(tile.k, half)] * 2, "dtype": dtype, "transposed": False}
    how |= {"tile": holding(tile, dtype, dtype), "interpret": interpret, "name": "library_ragged_gated"}
    return _one([lhs], [gate, up], sizes, **how, **launched)


def pair(
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    sizes: jax.Array,
    *,
    tile: Tile,
    interpret: bool,
    **launched: Any,
) -> tuple[jax.Array, jax.Array]:
    """`lhs @ gate` and `lhs @ up` of each row with its group's matrices, of columns in whole tiles.

    The columns of the second follow those of the first: rows are read for both, and there is one last round.
    """
    (rows, depth), width, dtype = lhs.shape, gate.shape[2], lhs.dtype
    each = width // tile.n
    if width % tile.n:
        raise ValueError(f"{width} columns of either matrix must be whole tiles of {tile.n}")

    def fill(place: GroupTile, at: Any, step: StepTiles, *refs: Any) -> None:
        inner = pl.ds(at * tile.k, tile.k)
        copy_tall(place, tile, refs[1].at[:, inner], step)

        def copy(ref: Any, begin: int) -> None:
            columns = pl.ds((place.column - begin) * tile.n, tile.n)
            plgpu.copy_gmem_to_smem(ref.at[matrix(place, gate), inner, columns], step.right[0], step.full)

        pl.when(place.column < each)(lambda: copy(refs[2], 0))
        pl.when(place.column >= each)(lambda: copy(refs[3], each))

    def write(place: GroupTile, totals: Sequence[jax.Array], later: Sequence[StepTiles], *refs: Any) -> None:
        *made_refs, staged, pieces = refs[4:]

        def made(at: int) -> jax.Array:
            return place.own(gate.shape[0], totals[0][:, at : at + CHUNK]).astype(dtype)

        is_first = place.column < each
        there = Columns(jnp.where(is_first, place.column, place.column - each) * tile.n, tile.n, width)
        by_group(place.share(tile), [(made, Either(is_first, *made_refs))], there, staged, pieces, settled=False)

    held = buffers(tile, jnp.dtype(dtype).itemsize, tile.n)
    one, other = grouped(
        [lhs],
        [gate, up],
        sizes,
        fill=fill,
        write=write,
        columns=(tile.n, 2 * width),
        steps=depth // tile.k,
        right=[(tile.k, tile.n)],
        transposed=False,
        tile=tile,
        out=[jax.ShapeDtypeStruct((rows, width), dtype)] * 2,
        scratch=[
            plgpu.SMEM((held, tile.m, CHUNK), dtype, transforms=lines(dtype)),
            plgpu.SMEM((tile.m, CHUNK), dtype),
        ],
        interpret=interpret,
        name="library_ragged_pair",
        **launched,
    )
    return one, other


def _one(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    sizes: jax.Array,
    *,
    chunk: Callable[[Sequence[jax.Array], int], jax.Array],
    columns: tuple[int, int],
    tile: Tile,
    dtype: Any,
    **how: Any,
) -> jax.Array:
    """One result, of which `chunk` makes some columns from the sums of a warpgroup's rows."""
    tall, width = columns

    def write(place: GroupTile, totals: Sequence[jax.Array], later: Sequence[StepTiles], *refs: Any) -> None:
        o_ref, staged, pieces = refs[1 + len(lhs) + len(rhs) :]

        def made(at: int) -> jax.Array:
            return place.own(rhs[0].shape[0], chunk(totals, at)).astype(dtype)

        there = Columns(place.column * tall, tall, width)
        by_group(place.share(tile), [(made, o_ref)], there, staged, pieces, settled=False)

    held = buffers(tile, jnp.dtype(dtype).itemsize, tall)
    scratch = [
        plgpu.SMEM((held, tile.m, CHUNK), dtype, transforms=lines(dtype)),
        plgpu.SMEM((tile.m, CHUNK), dtype),
    ]
    out = [jax.ShapeDtypeStruct((lhs[0].shape[0], width), dtype)]
    (made,) = grouped(lhs, rhs, sizes, write=write, columns=columns, tile=tile, out=out, scratch=scratch, **how)
    return made


def grouped(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    sizes: jax.Array,
    *,
    fill: Callable[..., None],
    write: Callable[..., None],
    columns: tuple[int, int],
    steps: int,
    right: Sequence[tuple[int, int]],
    transposed: bool,
    tile: Tile,
    name: str,
    more: Sequence[jax.Array] = (),
    later: int = 0,
    blocks: int = PROCESSORS,
    **launched: Any,
) -> Sequence[jax.Array]:
    """Tiles of all groups; references are the table of slots, `lhs`, `rhs`, `more`, results and scratch.

    `columns`: those of a tile, and of all.
    """
    rows = lhs[0].shape[0]
    across = pl.cdiv(columns[1], columns[0])
    count = visits(rows, sizes.shape[0], tile.m) * across
    order = SlotOrder(across, min(blocks, count), tile.m, tile.even)

    def known(table: Any, *refs: Any) -> tuple[Any, Any]:
        return order.known(table)

    def read(known: Any, number: Any, table: Any, *refs: Any) -> list[Any]:
        return order.read(known, number, table)

    def find(known: Any, number: Any, part: Any, *numbers: Any) -> tuple[GroupTile, Any, Any]:
        owner, line, first, last = order.tile(known, number, part, *numbers)
        # The compiler sees that a tile starts where lines do.
        place = GroupTile(owner, line * LINE_ROWS, first, last, order.spot(known, number)[1])
        return place, first < last, jnp.int32(steps)

    def is_idle(place: GroupTile) -> Any:
        share = place.share(tile)
        return share.low >= share.high

    def multiply(place: GroupTile, at: Any, totals: Sequence[Any], step: StepTiles) -> None:
        mine = pl.ds(jax.lax.axis_index("group") * tile.share, tile.share)
        for total, part in zip(totals, step.right, strict=True):
            plgpu.wgmma(total, step.left.at[mine], turned(part) if transposed else part)

    return rolling(
        TileWork(count, read, find, fill, multiply, write, is_idle, later, known, order.parts if tile.even else None),
        [slots_of(sizes, rows, tile.m, paired=tile.even), *lhs, *rhs, *more],
        left=(tile.m, tile.k),
        right=right,
        tile=tile,
        name=name,
        fast=True,
        blocks=order.blocks,
        **launched,
    )


def copy_tall(place: GroupTile, tile: Tile, ref: Any, step: StepTiles) -> None:
    """Starts a copy of the tile's rows of a step, of half of them where the others are not the group's."""
    middle = place.start + tile.share
    is_low, is_high = place.last <= middle, place.first >= middle

    def copy(first: int, count: int) -> None:
        rows, there = pl.ds(place.start + first, count), pl.ds(first, count)
        plgpu.copy_gmem_to_smem(ref.at[rows], step.left.at[there], step.full)

    pl.when(is_low)(lambda: copy(0, tile.share))
    pl.when(is_high)(lambda: copy(tile.share, tile.share))
    pl.when(jnp.logical_not(is_low | is_high))(lambda: copy(0, tile.m))


def matrix(place: GroupTile, rhs: jax.Array) -> Any:
    """The number of the tile's matrix: one more group has the rows that belong to none."""
    return jnp.minimum(place.owner, rhs.shape[0] - 1)
