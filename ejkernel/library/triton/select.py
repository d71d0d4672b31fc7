"""The largest of short rows: a program holds whole rows, and takes the largest one after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..order import ordered
from .launch import inside, launch, load, power_of_two, store
from .served import missing

# A row and its keys are in registers while the largest are taken.
_WIDEST, _MOST = 4096, 64


def largest_of_rows(x: jax.Array, k: int, *, rows: int, num_warps: int, interpret: bool) -> jax.Array:
    """Indices of the k largest of each row, in order; equal ones by their index."""
    count, width = x.shape
    if not jnp.issubdtype(x.dtype, jnp.floating):
        # Integers are made alike before.
        x = ordered(x).astype(jnp.int32)
    block, slots = power_of_two(width), power_of_two(k)
    info = jnp.iinfo(jnp.int32)
    ragged = count % rows != 0

    def kernel(x_ref: Any, o_ref: Any) -> None:
        shape = (rows, block)
        real = inside(0, block, width, 1, shape)
        mask = real & inside(pl.program_id(0), rows, count, 0, shape) if ragged else real
        # A zero of the array's own kind: one of another would make its integers floating-point numbers.
        values = load(x_ref, mask if block != width or ragged else None, x.dtype.type(0))
        keys = ordered(values).astype(jnp.int32)
        column = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        slot = jax.lax.broadcasted_iota(jnp.int32, (rows, slots), 1)

        def take(number: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            left, found = state
            # What is taken is a column of its own beyond the row, so that any key may be the least one.
            here = left < block
            most = jnp.max(jnp.where(here, keys, info.min), axis=1, keepdims=True)
            first = jnp.min(jnp.where(here & (keys == most), column, block), axis=1, keepdims=True)
            return jnp.where(column == first, block, left), jnp.where(slot == number, first, found)

        left = jnp.where(real, column, block)
        _, found = jax.lax.fori_loop(0, k, take, (left, jnp.zeros((rows, slots), jnp.int32)))
        inner = inside(pl.program_id(0), rows, count, 0, (rows, slots)) & (slot < k)
        store(o_ref, found, inner)

    return launch(
        kernel,
        [x],
        out=jax.ShapeDtypeStruct((count, k), jnp.int32),
        grid=(pl.cdiv(count, rows),),
        in_specs=[pl.BlockSpec((rows, block), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((rows, slots), lambda i: (i, 0)),
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        name="library_top_k",
    )


def refuses(width: int, k: int, rows: int | None, num_warps: int | None) -> str:
    """The reason that rows of this width cannot be taken so; empty where they can."""
    if missing():
        return missing()
    if not rows or not num_warps or rows & (rows - 1) or num_warps & (num_warps - 1):
        return f"rows={rows} and num_warps={num_warps} must be powers of two"
    if width > _WIDEST or k > _MOST:
        return f"{k} of {width} are too many to take one after the other"
    each = rows * power_of_two(width) // (32 * num_warps)
    return "" if 1 <= each <= 128 else f"{rows} rows of {width} do not suit the registers of {num_warps} warps"
