"""Grouped products of blocks that stay on their multiprocessors: one matrix, two of them, or a sum of products."""

from __future__ import annotations

import functools
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
from .ragged_tables import Tables, visits_of
from .rolling import OwnCopies, StepTiles, TileWork, rolling
from .tiles import CHUNK, LINE_ROWS, Tile, buffers, visits

_WIDEST_BAND = 8


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
            left, right = refs[4 + number], refs[4 + len(lhs) + number]
            inner = pl.ds((at - number * each) * tile.k, tile.k)

            def copy(left: Any = left, right: Any = right, inner: Any = inner) -> None:
                plgpu.copy_gmem_to_smem(left.at[pl.ds(place.start, tile.m), inner], step.left, step.full)
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
    return _made(lhs, rhs, sizes, **how, **launched)[0]


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
        plgpu.copy_gmem_to_smem(refs[4].at[pl.ds(place.start, tile.m), inner], step.left, step.full)
        for ref, there in zip(refs[5:7], step.right, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[matrix(place, gate), inner, columns], there, step.full)

    def chunk(totals: Sequence[jax.Array], at: int) -> jax.Array:
        return joined(*(total[:, at : at + CHUNK] for total in totals))

    how: dict[str, Any] = {"fill": fill, "chunk": chunk, "columns": (half, gate.shape[2])}
    how |= {"steps": lhs.shape[1] // tile.k, "right": [(tile.k, half)] * 2, "dtype": dtype, "transposed": False}
    how |= {"tile": holding(tile, dtype, dtype), "interpret": interpret, "name": "library_ragged_gated"}
    return _made([lhs], [gate, up], sizes, **how, **launched)[0]


def pair(
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    sizes: jax.Array,
    *,
    tile: Tile,
    interpret: bool,
    **launched: Any,
) -> Sequence[jax.Array]:
    """`lhs @ gate` and `lhs @ up` of each row with its group's matrices.

    Tiles of the second follow those of the first, and meet the same rows while these are in the cache.
    """
    width, dtype = gate.shape[2], lhs.dtype
    each = pl.cdiv(width, tile.n)

    def fill(place: GroupTile, at: Any, step: StepTiles, *refs: Any) -> None:
        inner = pl.ds(at * tile.k, tile.k)
        plgpu.copy_gmem_to_smem(refs[4].at[pl.ds(place.start, tile.m), inner], step.left, step.full)

        def copy(number: int) -> None:
            columns = pl.ds((place.column - number * each) * tile.n, tile.n)
            there = refs[5 + number].at[matrix(place, gate), inner, columns]
            plgpu.copy_gmem_to_smem(there, step.right[0], step.full)

        for number in range(2):
            pl.when(jax.lax.div(place.column, jnp.int32(each)) == number)(functools.partial(copy, number))

    def chunk(totals: Sequence[jax.Array], at: int) -> jax.Array:
        return totals[0][:, at : at + CHUNK]

    how: dict[str, Any] = {"fill": fill, "chunk": chunk, "columns": (tile.n, width), "steps": lhs.shape[1] // tile.k}
    how |= {"right": [(tile.k, tile.n)], "dtype": dtype, "transposed": False, "is_pair": True}
    how |= {"tile": holding(tile, dtype, dtype), "interpret": interpret, "name": "library_ragged_pair"}
    return _made([lhs], [gate, up], sizes, **how, **launched)


def _made(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    sizes: jax.Array,
    *,
    chunk: Callable[[Sequence[jax.Array], int], jax.Array],
    columns: tuple[int, int],
    tile: Tile,
    dtype: Any,
    is_pair: bool = False,
    **how: Any,
) -> Sequence[jax.Array]:
    """A result, of which `chunk` makes some columns from the sums of a warpgroup's rows, or two of equal shape.

    `columns`: those of a tile, and of a result. The tiles of a second result follow those of the first.
    """
    tall, width = columns
    each = pl.cdiv(width, tall)

    def write(place: GroupTile, totals: Sequence[jax.Array], later: Sequence[StepTiles], *refs: Any) -> None:
        *made_refs, staged, pieces = refs[4 + len(lhs) + len(rhs) :]

        def made(at: int) -> jax.Array:
            return place.own(rhs[0].shape[0], chunk(totals, at)).astype(dtype)

        column, o_ref = place.column, made_refs[0]
        if is_pair:
            is_first = column < each
            column, o_ref = jnp.where(is_first, column, column - each), Either(is_first, *made_refs)
        there = Columns(column * tall, tall, width)
        by_group(place.share(tile), made, o_ref, there, staged, pieces, written=False)

    held = buffers(tile, jnp.dtype(dtype).itemsize, tall)
    scratch = [
        plgpu.SMEM((held, tile.m, CHUNK), dtype, transforms=lines(dtype)),
        plgpu.SMEM((tile.m, CHUNK), dtype),
    ]
    how |= {"out": [jax.ShapeDtypeStruct((lhs[0].shape[0], width), dtype)] * (1 + is_pair), "scratch": scratch}
    return grouped(lhs, rhs, sizes, write=write, across=(1 + is_pair) * each, tile=tile, **how)


def grouped(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    sizes: jax.Array,
    *,
    fill: Callable[..., None],
    write: Callable[..., None],
    across: int,
    steps: int,
    right: Sequence[tuple[int, int]],
    transposed: bool,
    tile: Tile,
    name: str,
    more: Sequence[jax.Array] = (),
    later: int = 0,
    own: OwnCopies | None = None,
    tables: Tables = visits_of,
    **launched: Any,
) -> Sequence[jax.Array]:
    """Tiles of all groups; references are those of four numbers of each, `lhs`, `rhs`, `more`, results and scratch.

    `across`: blocks of columns of a tile each.
    """
    rows = lhs[0].shape[0]
    # Blocks of columns that a tile of rows meets while it is in the cache, in bands of about the same width.
    bands = pl.cdiv(across, _WIDEST_BAND)
    wide = pl.cdiv(across, bands)
    tiles, count = tables(sizes, rows, tile.m), visits(rows, sizes.shape[0], tile.m)

    def spot(number: Any) -> tuple[Any, Any]:
        band, rest = (op(number, jnp.int32(count * wide)) for op in (jax.lax.div, jax.lax.rem))
        visit, column = (op(rest, jnp.int32(wide)) for op in (jax.lax.div, jax.lax.rem))
        return visit, band * wide + column

    def read(number: Any, *refs: Any) -> list[Any]:
        return [ref[spot(number)[0]] for ref in refs[:4]]

    def find(number: Any, owner: Any, line: Any, first: Any, last: Any) -> tuple[GroupTile, Any, Any]:
        _, column = spot(number)
        # The compiler sees that a tile starts where lines do.
        place = GroupTile(owner, line * LINE_ROWS, first, last, column)
        return place, (first < last) & (column < across), jnp.int32(steps)

    def is_idle(place: GroupTile) -> Any:
        share = place.share(tile)
        return share.low >= share.high

    def multiply(place: GroupTile, at: Any, totals: Sequence[Any], step: StepTiles) -> None:
        mine = pl.ds(jax.lax.axis_index("group") * tile.share, tile.share)
        for total, part in zip(totals, step.right, strict=True):
            plgpu.wgmma(total, step.left.at[mine], turned(part) if transposed else part)

    return rolling(
        TileWork(count * bands * wide, read, find, fill, multiply, write, is_idle, later, own),
        [*tiles, *lhs, *rhs, *more],
        left=(tile.m, tile.k),
        right=right,
        tile=tile,
        name=name,
        fast=True,
        **launched,
    )


def matrix(place: GroupTile, rhs: jax.Array) -> Any:
    """The number of the tile's matrix: one more group has the rows that belong to none."""
    return jnp.minimum(place.owner, rhs.shape[0] - 1)
