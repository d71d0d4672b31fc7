"""A matrix product for Hopper GPUs: two warpgroups multiply, a third copies, bias and activation before the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import launch, load, plgpu
from .tiles import LINE_BYTES, WORKERS, Tile, band


def tiled(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    *,
    finish: Callable[[jax.Array], jax.Array],
    dtype: Any,
    tile: Tile,
    interpret: bool,
) -> jax.Array:
    """`finish(a @ b + bias)` for matrices of sizes that `tiles` serves."""
    (m, depth), n = a.shape, b.shape[1]
    rows, columns = pl.cdiv(m, tile.m), pl.cdiv(n, tile.n)
    wide = band(columns)
    if bias is not None:
        # Its last part is read whole.
        bias = jnp.pad(bias, (0, columns * tile.n - n))

    def kernel(a_ref: Any, b_ref: Any, *refs: Any) -> None:
        *bias_refs, o_ref, staged = refs
        i = jax.lax.axis_index("row")
        j = jax.lax.axis_index("band") * wide + jax.lax.axis_index("column")

        def write(total: jax.Array, group: Any) -> None:
            if bias_refs:
                along = load_columns(bias_refs[0].at[pl.ds(j * tile.n, tile.n)], interpret=interpret)
                total = total + jax.lax.broadcast_in_dim(along.astype(jnp.float32), total.shape, (1,))
            mine = pl.ds(group * tile.share, tile.share)
            staged[mine] = finish(total).astype(dtype)
            plgpu.commit_smem()
            there = o_ref.at[pl.ds(i * tile.m + group * tile.share, tile.share), pl.ds(j * tile.n, tile.n)]
            plgpu.copy_smem_to_gmem(staged.at[mine], there)
            plgpu.wait_smem_to_gmem(0)

        multiply(a_ref, b_ref, lambda step: (i, step), lambda step: (step, j), write, tile=tile, steps=depth // tile.k)

    (out,) = launch(
        kernel,
        [a, b] if bias is None else [a, b, bias],
        out=[jax.ShapeDtypeStruct((m, n), dtype)],
        grid={"band": columns // wide, "row": rows, "column": wide},
        scratch=[plgpu.SMEM((tile.m, tile.n), dtype, transforms=lines(dtype))],
        groups={"group": WORKERS + 1},
        interpret=interpret,
        name="library_matmul",
    )
    return out


def multiply(
    a_ref: Any,
    b_ref: Any,
    a_place: Callable[..., Any],
    b_place: Callable[..., Any],
    write: Callable[[jax.Array, Any], None],
    *,
    tile: Tile,
    steps: Any,
    transposed: bool = False,
) -> None:
    """Adds up a tile of the product over so many steps, and hands each warpgroup's share to `write`.

    The last warpgroup copies the steps' tiles to shared memory, a few ahead; `transposed`: those of b are turned.
    """
    group = jax.lax.axis_index("group")

    def compute(pipeline: Callable[[Any], Any]) -> None:
        def added_up(total: Any) -> Any:
            pipeline(total)
            return total[...]

        write(pl.run_scoped(added_up, plgpu.ACC((tile.share, tile.n), jnp.float32)), group)

    def step(_: Any, a_part: Any, b_part: Any, total: Any) -> Any:
        right = turned(b_part) if transposed else b_part
        plgpu.wgmma(total, a_part.at[pl.ds(group * tile.share, tile.share)], right)
        # One product is still running while the next tiles are asked for: theirs are released a step later.
        plgpu.wgmma_wait(1)
        return total

    shapes = ((tile.m, tile.k), (tile.n, tile.k) if transposed else (tile.k, tile.n))
    specs = [
        plgpu.BlockSpec(shape, place, transforms=lines(ref.dtype), delay_release=1)
        for shape, place, ref in zip(shapes, (a_place, b_place), (a_ref, b_ref), strict=True)
    ]
    plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(steps,),
        in_specs=specs,
        max_concurrent_steps=tile.stages,
        # The copying warpgroup needs few, and leaves its others to those that hold sums.
        memory_registers=40,
        wg_axis="group",
        num_compute_wgs=WORKERS,
        memory_thread_idx=WORKERS,
        compute_context=compute,
    )(a_ref, b_ref)


def lines(dtype: Any) -> tuple[Any, ...]:
    """The order of elements in shared memory that tensor cores read: lines of 128 bytes, swizzled."""
    if jax.__version_info__ < (0, 10, 2):
        # It finds the order by itself, and takes none.
        return ()
    each = LINE_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, each)), plgpu.SwizzleTransform(LINE_BYTES)


def turned(ref: Any) -> Any:
    """A matrix in shared memory, transposed without moving it."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def load_columns(ref: Any, *, interpret: bool) -> jax.Array:
    """A vector with a number for each column of a product, as its registers lie."""
    return load(ref, plgpu.Layout.WGMMA.reduce(0), interpret=interpret, optimized=False)
