"""Grouped products that are joined with arrays of their result's shape before anything is written: gated pairs.

A tile's steps are followed by some that bring these arrays, chunk by chunk, into the same shared memory, where the
results take their places. What a pass over all would read and write is read and written while tensor cores multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..gate import joined, pulled
from .handover import copy_rows, copy_whole
from .launch import load, plgpu
from .matmul import lines
from .ragged_rolling import GroupTile, copy_tall, grouped, matrix
from .rolling import StepTiles
from .tiles import CHUNK, Tile


def gated_up(
    lhs: jax.Array, up: jax.Array, opened: jax.Array, sizes: jax.Array, **how: Any
) -> tuple[jax.Array, jax.Array]:
    """`silu(opened) * (lhs @ up)` and `lhs @ up` of each row with its group's matrix; `how` is that of both."""

    def finish(raised: jax.Array, opened: jax.Array) -> tuple[jax.Array, jax.Array]:
        # As two kernels would: what the gradient is given is what the result was made of.
        raised = raised.astype(lhs.dtype).astype(jnp.float32)
        return joined(opened, raised), raised

    return _joined(lhs, up, [opened], sizes, finish=finish, transposed=False, name="library_ragged_gated_up", **how)


def gated_back(
    dy: jax.Array, down: jax.Array, opened: jax.Array, raised: jax.Array, sizes: jax.Array, **how: Any
) -> tuple[jax.Array, jax.Array]:
    """The gradients of `opened` and `raised`, where `dy @ down.T` is that of `silu(opened) * raised`."""

    def finish(towards: jax.Array, opened: jax.Array, raised: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pulled(opened, raised, towards)

    name = "library_ragged_gated_back"
    return _joined(dy, down, [opened, raised], sizes, finish=finish, transposed=True, name=name, **how)


def _joined(
    lhs: jax.Array,
    rhs: jax.Array,
    given: Sequence[jax.Array],
    sizes: jax.Array,
    *,
    finish: Callable[..., tuple[jax.Array, jax.Array]],
    tile: Tile,
    transposed: bool,
    **launched: Any,
) -> tuple[jax.Array, jax.Array]:
    """Two results of sums and the arrays given, in float32; tiles are as deep as a chunk, and their size divides all.

    A step's tiles have room for chunks of two arrays where the right one has a line for each column; else of one.
    """
    (rows, depth), width, dtype = lhs.shape, rhs.shape[1 if transposed else 2], lhs.dtype
    steps = depth // tile.k

    # References: the table of slots, `lhs`, `rhs`, those given, both results, parts of tiles, and whole ones.
    def fill(place: GroupTile, at: Any, step: StepTiles, *refs: Any) -> None:
        first = place.column * tile.n

        @pl.when(at < steps)
        def _() -> None:
            inner, columns = pl.ds(at * tile.k, tile.k), pl.ds(first, tile.n)
            there = (columns, inner) if transposed else (inner, columns)
            copy_tall(place, tile, refs[1].at[:, inner], step)
            plgpu.copy_gmem_to_smem(refs[2].at[matrix(place, rhs), *there], step.right[0], step.full)

        @pl.when(at >= steps)
        def _() -> None:
            # The barrier is told of two copies a step: of one array they are those of both warpgroups' rows.
            columns, each = pl.ds(first + (at - steps) * CHUNK, CHUNK), tile.m * len(given) // 2
            for number in range(2):
                which, low = number % len(given), number * (tile.m - each)
                buffer = rooms(step)[which].at[pl.ds(low, each)]
                plgpu.copy_gmem_to_smem(refs[3 + which].at[pl.ds(place.start + low, each), columns], buffer, step.full)

    def rooms(step: StepTiles) -> list[Any]:
        return [step.left, step.right[0]][: len(given)]

    def write(place: GroupTile, totals: Sequence[jax.Array], later: Sequence[StepTiles], *refs: Any) -> None:
        share, (*made_refs, pieces, staged) = place.share(tile), refs[3 + len(given) :]
        for number, step in enumerate(later):
            at, buffers = number * CHUNK, [room.at[share.mine] for room in rooms(step)]
            there = pl.ds(place.column * tile.n + at, CHUNK)
            plgpu.barrier_wait(step.full)
            found = [load(x, plgpu.Layout.WGMMA, interpret=launched["interpret"]) for x in buffers]
            values = finish(totals[0][:, at : at + CHUNK], *(x.astype(jnp.float32) for x in found))
            made = list(zip((place.own(rhs.shape[0], x).astype(dtype) for x in values), made_refs, strict=True))
            if len(given) == 1:
                buffers = [staged.at[share.mine], *buffers]

            @pl.when(share.is_whole)
            def _(buffers: Any = buffers, made: Any = made, there: Any = there) -> None:
                # Of the chunk before the first copy has been read by then: it may be from the same place.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                for buffer, (x, _) in zip(buffers, made, strict=True):
                    buffer[...] = x
                plgpu.commit_smem()
                for buffer, (_, ref) in zip(buffers, made, strict=True):
                    copy_whole(share, ref, buffer, there)

            @pl.when(jnp.logical_not(share.is_whole))
            def _(made: Any = made, there: Any = there) -> None:
                for x, ref in made:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    pieces[share.mine] = x
                    plgpu.commit_smem()
                    copy_rows(share, ref, pieces, there)

            # All but the last two copies have been read by then: the chunk before may go.
            plgpu.wait_smem_to_gmem(2, wait_read_only=True)
            if number:
                plgpu.barrier_arrive(later[number - 1].empty)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(later[-1].empty)

    one, other = grouped(
        [lhs],
        [rhs],
        sizes,
        more=given,
        fill=fill,
        write=write,
        columns=(tile.n, width),
        steps=steps,
        later=tile.n // CHUNK,
        right=[(tile.n, tile.k) if transposed else (tile.k, tile.n)],
        transposed=transposed,
        tile=tile,
        out=[jax.ShapeDtypeStruct((rows, width), dtype)] * 2,
        scratch=[
            plgpu.SMEM((tile.m, CHUNK), dtype),
            plgpu.SMEM((tile.m, CHUNK), dtype, transforms=lines(dtype)),
        ],
        **launched,
    )
    return one, other
