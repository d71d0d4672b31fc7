"""Sum of two arrays and its norm, row by row: the warpgroups that hold a row write both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..arguments import ArgumentError
from .launch import launch
from .rows import Recipe, boards_of, row_of
from .spread import refuses, spread


def summed_rows(
    recipe: Recipe,
    x: jax.Array,
    residual: jax.Array,
    vectors: Sequence[jax.Array],
    *,
    num_warps: int,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """The operation on every row of the rounded sum, and that sum; a row is held in registers."""
    width = x.shape[-1]
    refused = refuses(width, x.dtype.itemsize, num_warps, None)
    if refused:
        raise ArgumentError(f"mosaic cannot compute this call: {refused}")
    flat = [x.reshape(-1, width), residual.reshape(-1, width)]
    lying = spread(width, x.dtype.itemsize, num_warps // 4, None)

    def kernel(x_ref: Any, residual_ref: Any, *refs: Any) -> None:
        vector_refs, rest = refs[: len(vectors)], refs[len(vectors) :]
        normed_ref, summed_ref, shared = rest[0], rest[1], rest[2:]
        at = jax.lax.axis_index("row")
        row = row_of(lying, shared, interpret=interpret)
        chunks = []
        for number in range(lying.count):
            one, other = (row.load(ref.at[at], number).astype(jnp.float32) for ref in (x_ref, residual_ref))
            summed = (one + other).astype(x.dtype)
            row.store(summed_ref.at[at], number, summed)
            chunks.append(summed.astype(jnp.float32))
        for number, values in enumerate(recipe.held(row, chunks)[0]):
            others = [row.load(ref, number).astype(jnp.float32) for ref in vector_refs]
            row.store(normed_ref.at[at], number, recipe.finish(values, *others))

    shape = jax.ShapeDtypeStruct(flat[0].shape, x.dtype)
    normed, summed = launch(
        kernel,
        [*flat, *vectors],
        out=[shape, shape],
        grid={"row": shape.shape[0]},
        scratch=boards_of(lying, interpret=interpret),
        groups={"group": lying.groups} if lying.groups > 1 else None,
        interpret=interpret,
        name=name,
    )
    return normed.reshape(x.shape), summed.reshape(x.shape)
