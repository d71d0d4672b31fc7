"""Softmax of wide rows: a block of one warpgroup keeps a row in shared memory, and a multiprocessor has several blocks.

While one block waits for its row, others compute and write theirs. No row is shared, so that nothing is joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..arguments import ArgumentError
from .launch import LANES, launch, load, loop, plgpu
from .shelf import LONGEST, Shelf, refuses, shelf

# Below every finite number, and a difference to it is a number.
_LOWEST = float(jnp.finfo(jnp.float32).min)
_LOG2_E = math.log2(math.e)
# Bytes that a thread has asked for before the first are used: with two blocks 96 KiB of a multiprocessor's.
_AHEAD_BYTES = 384


@dataclass(frozen=True)
class StagedRow:
    """A row in shared memory: its chunks, their places in the result, and elements that are in no chunk."""

    values: Callable[[Any], jax.Array]
    write: Callable[[Any, jax.Array], None]
    # Elements of the last chunk that no chunk before has.
    counted: jax.Array
    # The largest elements that each thread saw on the way, if it did.
    tops: jax.Array | None = None
    # Vectors at the ends of the row, which of their elements are in no chunk, and where each goes.
    edges: tuple[tuple[jax.Array, jax.Array, Callable[[jax.Array], None]], ...] = ()


def softmax_rows(x: jax.Array, *, num_warps: int | None, each: int | None, interpret: bool, name: str) -> jax.Array:
    """`exp(x - top) / norm` of every row."""
    width, itemsize = x.shape[-1], x.dtype.itemsize
    refused = refuses(width, itemsize, num_warps, each)
    if refused or each is None:
        raise ArgumentError(f"mosaic cannot compute this call: {refused}")
    lying, rows = shelf(width, itemsize, each), x.size // width
    flat = x.reshape((rows, lying.lines, lying.line) if lying.line else (-1,))
    whole = (lying.lines, lying.line) if lying.line else (lying.count * lying.size,)
    scratch = [plgpu.SMEM(whole, x.dtype)]
    scratch += [plgpu.Barrier(num_arrivals=lying.copies)] if lying.line else []
    shape = (lying.size // lying.line, lying.line) if lying.line else (lying.size,)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=lying.vec)

    def cast(values: jax.Array) -> jax.Array:
        return values if interpret else plgpu.layout_cast(values, layout)

    # Values of 16 bits are coarser than a fast exponential; of 32 bits they are not.
    def power(values: jax.Array, top: jax.Array) -> jax.Array:
        return jnp.exp2((values - top) * _LOG2_E) if itemsize == 2 else jnp.exp(values - top)

    def kernel(x_ref: Any, o_ref: Any, shared: Any, *barrier: Any) -> None:
        stage = by_lines if lying.line else by_loads
        row = stage(lying, x_ref, o_ref, shared, *barrier, layout=layout, interpret=interpret)

        def larger(number: Any, tops: jax.Array) -> jax.Array:
            return jnp.maximum(tops, row.values(number))

        tops = row.tops
        if tops is None:
            tops = loop(lying.count, larger, cast(jnp.full(shape, _LOWEST, jnp.float32)), interpret=interpret)
        top = jnp.max(tops)
        if row.edges:
            top = jnp.maximum(top, jnp.max(jnp.maximum(*(values for values, _, _ in row.edges))))

        def added(number: Any, norms: jax.Array) -> jax.Array:
            return norms + power(row.values(number), top)

        zeros = cast(jnp.zeros(shape, jnp.float32))
        norms = loop(lying.count - 1, added, zeros, interpret=interpret)
        last = jnp.where(row.counted, power(row.values(jnp.int32(lying.count - 1)), top), 0.0)
        norm = jnp.sum(norms + last)
        if row.edges:
            norm = norm + jnp.sum(sum(jnp.where(counted, power(values, top), 0.0) for values, counted, _ in row.edges))
        share = 1.0 / norm

        def written(number: Any, nothing: Any) -> Any:
            row.write(number, power(row.values(number), top) * share)
            return nothing

        loop(lying.count, written, None, interpret=interpret)
        # Elements that are in a chunk as well are written twice, and are the same.
        for values, _, write in row.edges:
            write(power(values, top) * share)

    (out,) = launch(
        kernel,
        [flat],
        out=[jax.ShapeDtypeStruct(flat.shape, flat.dtype)],
        grid={"row": rows},
        scratch=scratch,
        interpret=interpret,
        name=name,
        approx_math=itemsize == 2,
    )
    return out.reshape(x.shape)


def by_lines(
    lying: Shelf, x_ref: Any, o_ref: Any, shared: Any, barrier: Any, *, layout: Any, interpret: bool
) -> StagedRow:
    """The row by asynchronous copies, which are all under way at once."""
    at = jax.lax.axis_index("row")
    for first in range(0, lying.lines, LONGEST):
        part = pl.ds(first, min(LONGEST, lying.lines - first))
        plgpu.copy_gmem_to_smem(x_ref.at[at, part], shared.at[part], barrier)
    plgpu.barrier_wait(barrier)
    tall = lying.size // lying.line

    def place(number: Any) -> Any:
        return pl.ds(jnp.minimum(number * tall, lying.lines - tall), tall)

    def values(number: Any) -> jax.Array:
        return load(shared.at[place(number)], layout, interpret=interpret).astype(jnp.float32)

    def write(number: Any, made: jax.Array) -> None:
        o_ref[at, place(number)] = made.astype(o_ref.dtype)

    there = jax.lax.broadcasted_iota("int32", (tall, lying.line), 0)
    there = there if interpret else plgpu.layout_cast(there, layout)
    return StagedRow(values, write, there >= lying.count * tall - lying.lines)


def by_loads(lying: Shelf, x_ref: Any, o_ref: Any, shared: Any, *, layout: Any, interpret: bool) -> StagedRow:
    """The row by loads of the threads, the next ones asked for before the first are used."""
    first = jax.lax.axis_index("row") * lying.width
    # In whole loads, and a product last: so that the compiler knows that each is aligned.
    begin = jax.lax.div(first + (lying.vec - 1), jnp.int32(lying.vec))
    inside = jax.lax.div(first + lying.width, jnp.int32(lying.vec)) - begin
    loads = lying.size // lying.vec
    ahead = max(1, _AHEAD_BYTES // (lying.each * lying.itemsize))

    def place(number: Any) -> Any:
        return pl.ds((begin + jnp.minimum(number * loads, inside - loads)) * lying.vec, lying.size)

    def slot(number: Any) -> Any:
        return pl.ds(number * lying.size, lying.size)

    def read(number: Any) -> jax.Array:
        return load(x_ref.at[place(jnp.minimum(number, lying.count - 1))], layout, interpret=interpret)

    def step(number: Any, state: Any) -> Any:
        tops, here, *rest = state
        after = read(number + ahead)
        shared[slot(number)] = here
        return jnp.maximum(tops, here.astype(jnp.float32)), *rest, after

    tops = jnp.full(lying.size, _LOWEST, jnp.float32)
    there = jax.lax.broadcasted_iota("int32", (lying.size,), 0)
    if not interpret:
        tops, there = plgpu.layout_cast(tops, layout), plgpu.layout_cast(there, layout)
    ends, here = _ends(lying, x_ref, first, interpret=interpret)
    tops, *_ = loop(lying.count, step, (tops, *(read(jnp.int32(n)) for n in range(ahead))), interpret=interpret)

    def values(number: Any) -> jax.Array:
        return load(shared.at[slot(number)], layout, interpret=interpret).astype(jnp.float32)

    def write(number: Any, made: jax.Array) -> None:
        o_ref[place(number)] = made.astype(o_ref.dtype)

    def write_end(start: Any) -> Callable[[jax.Array], None]:
        def put(made: jax.Array) -> None:
            o_ref[pl.ds(start, LANES)] = made.astype(o_ref.dtype)

        return put

    before = begin * lying.vec - first
    after = LANES - (lying.width - before - inside * lying.vec)
    starts = (first, first + (lying.width - LANES))
    edges = tuple(
        (end, mask, write_end(start))
        for end, mask, start in zip(ends, (here < before, here >= after), starts, strict=True)
    )
    return StagedRow(values, write, there >= lying.count * lying.size - inside * lying.vec, tops, edges)


def _ends(lying: Shelf, x_ref: Any, first: Any, *, interpret: bool) -> tuple[list[jax.Array], jax.Array]:
    """The first and the last elements of a row, one for each thread, and the numbers of these."""
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
    starts = (first, first + (lying.width - LANES))
    ends = [load(x_ref.at[pl.ds(start, LANES)], layout, interpret=interpret).astype(jnp.float32) for start in starts]
    here = jax.lax.broadcasted_iota("int32", (LANES,), 0)
    return ends, here if interpret else plgpu.layout_cast(here, layout)
