"""The gradients of a gated pair's products: the product with the matrices that follow, and what a gate makes of it.

A tile's steps are followed by some that bring both products, chunk by chunk, into the same shared memory, where the
results take their places. What a pass over all would read and write is read and written while tensor cores multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..gate import pulled
from .handover import copy_rows, copy_whole
from .launch import load, plgpu
from .ragged_rolling import GroupTile, grouped, matrix
from .rolling import StepTiles
from .tiles import CHUNK, Tile

# Of several the fastest on an H200. Its steps are as deep as a chunk, and 128 divides whatever blocks that stay take.
TILE = Tile(128, 128, 64, 6, lead=2)


def gated_back(
    dy: jax.Array,
    down: jax.Array,
    opened: jax.Array,
    raised: jax.Array,
    sizes: jax.Array,
    *,
    tile: Tile = TILE,
    interpret: bool,
    **launched: Any,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of `opened` and `raised`, where `dy @ down.T` is that of `silu(opened) * raised`."""
    (rows, depth), width, dtype = dy.shape, down.shape[1], dy.dtype
    steps = depth // tile.k

    # References: four numbers of a tile, `dy`, `down`, both products, both results, and parts of tiles.
    def fill(place: GroupTile, at: Any, step: StepTiles, *refs: Any) -> None:
        tall, first = pl.ds(place.start, tile.m), place.column * tile.n

        @pl.when(at < steps)
        def _() -> None:
            inner, columns = pl.ds(at * tile.k, tile.k), pl.ds(first, tile.n)
            plgpu.copy_gmem_to_smem(refs[4].at[tall, inner], step.left, step.full)
            plgpu.copy_gmem_to_smem(refs[5].at[matrix(place, down), columns, inner], step.right[0], step.full)

        @pl.when(at >= steps)
        def _() -> None:
            there = tall, pl.ds(first + (at - steps) * CHUNK, CHUNK)
            for ref, room in zip(refs[6:8], (step.left, step.right[0]), strict=True):
                plgpu.copy_gmem_to_smem(ref.at[there], room.at[pl.ds(0, tile.m)], step.full)

    def write(place: GroupTile, totals: Sequence[jax.Array], later: Sequence[StepTiles], *refs: Any) -> None:
        share, (*made_refs, pieces) = place.share(tile), refs[8:]
        for number, step in enumerate(later):
            at, buffers = number * CHUNK, [room.at[share.mine] for room in (step.left, step.right[0])]
            there = pl.ds(place.column * tile.n + at, CHUNK)
            plgpu.barrier_wait(step.full)
            one, other = (load(x, plgpu.Layout.WGMMA, interpret=interpret).astype(jnp.float32) for x in buffers)
            values = pulled(one, other, totals[0][:, at : at + CHUNK])
            made = list(zip((place.own(down.shape[0], x).astype(dtype) for x in values), made_refs, strict=True))

            @pl.when(share.is_whole)
            def _(buffers: Any = buffers, made: Any = made, there: Any = there) -> None:
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
        [dy],
        [down],
        sizes,
        more=[opened, raised],
        fill=fill,
        write=write,
        across=pl.cdiv(width, tile.n),
        steps=steps,
        later=tile.n // CHUNK,
        right=[(tile.n, tile.k)],
        transposed=True,
        tile=tile,
        out=[jax.ShapeDtypeStruct((rows, width), dtype)] * 2,
        scratch=[plgpu.SMEM((tile.m, CHUNK), dtype)],
        interpret=interpret,
        name="library_ragged_gated_back",
        **launched,
    )
    return one, other
