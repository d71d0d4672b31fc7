"""A gated pair of grouped products that gathers its rows: the copying warpgroup brings each row from where it lies.

It has not run on a GPU; reached by benchmarks/moe_gpu.py alone. Rows of experts are rows of tokens, each of them k
times. A pass that puts them in order reads each once and writes it k times, because the tensor memory accelerator reads
boxes of neighbouring rows. Here no row is written in between: the threads of the copying warpgroup start copies of 16
bytes, 8 threads to a row of a step's tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from ..arguments import ArgumentError
from ..gate import joined
from . import bulk, together
from .handover import Columns, by_group
from .launch import LANES, loop, places, plgpu
from .matmul import lines
from .ragged_dot import holding
from .ragged_rolling import GroupTile, grouped, matrix
from .rolling import OwnCopies, StepTiles
from .tiles import CHUNK, LINE_BYTES, LINE_ROWS, Tile, buffers

# Untyped, as Pallas is.
mosaic: Any = gpu
# Bytes of one copy, and threads that bring a row of a tile.
_COPY_BYTES = 16
_ACROSS = LINE_BYTES // _COPY_BYTES
# Rows of a tile that the warpgroup brings at once.
_AT_ONCE = LANES // _ACROSS


@dataclass(frozen=True)
class GatheredTile(GroupTile):
    """A tile, and where the rows of each copying thread lie: the chunks of 16 bytes before them."""

    offsets: Sequence[jax.Array]


def gated(
    x: jax.Array,
    source: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    sizes: jax.Array,
    *,
    tile: Tile,
    interpret: bool,
    **launched: Any,
) -> jax.Array:
    """`silu(x[source] @ gate) * (x[source] @ up)` of each row with its group's matrices.

    `source` has the row of `x` for each row in order of groups; numbers beyond the last one are those of the last. A
    tile has as many columns of either matrix, side by side, so that each warpgroup holds both sums of its elements.
    """
    (tokens, depth), (rows,), dtype = x.shape, source.shape, x.dtype
    if tile.k * dtype.itemsize != LINE_BYTES or depth % tile.k or rows < tile.m:
        raise ArgumentError(f"rows of {depth} are not gathered for {rows} rows in tiles of {tile.m} by {tile.k}")
    tile, half, width = holding(tile, dtype, dtype), tile.n // 2, gate.shape[2]

    # References: four numbers of a tile, `source`, `gate`, `up`, `x`, the result, and what shared memory holds: the
    # barriers of the left tiles come last.
    def barrier(refs: Sequence[Any], step: StepTiles) -> Any:
        return refs[-1].at[jax.lax.rem(step.number, jnp.int32(tile.stages))]

    def begin(*refs: Any) -> None:
        bulk.begin(refs[-1], tile.stages, arrivals=LANES)

    def prepare(place: GroupTile, *refs: Any) -> GatheredTile:
        across = depth * dtype.itemsize // _COPY_BYTES
        offsets = _found(refs[4], place.start, turns=tile.m // _AT_ONCE, tokens=tokens, across=across)
        return GatheredTile(place.owner, place.start, place.first, place.last, place.column, offsets)

    def arrived(step: StepTiles, *refs: Any) -> None:
        turn = jax.lax.rem(jax.lax.div(step.number, jnp.int32(tile.stages)), jnp.int32(2))
        bulk.arrived(barrier(refs, step), turn)
        _show_tensor_cores()

    def fill(place: GroupTile, at: Any, step: StepTiles, *refs: Any) -> None:
        inner, columns = pl.ds(at * tile.k, tile.k), pl.ds(place.column * half, half)
        for ref, there in zip(refs[5:7], step.right, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[matrix(place, gate), inner, columns], there, step.full)
        if isinstance(place, GatheredTile):
            _bring(refs[7].at[:, inner], place.offsets, step.left, barrier(refs, step))
        else:
            _copy_rows(refs[4], refs[7], place.start, inner, step, tile=tile)

    def write(place: GroupTile, totals: Sequence[jax.Array], later: Sequence[StepTiles], *refs: Any) -> None:
        o_ref, staged, pieces = refs[8:11]

        def made(at: int) -> jax.Array:
            parts = (total[:, at : at + CHUNK] for total in totals)
            return place.own(gate.shape[0], joined(*parts)).astype(dtype)

        there = Columns(place.column * half, half, width)
        by_group(place.share(tile), made, o_ref, there, staged, pieces, written=False)

    held = buffers(tile, dtype.itemsize, half)
    (out,) = grouped(
        [source],
        [gate, up],
        sizes,
        # The last operand has the dtype of a step's tiles.
        more=[x],
        fill=fill,
        write=write,
        across=pl.cdiv(width, half),
        steps=depth // tile.k,
        right=[(tile.k, half)] * 2,
        transposed=False,
        tile=tile,
        own=None if interpret else OwnCopies(begin, prepare, arrived),
        out=[jax.ShapeDtypeStruct((rows, width), dtype)],
        scratch=[
            plgpu.SMEM((held, tile.m, CHUNK), dtype, transforms=lines(dtype)),
            plgpu.SMEM((tile.m, CHUNK), dtype),
            *([] if interpret else [bulk.barriers(tile.stages)]),
        ],
        interpret=interpret,
        name="library_ragged_gathered",
        **launched,
    )
    return out


def rows_of(threads: Any, turn: int) -> Any:
    """The rows of a step's tile that the copying threads bring at a turn: one for 8 neighbours."""
    return threads // _ACROSS + turn * _AT_ONCE


