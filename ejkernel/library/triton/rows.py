"""Row by row: each program of the grid holds some whole rows and writes as many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...ops import Invocation
from ...ops.core.device import device_of
from .launch import inside, launch, load, power_of_two, store
from .served import missing

# A program keeps its block in registers: 64 KiB elements of float32 are all that a multiprocessor has.
_MOST_ELEMENTS = 1 << 16
# Elements for each thread: fewer leave it idle, more spill, and compile for long.
_LEAST_EACH, _MOST_EACH = 2, 128
# Blocks of rows that were timed are between these, and so many rows keep every multiprocessor busy.
_SHORTEST, _LONGEST, _MANY_ROWS = 1 << 9, 1 << 15, 1024


def by_rows(
    compute: Callable[..., jax.Array],
    x: jax.Array,
    vectors: Sequence[jax.Array],
    *,
    other: float,
    rows: int,
    num_warps: int,
    interpret: bool,
    name: str,
) -> jax.Array:
    """`compute(block, mask, *vectors)` in float32 for blocks of rows; the mask says which columns are real."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    count, block = flat.shape[0], power_of_two(width)
    ragged_columns, ragged_rows = block != width, count % rows != 0

    def kernel(x_ref: Any, *refs: Any) -> None:
        *vector_refs, o_ref = refs
        columns = inside(0, block, width, 1, (rows, block)) if ragged_columns else None
        mask = columns
        if ragged_rows:
            real = inside(pl.program_id(0), rows, count, 0, (rows, block))
            mask = real if mask is None else mask & real
        along = inside(0, block, width, 0, (block,)) if ragged_columns else None
        values = load(x_ref, mask, other).astype(jnp.float32)
        others = [load(ref, along).astype(jnp.float32)[None, :] for ref in vector_refs]
        store(o_ref, compute(values, columns, *others).astype(o_ref.dtype), mask)

    whole = pl.BlockSpec((rows, block), lambda i: (i, 0))
    out = launch(
        kernel,
        [flat, *vectors],
        out=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        grid=(pl.cdiv(count, rows),),
        in_specs=[whole, *(pl.BlockSpec((block,), lambda i: (0,)) for _ in vectors)],
        out_specs=whole,
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        name=name,
    )
    return out.reshape(x.shape)


def launches(width: int) -> Iterable[tuple[int, int]]:
    """Rows and warps that suit rows of this width."""
    block = power_of_two(width)
    return [
        (rows, warps)
        for rows in (1, 2, 4, 8, 16)
        for warps in (1, 2, 4, 8, 16)
        if not refuses(width, rows, warps) and _LEAST_EACH <= rows * block // (32 * warps) <= _MOST_EACH // 2
    ]


def warps_for(width: int, each: int = 16) -> int:
    """Warps for one row of this width, with so many elements a thread."""
    return min(max(power_of_two(width) // (32 * each), 1), 16)


def guess(inv: Invocation[Any, Any]) -> tuple[int, int] | None:
    """Rows and warps of a block that is fast untuned; None where it is not known to be.

    On an H200 one row with 32 elements a thread, 16 where there are few rows, took at most 1.13 times as long as the
    fastest of up to 25 launches; blocks of short rows were slower than what XLA makes.
    """
    x = inv.args[0]
    if not is_measured(inv) or not x.size or not _SHORTEST <= power_of_two(x.shape[-1]) <= _LONGEST:
        return None
    many = x.size // x.shape[-1] >= _MANY_ROWS
    return 1, warps_for(x.shape[-1], 32 if many else 16)


def is_measured(inv: Invocation[Any, Any]) -> bool:
    """Does a call run on the kind of device that these kernels were measured on? Elsewhere a guess must be safe."""
    return str(device_of(inv).device_kind).startswith("NVIDIA")


def refuses(width: int, rows: int | None, num_warps: int | None) -> str:
    """The reason why rows of this width cannot be computed so; empty where they can."""
    if missing():
        return missing()
    if rows is None or num_warps is None or rows < 1 or num_warps < 1:
        return "rows and num_warps must be given"
    if rows & (rows - 1) or num_warps & (num_warps - 1):
        return f"rows={rows} and num_warps={num_warps} must be powers of two"
    elements = rows * power_of_two(width)
    if elements > _MOST_ELEMENTS or elements // (32 * num_warps) > _MOST_EACH:
        return f"{rows} rows of {width} are too many for the registers of {num_warps} warps"
    return ""
