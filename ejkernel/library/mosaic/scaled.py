"""Products of float8 with scales for blocks of 128 along the depth, for Hopper GPUs: each block is added up in float32.

Tensor cores add up float8 with fewer bits than float32 has, so that a product of 128 is scaled and added by other
units, while the other warpgroup multiplies.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import launch, load, plgpu
from .matmul import lines, turned
from .scaled_tiles import DEPTH, Patch
from .tiles import band

# Rows of a product of tensor cores.
_HEIGHT = 64


def product(
    a: jax.Array, b: jax.Array, a_scales: jax.Array, b_scales: jax.Array, *, patch: Patch, dtype: Any, interpret: bool
) -> jax.Array:
    """`(a * a_scales) @ (b * b_scales)` for calls that `scaled_tiles` serves: scales of 1x128 and 128x128."""
    (m, depth), n = a.shape, b.shape[1]
    rows, columns, steps = -(-m // patch.m), n // patch.n, depth // DEPTH
    wide, share = band(columns), patch.m // patch.workers
    # Tensor cores read both factors of float8 along the depth; scales of a block of rows lie together.
    along, factors = b.T, jnp.pad(a_scales.T, ((0, 0), (0, rows * patch.m - m)))
    order = () if interpret else lines(a.dtype)

    def kernel(a_ref: Any, b_ref: Any, s_ref: Any, t_ref: Any, o_ref: Any, staged: Any) -> None:
        i = jax.lax.axis_index("row")
        j = jax.lax.axis_index("band") * wide + jax.lax.axis_index("column")
        group = jax.lax.axis_index("group")

        def compute(pipeline: Any) -> None:
            zeros = jnp.zeros((_HEIGHT, patch.n), jnp.float32)
            zeros = zeros if interpret else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            totals = pipeline((zeros,) * (share // _HEIGHT))
            for number, total in enumerate(totals):
                staged[group] = total.astype(dtype)
                plgpu.commit_smem()
                low = i * patch.m + group * share + number * _HEIGHT
                plgpu.copy_smem_to_gmem(staged.at[group], o_ref.at[pl.ds(low, _HEIGHT), pl.ds(j * patch.n, patch.n)])
                plgpu.wait_smem_to_gmem(0)

        def scale(at: Any, number: int) -> jax.Array:
            mine = pl.ds(i * patch.m + group * share + number * _HEIGHT, _HEIGHT)
            return load(s_ref.at[at, mine], plgpu.Layout.WGMMA.reduce(1), interpret=interpret, optimized=False)

        def step(indices: Any, left: Any, right: Any, totals: Any) -> Any:
            # Asked for before the products, so that they come meanwhile.
            places = [pl.ds(group * share + number * _HEIGHT, _HEIGHT) for number in range(len(totals))]
            scales = [scale(indices[0], number) for number in range(len(totals))]
            other = t_ref[indices[0], j]
            made = []
            for total, mine, down in zip(totals, places, scales, strict=True):

                def multiplied(part: Any, mine: Any = mine) -> Any:
                    plgpu.wgmma(part, left.at[mine], turned(right))
                    return part[...]

                part = pl.run_scoped(multiplied, plgpu.ACC((_HEIGHT, patch.n), jnp.float32))
                made.append(total + part * jax.lax.broadcast_in_dim(down * other, total.shape, (0,)))
            return tuple(made)

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps,),
            in_specs=[
                plgpu.BlockSpec((patch.m, DEPTH), lambda at: (i, at), transforms=order),
                plgpu.BlockSpec((patch.n, DEPTH), lambda at: (j, at), transforms=order),
            ],
            max_concurrent_steps=patch.stages,
            memory_registers=40,
            wg_axis="group",
            num_compute_wgs=patch.workers,
            memory_thread_idx=patch.workers,
            compute_context=compute,
        )(a_ref, b_ref)

    (out,) = launch(
        kernel,
        [a, along, factors, b_scales],
        out=[jax.ShapeDtypeStruct((m, n), dtype)],
        grid={"band": columns // wide, "row": rows, "column": wide},
        scratch=[plgpu.SMEM((patch.workers, _HEIGHT, patch.n), dtype, transforms=() if interpret else lines(dtype))],
        groups={"group": patch.workers + 1},
        interpret=interpret,
        name="library_scaled_matmul",
    )
    return out
