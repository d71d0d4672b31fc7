"""A matrix product in tiles, with bias and activation before the result is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import inside, launch, load, store
from .served import missing

# What a multiprocessor of a Hopper GPU gives one program: 227 KiB.
_SHARED_BYTES = 227 * 1024
# The smallest tile that tensor cores take.
_LEAST_TILE = 16


def tiled(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    *,
    finish: Callable[[jax.Array], jax.Array],
    dtype: Any,
    block_m: int,
    block_n: int,
    block_k: int,
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> jax.Array:
    """`finish(a @ b + bias)` for matrices; every size may be ragged."""
    (m, k), n = a.shape, b.shape[1]
    steps = pl.cdiv(k, block_k)
    ragged_m, ragged_n, ragged_k = m % block_m != 0, n % block_n != 0, k % block_k != 0

    def kernel(a_ref: Any, b_ref: Any, *refs: Any) -> None:
        *bias_refs, o_ref = refs
        i, j = pl.program_id(0), pl.program_id(1)

        def part(ref: Any, step: Any, axis: int) -> jax.Array:
            """One step's tile of a factor with this axis as its inner dimension."""
            shape = (block_m, block_k) if axis == 1 else (block_k, block_n)
            outer, size, limit, ragged = (i, block_m, m, ragged_m) if axis == 1 else (j, block_n, n, ragged_n)
            masks = []
            if ragged:
                masks.append(inside(outer, size, limit, 1 - axis, shape))
            if ragged_k:
                masks.append(inside(step, block_k, k, axis, shape))
            window = pl.ds(step * block_k, block_k)
            place = ref.at[:, window] if axis == 1 else ref.at[window, :]
            return load(place, masks[0] & masks[-1] if masks else None)

        def step(index: Any, total: jax.Array) -> jax.Array:
            return total + jnp.dot(part(a_ref, index, 1), part(b_ref, index, 0), preferred_element_type=jnp.float32)

        total = jax.lax.fori_loop(0, steps, step, jnp.zeros((block_m, block_n), jnp.float32))
        if bias_refs:
            along = inside(j, block_n, n, 0, (block_n,)) if ragged_n else None
            total = total + load(bias_refs[0], along).astype(jnp.float32)[None, :]
        shape = (block_m, block_n)
        rows = inside(i, block_m, m, 0, shape) if ragged_m else None
        columns = inside(j, block_n, n, 1, shape) if ragged_n else None
        mask = columns if rows is None else rows if columns is None else rows & columns
        store(o_ref, finish(total).astype(o_ref.dtype), mask)

    # The inner dimension is held whole by the block, and read step by step.
    inner = steps * block_k
    return launch(
        kernel,
        [a, b] if bias is None else [a, b, bias],
        out=jax.ShapeDtypeStruct((m, n), dtype),
        grid=(pl.cdiv(m, block_m), pl.cdiv(n, block_n)),
        in_specs=[
            pl.BlockSpec((block_m, inner), lambda i, j: (i, 0)),
            pl.BlockSpec((inner, block_n), lambda i, j: (0, j)),
            *([] if bias is None else [pl.BlockSpec((block_n,), lambda i, j: (j,))]),
        ],
        out_specs=pl.BlockSpec((block_m, block_n), lambda i, j: (i, j)),
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
        name="library_matmul",
    )


def refuses(blocks: tuple[int | None, int | None, int | None], num_stages: int | None, itemsize: int) -> str:
    """The reason why tiles of these sizes cannot run; empty where they can."""
    m, n, k = blocks
    if missing():
        return missing()
    if m is None or n is None or k is None or num_stages is None:
        return "block_m, block_n, block_k, num_warps and num_stages must be given"
    if any(size < _LEAST_TILE or size & (size - 1) for size in (m, n, k)):
        return f"blocks of {m}x{n}x{k} must be powers of two, and at least {_LEAST_TILE}"
    needed = (m + n) * k * itemsize * num_stages
    if needed > _SHARED_BYTES:
        return f"{num_stages} stages of {m}x{n}x{k} take {needed} bytes of shared memory, over {_SHARED_BYTES}"
    return ""
