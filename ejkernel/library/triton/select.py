"""The largest of short rows: a program holds whole rows, and takes the largest one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..order import numbers_of, ordered
from .launch import inside, launch_all, load, power_of_two, store
from .served import missing

# A row and its keys are in registers while the largest are taken.
_WIDEST, _MOST = 4096, 64


def largest_of_rows(x: jax.Array, k: int, *, rows: int, num_warps: int, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row, in order, and their indices; equal ones by their index."""
    count, width = x.shape
    kind = x.dtype
    if not jnp.issubdtype(kind, jnp.floating):
        # Integers are made alike before.
        x = ordered(x).astype(jnp.int32)
    block, slots = power_of_two(width), power_of_two(k)
    info = jnp.iinfo(jnp.int32)
    ragged = count % rows != 0

    def kernel(x_ref: Any, values_ref: Any, o_ref: Any) -> None:
        shape = (rows, block)
        real = inside(0, block, width, 1, shape)
        mask = real & inside(pl.program_id(0), rows, count, 0, shape) if ragged else real
        # A zero of the array's own kind: one of another would make its integers floating-point numbers.
        values = load(x_ref, mask if block != width or ragged else None, x.dtype.type(0))
        keys = ordered(values).astype(jnp.int32)
        column = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        slot = jax.lax.broadcasted_iota(jnp.int32, (rows, slots), 1)

        def take(number: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            keys, left, most_of, found = state
            most = jnp.max(keys, axis=1, keepdims=True)
            # What is taken has the least key and a column beyond the row: so any key may be the least one.
            first = jnp.min(jnp.where(keys == most, left, block), axis=1, keepdims=True)
            taken = column == first
            keys, left = jnp.where(taken, info.min, keys), jnp.where(taken, block, left)
            return keys, left, jnp.where(slot == number, most, most_of), jnp.where(slot == number, first, found)

        start = (keys if block == width else jnp.where(real, keys, info.min), jnp.where(real, column, block))
        none = jnp.zeros((rows, slots), jnp.int32)
        _, _, most_of, found = jax.lax.fori_loop(0, k, take, (*start, none, none))
        keep((values_ref, o_ref), most_of, found, slot, x, k)

    sizes = (rows, block, slots)
    return launched(kernel, x, kind, k, sizes=sizes, num_warps=num_warps, interpret=interpret)


def keep(refs: tuple[Any, Any], most_of: jax.Array, found: jax.Array, slot: jax.Array, x: jax.Array, k: int) -> None:
    """Writes the keys of a block, as the numbers that they stand for, and their columns; `slot` numbers the places."""
    values_ref, o_ref = refs
    inner = inside(pl.program_id(0), slot.shape[0], x.shape[0], 0, slot.shape) & (slot < k)
    store(values_ref, numbers_of(most_of.astype(f"int{8 * x.dtype.itemsize}"), x.dtype), inner)
    store(o_ref, found, inner)


def launched(
    kernel: Callable[..., None],
    x: jax.Array,
    kind: Any,
    k: int,
    *,
    sizes: tuple[int, int, int],
    num_warps: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Values of this kind and indices by a kernel over blocks: rows, elements of a row, and places for the largest."""
    rows, block, slots = sizes
    values, indices = launch_all(
        kernel,
        [x],
        out=[jax.ShapeDtypeStruct((x.shape[0], k), dtype) for dtype in (x.dtype, jnp.int32)],
        grid=(pl.cdiv(x.shape[0], rows),),
        in_specs=[pl.BlockSpec((rows, block), lambda i: (i, 0))],
        out_specs=[pl.BlockSpec((rows, slots), lambda i: (i, 0))] * 2,
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        name="library_top_k",
    )
    if kind != x.dtype:
        values = numbers_of(values.astype(f"int{8 * kind.itemsize}"), kind)
    return values, indices


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
