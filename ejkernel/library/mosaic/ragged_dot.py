"""Grouped products for Hopper GPUs: a block for each tile of rows, group in it and block of columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..ragged_dot_tiles import starts_of
from .launch import launch, load, plgpu
from .matmul import lines, multiply, turned
from .tiles import WORKERS, Tile, band


def product(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, tile: Tile, transposed: bool, dtype: Any, interpret: bool
) -> jax.Array:
    """Each row times its group's matrix, or that matrix transposed; rows of no group give zeros."""
    (rows, depth), groups = lhs.shape, rhs.shape[0]
    width = rhs.shape[1] if transposed else rhs.shape[2]
    tile = _holding(tile, lhs.dtype, dtype)
    columns = pl.cdiv(width, tile.n)
    wide = band(columns)
    visits = _visits(sizes, rows, tile.m)

    def kernel(group_ref: Any, tile_ref: Any, first_ref: Any, last_ref: Any, *refs: Any) -> None:
        lhs_ref, rhs_ref, o_ref, staged, pieces = refs
        visit = jax.lax.axis_index("visit")
        j = jax.lax.axis_index("band") * wide + jax.lax.axis_index("column")
        owner, i, first, last = (ref[visit] for ref in (group_ref, tile_ref, first_ref, last_ref))
        matrix = rhs_ref.at[jnp.minimum(owner, groups - 1)]

        def write(total: jax.Array, group: Any) -> None:
            is_group = jnp.broadcast_to(owner < groups, total.shape)
            made = jnp.where(is_group, total, jnp.zeros_like(total)).astype(dtype)
            begin = i * tile.m + group * tile.share
            # The rows of this warpgroup that are the group's.
            low = jnp.clip(first - begin, 0, tile.share)
            high = jnp.clip(last - begin, 0, tile.share)
            there, mine = pl.ds(j * tile.n, tile.n), pl.ds(group * tile.share, tile.share)

            @pl.when(high - low == tile.share)
            def _() -> None:
                staged[mine] = made
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staged.at[mine], o_ref.at[pl.ds(begin, tile.share), there])
                plgpu.wait_smem_to_gmem(0)

            @pl.when(high - low < tile.share)
            def _() -> None:
                pieces[mine] = made
                plgpu.commit_smem()
                count, at = high - low, low
                # Copies have a fixed size: one for each binary digit of the number of rows.
                size = tile.share // 2
                while size:
                    some = jax.lax.bitwise_and(count, size)

                    @pl.when(some > 0)
                    def _(at: Any = at, size: int = size) -> None:
                        part = pieces.at[pl.ds(group * tile.share + at, size)]
                        plgpu.copy_smem_to_gmem(part, o_ref.at[pl.ds(begin + at, size), there])

                    at, size = at + some, size // 2
                plgpu.wait_smem_to_gmem(0)

        @pl.when(first < last)
        def _() -> None:
            multiply(
                lhs_ref,
                matrix,
                lambda step: (i, step),
                (lambda step: (j, step)) if transposed else (lambda step: (step, j)),
                write,
                tile=tile,
                steps=depth // tile.k,
                transposed=transposed,
            )

    (out,) = launch(
        kernel,
        [*visits, lhs, rhs],
        out=[jax.ShapeDtypeStruct((rows, width), dtype)],
        grid={"band": columns // wide, "visit": visits[0].shape[0], "column": wide},
        scratch=[
            plgpu.SMEM((tile.m, tile.n), dtype, transforms=lines(dtype)),
            plgpu.SMEM((tile.m, tile.n), dtype),
        ],
        groups={"group": WORKERS + 1},
        interpret=interpret,
        name="library_ragged_dot",
    )
    return out


def outer(lhs: jax.Array, out: jax.Array, sizes: jax.Array, *, tile: Tile, dtype: Any, interpret: bool) -> jax.Array:
    """For each group the product of its rows of `lhs`, transposed, and of `out`: the gradient of its matrix."""
    (rows, depth), width, groups = lhs.shape, out.shape[1], sizes.shape[0]
    tile = _holding(tile, lhs.dtype, dtype, results=1)
    columns, high = pl.cdiv(width, tile.n), pl.cdiv(depth, tile.m)
    starts, stops = starts_of(sizes, rows)

    def kernel(start_ref: Any, stop_ref: Any, lhs_ref: Any, out_ref: Any, made_ref: Any, staged: Any) -> None:
        owner, i, j = (jax.lax.axis_index(name) for name in ("owner", "row", "column"))
        start, stop = start_ref[owner], stop_ref[owner]
        first = jax.lax.div(start, jnp.int32(tile.k))
        steps = jnp.where(start < stop, pl.cdiv(stop, tile.k) - first, 0)
        group = jax.lax.axis_index("group")
        mine = pl.ds(group * tile.share, tile.share)

        def compute(pipeline: Any) -> None:
            def added_up(total: Any) -> Any:
                pipeline(total)
                return total[...]

            staged[mine] = pl.run_scoped(added_up, plgpu.ACC((tile.share, tile.n), jnp.float32)).astype(dtype)
            plgpu.commit_smem()
            place = made_ref.at[owner, pl.ds(i * tile.m + group * tile.share, tile.share), pl.ds(j * tile.n, tile.n)]
            plgpu.copy_smem_to_gmem(staged.at[mine], place)
            plgpu.wait_smem_to_gmem(0)

        def step(indices: Any, left: Any, right: Any, total: Any) -> Any:
            begin = (first + indices[0]) * tile.k
            part = left.at[:, mine]

            # Rows of other groups, at either end, count for nothing.
            @pl.when((begin < start) | (begin + tile.k > stop))
            def _() -> None:
                values = load(part, plgpu.Layout.WGMMA, interpret=interpret, optimized=False)
                row = jax.lax.broadcasted_iota("int32", (tile.k, tile.share), 0)
                row = begin + (row if interpret else plgpu.layout_cast(row, plgpu.Layout.WGMMA))
                part[...] = jnp.where((row >= start) & (row < stop), values, jnp.zeros_like(values))
                plgpu.commit_smem()

            plgpu.wgmma(total, turned(part), right)
            plgpu.wgmma_wait(0)
            return total

        shapes = ((tile.k, tile.m), lambda step: (first + step, i)), ((tile.k, tile.n), lambda step: (first + step, j))
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps,),
            in_specs=[plgpu.BlockSpec(shape, place, transforms=lines(lhs.dtype)) for shape, place in shapes],
            max_concurrent_steps=tile.stages,
            memory_registers=40,
            wg_axis="group",
            num_compute_wgs=WORKERS,
            memory_thread_idx=WORKERS,
            compute_context=compute,
        )(lhs_ref, out_ref)

    (made,) = launch(
        kernel,
        [starts.astype(jnp.int32), stops.astype(jnp.int32), lhs, out],
        out=[jax.ShapeDtypeStruct((groups, depth, width), dtype)],
        grid={"owner": groups, "row": high, "column": columns},
        scratch=[plgpu.SMEM((tile.m, tile.n), dtype, transforms=lines(dtype))],
        groups={"group": WORKERS + 1},
        interpret=interpret,
        name="library_ragged_dot_outer",
    )
    return made