def chunks_of(threads: Any) -> Any:
    """The chunk of 16 bytes of a line that each thread copies."""
    return threads % _ACROSS


def shared_places(threads: Any) -> Any:
    """Bytes from the begin of a step's tile to where each thread copies at its first turn.

    A row is a line of 128 bytes. Tensor cores read lines in eights, and in each the chunks are swizzled by the row's
    number among these. Rows of a thread are a multiple of eight apart: its turns differ by whole lines.
    """
    row = rows_of(threads, 0)
    return row * LINE_BYTES + (chunks_of(threads) ^ (row % LINE_ROWS)) * _COPY_BYTES


def _found(source_ref: Any, start: Any, *, turns: int, tokens: int, across: int) -> Sequence[jax.Array]:
    """The number of chunks of `x` before each thread's rows of a tile, its own chunk of a line counted in.

    `across`: chunks of a token.
    """
    threads = places(LANES, _by_thread(), interpret=False)
    rows = [jnp.minimum(start + rows_of(threads, turn), source_ref.shape[0] - 1) for turn in range(turns)]
    number = plgpu.ShapeDtypeStruct((LANES,), jnp.int32, layout=_by_thread())

    def instructions(_: Any, memory: Any, *arrays: Any) -> list[Any]:
        whole, base = ir.IntegerType.get_signless(32), mosaic.utils.memref_ptr(memory)

        def read(array: Any) -> Any:
            place = mosaic.utils.getelementptr(base, [together.own(array)], whole)
            register = llvm.load(ir.VectorType.get((1,), whole), place)
            registers = np.array([register], dtype=object)
            return mosaic.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=True)

        return [read(array) for array in arrays]

    kinds = (plgpu.RefType(), *[_by_thread()] * turns)
    made = plgpu.inline_mgpu(arg_types=kinds, return_type=[number] * turns)(instructions)(source_ref, *rows)
    return [jnp.clip(token, 0, tokens - 1) * across + chunks_of(threads) for token in made]


def _bring(columns_ref: Any, offsets: Sequence[jax.Array], left: Any, barrier: Any) -> None:
    """Starts copies of each thread's rows, which all arrive at the barrier as they end."""
    there = shared_places(places(LANES, _by_thread(), interpret=False))

    def instructions(_: Any, memory: Any, tile: Any, flag: Any, there: Any, *offsets: Any) -> None:
        code = "{ .reg .b32 t; .reg .b64 p; add.u32 t, $1, $3; "
        for turn in range(len(offsets)):
            code += f"mad.wide.u32 p, ${4 + turn}, {_COPY_BYTES}, $0; "
            code += f"cp.async.cg.shared.global [t + {turn * _AT_ONCE * LINE_BYTES}], [p], {_COPY_BYTES}; "
        code += "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$2]; }"
        memories = bulk.in_memory(memory), bulk.in_shared(tile), bulk.in_shared(flag)
        bulk.asm(code, *memories, *(together.own(array) for array in (there, *offsets)))

    refs = plgpu.RefType(), plgpu.RefType(lines(left.dtype)), plgpu.RefType()
    kinds = (*refs, *[_by_thread()] * (1 + len(offsets)))
    plgpu.inline_mgpu(arg_types=kinds)(instructions)(columns_ref, left, barrier, there, *offsets)


def _show_tensor_cores() -> None:
    """Makes what has arrived visible to tensor cores.

    The copies are generic writes, as a thread's own stores are, and tensor cores read through the async proxy. A
    barrier does not order accesses of two proxies. The copies are still under way while the copying threads run on,
    so these cannot fence: each reader does, after it has waited.
    """

    def instructions(_: Any) -> None:
        bulk.asm("fence.proxy.async.shared::cta;")

    plgpu.inline_mgpu()(instructions)()


def _by_thread() -> Any:
    """Registers of a number for each thread."""
    return plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)


def _copy_rows(source_ref: Any, x_ref: Any, start: Any, inner: Any, step: StepTiles, *, tile: Tile) -> None:
    """Copies the rows one by one, for the interpreter; the warpgroup arrives for the left tile."""

    def one(at: Any, nothing: Any) -> Any:
        token = source_ref[jnp.minimum(start + at, source_ref.shape[0] - 1)]
        step.left[at] = x_ref[jnp.clip(token, 0, x_ref.shape[0] - 1), inner]
        return nothing

    loop(tile.m, one, (), interpret=True)
    plgpu.commit_smem()
    plgpu.barrier_arrive(step.full)
