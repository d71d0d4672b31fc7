"""Products with weights of 8 or 4 bits, which are made wide in registers: memory is read in few bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import launch_all, power_of_two
from .served import missing


def widened(
    x: jax.Array,
    weight: jax.Array,
    scales: jax.Array,
    *,
    block_n: int,
    block_k: int,
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> jax.Array:
    """`x @ (weight * scales)` in tiles of all rows; scales (n,) or (groups, n)."""
    (count, depth), width = x.shape, weight.shape[1]
    rows = max(16, power_of_two(count))
    halves = 2 if weight.dtype.name == "int4" else 1
    # Two numbers of four bits are read as one byte, the first in its lower half.
    packed = weight
    if halves == 2:
        packed = jax.lax.bitcast_convert_type(weight.reshape(depth, width // 2, 2), jnp.int8)
    factors = scales.astype(jnp.float32).reshape(-1, width // halves, halves)
    sides = [factors[:, :, half] for half in range(halves)]
    groups = factors.shape[0]
    steps, block = depth // block_k, block_n // halves
    each = depth // groups // block_k

    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        scale_refs, out_refs = refs[:halves], refs[halves:]

        def step(number: Any, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            here = pl.ds(number * block_k, block_k)
            near, far = x_ref[:, here], w_ref[here, :]
            parts = [far] if halves == 1 else [(far << 4) >> 4, far >> 4]
            made = []
            for total, part, ref in zip(totals, parts, scale_refs, strict=True):
                product = jnp.dot(near, part.astype(near.dtype), preferred_element_type=jnp.float32)
                made.append(total + (product if groups == 1 else product * ref[number // each, :][None, :]))
            return tuple(made)

        zeros = tuple(jnp.zeros((rows, block), jnp.float32) for _ in range(halves))
        totals = jax.lax.fori_loop(0, steps, step, zeros)
        for total, ref, o_ref in zip(totals, scale_refs, out_refs, strict=True):
            o_ref[...] = (total * ref[0, :][None, :] if groups == 1 else total).astype(o_ref.dtype)

    padded = jnp.pad(x, ((0, rows - count), (0, 0))) if rows != count else x
    made = launch_all(
        kernel,
        [padded, packed, *sides],
        out=[jax.ShapeDtypeStruct((rows, width // halves), x.dtype)] * halves,
        grid=(width // block_n,),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda j: (0, 0)),
            pl.BlockSpec((depth, block), lambda j: (0, j)),
            *(pl.BlockSpec((groups, block), lambda j: (0, j)) for _ in sides),
        ],
        out_specs=[pl.BlockSpec((rows, block), lambda j: (0, j))] * halves,
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
        name="library_quantized_matmul",
    )
    whole = made[0] if halves == 1 else jnp.stack(made, axis=-1).reshape(rows, width)
    return whole[:count]


def refuses(x: Any, weight: Any, scales: Any, block_n: int | None, block_k: int | None, stages: int | None) -> str:
    """The reason that a call cannot be computed so; empty where it can."""
    if missing():
        return missing()
    if not block_n or not block_k or not stages:
        return "block_n, block_k, num_warps and num_stages must be given"
    if x.dtype.name not in ("bfloat16", "float16") or x.shape[0] > 128:
        return f"it takes up to 128 rows of bfloat16 or float16, not {x.shape[0]} of {x.dtype.name}"
    depth, width = weight.shape
    group = depth // scales.shape[0] if scales.ndim == 2 else depth
    if width % block_n or group % block_k:
        return f"blocks of {block_k}x{block_n} do not divide {width} columns and groups of {group}"
    held = (max(16, power_of_two(x.shape[0])) * 2 + block_n) * block_k * stages
    return "" if held <= 227 * 1024 else f"its stages need {held // 1024} KiB of shared memory, over 227"