def _visits(sizes: jax.Array, rows: int, tile: int) -> tuple[jax.Array, ...]:
    """Of each visit the group, the tile of rows, and the first and last of its rows that are the group's.

    Tiles lie at multiples of their size, so one with rows of several groups is visited for each of them. One more
    group has the rows that belong to none. A visit that is not needed has no rows.
    """
    starts, stops = starts_of(sizes, rows)
    starts = jnp.append(starts, stops[-1])
    stops = jnp.append(stops, rows)
    first = starts // tile
    tiles = jnp.where(starts < stops, -(-stops // tile) - first, 0)
    ends = jnp.cumsum(tiles)
    number = jnp.arange(-(-rows // tile) + sizes.shape[0] + 1, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, number, side="right"), sizes.shape[0])
    place = jnp.minimum(first[group] + number - (ends - tiles)[group], -(-rows // tile) - 1)
    low = jnp.maximum(starts[group], place * tile)
    high = jnp.where(number < ends[-1], jnp.minimum(stops[group], (place + 1) * tile), low)
    return tuple(x.astype(jnp.int32) for x in (group, place, low, high))


def _holding(tile: Tile, dtype: Any, made: Any, results: int = 2) -> Tile:
    """The tile, with fewer stages and columns where a result wider than the factors would not fit."""
    wider = jnp.dtype(made).itemsize // jnp.dtype(dtype).itemsize
    if wider == 1:
        return tile
    return replace(tile, n=min(tile.n, 128 // results), stages=min(tile.stages, 3))
