"""Sum of two arrays and its norm, row by row: both are written by the program that read both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import inside, launch_all, load, power_of_two, store


def summed_rows(
    compute: Callable[..., jax.Array],
    x: jax.Array,
    residual: jax.Array,
    vectors: Sequence[jax.Array],
    *,
    rows: int,
    num_warps: int,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """`compute(sum, mask, *vectors)` in float32 of the rounded sum, for blocks of rows; and that sum."""
    width = x.shape[-1]
    count, block = x.size // width, power_of_two(width)
    ragged_columns, ragged_rows = block != width, count % rows != 0

    def kernel(x_ref: Any, residual_ref: Any, *refs: Any) -> None:
        *vector_refs, normed_ref, summed_ref = refs
        columns = inside(0, block, width, 1, (rows, block)) if ragged_columns else None
        mask = columns
        if ragged_rows:
            real = inside(pl.program_id(0), rows, count, 0, (rows, block))
            mask = real if mask is None else mask & real
        along = inside(0, block, width, 0, (block,)) if ragged_columns else None
        both = [load(ref, mask).astype(jnp.float32) for ref in (x_ref, residual_ref)]
        summed = (both[0] + both[1]).astype(summed_ref.dtype)
        others = [load(ref, along).astype(jnp.float32)[None, :] for ref in vector_refs]
        store(summed_ref, summed, mask)
        store(normed_ref, compute(summed.astype(jnp.float32), columns, *others).astype(normed_ref.dtype), mask)

    whole = pl.BlockSpec((rows, block), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((count, width), x.dtype)
    normed, summed = launch_all(
        kernel,
        [x.reshape(count, width), residual.reshape(count, width), *vectors],
        out=[shape, shape],
        grid=(pl.cdiv(count, rows),),
        in_specs=[whole, whole, *(pl.BlockSpec((block,), lambda i: (0,)) for _ in vectors)],
        out_specs=[whole, whole],
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        name=name,
    )
    return normed.reshape(x.shape), summed.reshape(x.shape)
