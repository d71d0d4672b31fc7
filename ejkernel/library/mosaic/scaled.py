"""Products of float8 with scales, for Hopper GPUs: each block of the depth is added up in float32.

Tensor cores add up float8 with fewer bits than float32 has, so that a product of 128 or 256 is added to the others by
other units, while the other warpgroup multiplies. Scales that change along the depth multiply each such product; those
that do not multiply the result, once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..quantize import block_from, spread_scales
from .launch import launch, load, plgpu
from .matmul import lines, load_columns, turned
from .scaled_tiles import Patch, change
from .tiles import band

# Rows of a product of tensor cores.
_HEIGHT = 64


def product(
    a: jax.Array, b: jax.Array, a_scales: jax.Array, b_scales: jax.Array, *, patch: Patch, dtype: Any, interpret: bool
) -> jax.Array:
    """`(a * a_scales) @ (b * b_scales)` for calls that `scaled_tiles` serves."""
    (m, depth), n = a.shape, b.shape[1]
    rows, columns, steps = -(-m // patch.m), n // patch.n, depth // patch.k
    wide, share = band(columns), patch.m // patch.workers
    by_step = change(a_scales, b_scales)
    s, t = _of_a(a_scales, a, rows * patch.m), _of_b(b_scales, b)
    # Tensor cores read both factors of float8 along the depth.
    along = b.T
    order = () if interpret else lines(a.dtype)

    def kernel(a_ref: Any, b_ref: Any, s_ref: Any, t_ref: Any, o_ref: Any, staged: Any) -> None:
        i = jax.lax.axis_index("row")
        j = jax.lax.axis_index("band") * wide + jax.lax.axis_index("column")
        group = jax.lax.axis_index("group")

        def of_rows(number: int, *at: Any) -> jax.Array:
            mine = pl.ds(i * patch.m + group * share + number * _HEIGHT, _HEIGHT)
            return load(s_ref.at[*at, mine], plgpu.Layout.WGMMA.reduce(1), interpret=interpret, optimized=False)

        def scaled(total: Any, number: int) -> Any:
            if not by_step[0]:
                down = s_ref[0] if s.size == 1 else jax.lax.broadcast_in_dim(of_rows(number), total.shape, (0,))
                total = total * down
            if by_step[1]:
                return total
            if t.size == 1:
                return total * t_ref[0]
            across = load_columns(t_ref.at[pl.ds(j * patch.n, patch.n)], interpret=interpret)
            return total * jax.lax.broadcast_in_dim(across, total.shape, (1,))

        def compute(pipeline: Any) -> None:
            zeros = jnp.zeros((_HEIGHT, patch.n), jnp.float32)
            zeros = zeros if interpret else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            totals, _ = pipeline(((zeros,) * (share // _HEIGHT), scales_of(0)))
            for number, total in enumerate(totals):
                staged[group] = scaled(total, number).astype(dtype)
                plgpu.commit_smem()
                low = i * patch.m + group * share + number * _HEIGHT
                plgpu.copy_smem_to_gmem(staged.at[group], o_ref.at[pl.ds(low, _HEIGHT), pl.ds(j * patch.n, patch.n)])
                plgpu.wait_smem_to_gmem(0)

        def scales_of(at: Any) -> tuple[tuple[Any, ...], Any]:
            """The scales of a step, of each 64 rows and of the columns, where they change along the depth."""
            downs = tuple(of_rows(number, at) for number in range(share // _HEIGHT)) if by_step[0] else ()
            return downs, t_ref[at, j] if by_step[1] else ()

        def step(indices: Any, left: Any, right: Any, state: Any) -> Any:
            totals, (downs, other) = state
            # Before the next ones are asked for, which then take these ones' registers.
            factors = [down * other if by_step[1] else down for down in downs]
            # A step ahead: from memory they take longer to come than the products of a step.
            following = scales_of(jnp.minimum(indices[0] + 1, steps - 1))
            places = [pl.ds(group * share + number * _HEIGHT, _HEIGHT) for number in range(len(totals))]
            made = []
            for number, (total, mine) in enumerate(zip(totals, places, strict=True)):

                def multiplied(part: Any, mine: Any = mine) -> Any:
                    plgpu.wgmma(part, left.at[mine], turned(right))
                    return part[...]

                part = pl.run_scoped(multiplied, plgpu.ACC((_HEIGHT, patch.n), jnp.float32))
                if factors:
                    part = part * jax.lax.broadcast_in_dim(factors[number], total.shape, (0,))
                elif by_step[1]:
                    part = part * other
                made.append(total + part)
            return tuple(made), following

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps,),
            in_specs=[
                plgpu.BlockSpec((patch.m, patch.k), lambda at: (i, at), transforms=order),
                plgpu.BlockSpec((patch.n, patch.k), lambda at: (j, at), transforms=order),
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
        [a, along, s, t],
        out=[jax.ShapeDtypeStruct((m, n), dtype)],
        grid={"band": columns // wide, "row": rows, "column": wide},
        scratch=[plgpu.SMEM((patch.workers, _HEIGHT, patch.n), dtype, transforms=() if interpret else lines(dtype))],
        groups={"group": patch.workers + 1},
        interpret=interpret,
        name="library_scaled_matmul",
    )
    return out


def _of_a(scales: jax.Array, a: jax.Array, rows: int) -> jax.Array:
    """Scales of a block of rows lie together: one for each step and row, or one for each row, or one."""
    if scales.size == 1:
        return scales.reshape(1)
    below = (0, rows - a.shape[0])
    if scales.shape[1] > 1:
        return jnp.pad(scales.T, ((0, 0), below))
    return jnp.pad(spread_scales(scales, a.shape, block_from(scales, a)).reshape(-1), below)


def _of_b(scales: jax.Array, b: jax.Array) -> jax.Array:
    """One for each step and block of columns, or one for each column, or one."""
    if scales.size == 1:
        return scales.reshape(1)
    return scales if scales.shape[0] > 1 else spread_scales(scales, b.shape, block_from(scales, b)).reshape(-1)
