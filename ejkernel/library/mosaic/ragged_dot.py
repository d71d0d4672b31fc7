"""Grouped products for Hopper GPUs: a block for each tile of a group's rows and block of columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..ragged_dot_tiles import stops_of
from .handover import Columns, by_chunks, by_group, share_of
from .launch import launch, load, plgpu
from .matmul import lines, multiply, turned
from .ragged_tables import Tables, visits_of
from .tiles import CHUNK, LINE_ROWS, SHARED_BYTES, WORKERS, Tile, visits

_WIDEST_BAND = 8


def product(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    tile: Tile,
    transposed: bool,
    dtype: Any,
    interpret: bool,
    tables: Tables = visits_of,
) -> jax.Array:
    """Each row times its group's matrix, or that matrix transposed; rows of no group give zeros."""
    (rows, depth), groups = lhs.shape, rhs.shape[0]
    width = rhs.shape[1] if transposed else rhs.shape[2]
    tile = holding(tile, lhs.dtype, dtype)
    columns = pl.cdiv(width, tile.n)
    # Blocks of columns that a tile of rows meets while it is in the cache, in bands of about the same width.
    bands = pl.cdiv(columns, _WIDEST_BAND)
    wide = pl.cdiv(columns, bands)
    tiles = tables(sizes, rows, tile.m)

    def kernel(group_ref: Any, line_ref: Any, first_ref: Any, last_ref: Any, *refs: Any) -> None:
        lhs_ref, rhs_ref, o_ref, staged, pieces = refs
        visit = jax.lax.axis_index("visit")
        j = jax.lax.axis_index("band") * wide + jax.lax.axis_index("column")
        owner, line, first, last = (ref[visit] for ref in (group_ref, line_ref, first_ref, last_ref))
        matrix = rhs_ref.at[jnp.minimum(owner, groups - 1)]
        # The compiler sees that a tile starts where lines do.
        start = line * LINE_ROWS
        tall = lhs_ref if rows <= tile.m else lhs_ref.at[pl.ds(start, tile.m)]

        def write(total: jax.Array, group: Any) -> None:
            is_group = jnp.broadcast_to(owner < groups, total.shape)
            made = jnp.where(is_group, total, jnp.zeros_like(total)).astype(dtype)
            share = share_of(group, tile.share, start, first, last)
            there = Columns(j * tile.n, tile.n, width)
            by_group(share, lambda at: made[:, at : at + CHUNK], o_ref, there, staged, pieces)

        @pl.when((first < last) & (j < columns))
        def _() -> None:
            multiply(
                tall,
                matrix,
                # Of few rows there is one tile, at line 0.
                lambda step: (line if rows <= tile.m else 0, step),
                (lambda step: (j, step)) if transposed else (lambda step: (step, j)),
                write,
                tile=tile,
                steps=depth // tile.k,
                transposed=transposed,
            )

    (out,) = launch(
        kernel,
        [*tiles, lhs, rhs],
        out=[jax.ShapeDtypeStruct((rows, width), dtype)],
        grid={"band": bands, "visit": visits(rows, groups, tile.m), "column": wide},
        scratch=[
            plgpu.SMEM((1, tile.m, CHUNK), dtype, transforms=lines(dtype)),
            plgpu.SMEM((tile.m, CHUNK), dtype),
        ],
        groups={"group": WORKERS + 1},
        interpret=interpret,
        name="library_ragged_dot",
    )
    return out


def outer(lhs: jax.Array, out: jax.Array, sizes: jax.Array, *, tile: Tile, dtype: Any, interpret: bool) -> jax.Array:
    """The product of each group's rows of `lhs`, transposed, and of `out`: the gradient of the group's matrix."""
    (rows, depth), width, groups = lhs.shape, out.shape[1], sizes.shape[0]
    tile = holding(tile, lhs.dtype, dtype)
    columns, high = pl.cdiv(width, tile.n), pl.cdiv(depth, tile.m)

    def kernel(stop_ref: Any, lhs_ref: Any, out_ref: Any, made_ref: Any, staged: Any) -> None:
        owner, i, j = (jax.lax.axis_index(name) for name in ("owner", "row", "column"))
        start, stop = rows_of(owner, *stops_at(owner, stop_ref), rows=rows)
        first = jax.lax.div(start, jnp.int32(tile.k))
        steps = jnp.where(start < stop, pl.cdiv(stop, tile.k) - first, 0)
        group = jax.lax.axis_index("group")
        mine = pl.ds(group * tile.share, tile.share)

        def compute(pipeline: Any) -> None:
            def added_up(total: Any) -> Any:
                pipeline(total)
                return total[...]

            total = pl.run_scoped(added_up, plgpu.ACC((tile.share, tile.n), jnp.float32)).astype(dtype)
            rows = pl.ds(i * tile.m + group * tile.share, tile.share)

            def copy(buffer: Any, there: Any) -> None:
                plgpu.copy_smem_to_gmem(buffer, made_ref.at[owner, rows, there])

            def chunk(at: int) -> jax.Array:
                return total[:, at : at + CHUNK]  # type: ignore[no-any-return]

            by_chunks(chunk, copy, Columns(j * tile.n, tile.n, width), [staged.at[mine]])

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
            # As in `multiply`: one product is still running while the next tiles are asked for.
            plgpu.wgmma_wait(1)
            return total

        shapes = ((tile.k, tile.m), lambda step: (first + step, i)), ((tile.k, tile.n), lambda step: (first + step, j))
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps,),
            in_specs=[
                plgpu.BlockSpec(shape, place, transforms=lines(lhs.dtype), delay_release=1) for shape, place in shapes
            ],
            max_concurrent_steps=tile.stages,
            memory_registers=40,
            wg_axis="group",
            num_compute_wgs=WORKERS,
            memory_thread_idx=WORKERS,
            compute_context=compute,
        )(lhs_ref, out_ref)

    (made,) = launch(
        kernel,
        [stops_of(sizes, rows).astype(jnp.int32), lhs, out],
        out=[jax.ShapeDtypeStruct((groups, depth, width), dtype)],
        grid={"owner": groups, "row": high, "column": columns},
        scratch=[plgpu.SMEM((tile.m, CHUNK), dtype, transforms=lines(dtype))],
        groups={"group": WORKERS + 1},
        interpret=interpret,
        name="library_ragged_dot_outer",
    )
    return made


def stops_at(owner: Any, stops: Any) -> tuple[Any, Any]:
    """Ends of the group before and of the group itself, among those of `stops_of`."""
    return stops[jnp.maximum(owner - 1, 0)], stops[owner]


def rows_of(owner: Any, before: Any, stop: Any, *, rows: int) -> tuple[Any, Any]:
    """The first row of a group, and the row after its last, from `stops_at`: XLA needs no launch to cut and shift."""
    return jnp.where(owner > 0, jnp.minimum(before, rows), 0), jnp.minimum(stop, rows)


def holding(tile: Tile, dtype: Any, made: Any) -> Tile:
    """The tile, with fewer stages where those of a result wider than the factors would not fit."""
    step = (tile.m + tile.n) * tile.k * jnp.dtype(dtype).itemsize
    left = SHARED_BYTES - 2 * tile.m * CHUNK * jnp.dtype(made).itemsize
    return replace(tile, stages=min(tile.stages, max(2, left // step)))
