"""Softmax of wide rows: a block of one warpgroup keeps a row in shared memory, and a multiprocessor has several blocks.

While one block waits for its row, others compute and write theirs. No row is shared, so that nothing is joined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class Part:
    """Some elements of a row: their values, those that no part before has (None: all), and what writes a result."""

    values: Callable[[], jax.Array]
    counted: jax.Array | None
    write: Callable[[jax.Array], None]


@dataclass(frozen=True)
class StagedRow:
    """A row: its first chunks, by their number, then chunks that are masked or in registers, and both ends."""

    count: int
    values: Callable[[Any], jax.Array]
    write: Callable[[Any, jax.Array], None]
    rest: tuple[Part, ...]
    # Vectors of one element a thread, where the row does not begin or end with a chunk.
    ends: tuple[Part, ...] = ()
    # The largest elements that each thread saw on the way, if it did.
    tops: jax.Array | None = None


def softmax_rows(x: jax.Array, *, num_warps: int | None, each: int | None, interpret: bool, name: str) -> jax.Array:
    """`exp(x - top) / norm` of every row."""
    width, itemsize = x.shape[-1], x.dtype.itemsize
    refused = refuses(width, itemsize, num_warps, each)
    if refused or each is None:
        raise ArgumentError(f"mosaic cannot compute this call: {refused}")
    lying, rows = shelf(width, itemsize, each), x.size // width
    flat = x.reshape((rows, lying.lines, lying.line) if lying.line else (-1,))
    whole = (lying.lines, lying.line) if lying.line else (lying.kept * lying.size,)
    scratch = [plgpu.SMEM(whole, x.dtype)]
    scratch += [plgpu.Barrier(num_arrivals=lying.copies)] if lying.line else []
    shape = (lying.size // lying.line, lying.line) if lying.line else (lying.size,)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=lying.vec)

    def cast(values: jax.Array) -> jax.Array:
        return values if interpret else plgpu.layout_cast(values, layout)

    def power(values: jax.Array, top: jax.Array) -> jax.Array:
        return jnp.exp(values - top)

    def kernel(x_ref: Any, o_ref: Any, shared: Any, *barrier: Any) -> None:
        stage = by_lines if lying.line else by_loads
        row = stage(lying, x_ref, o_ref, shared, *barrier, layout=layout, interpret=interpret)

        def larger(number: Any, tops: jax.Array) -> jax.Array:
            return jnp.maximum(tops, row.values(number))

        def power_of(part: Part) -> jax.Array:
            return power(part.values(), top)

        def counted(parts: Sequence[Part]) -> jax.Array:
            masked = (p if m is None else jnp.where(m, p, 0.0) for p, m in ((power_of(p), p.counted) for p in parts))
            return functools.reduce(jnp.add, masked)

        tops = row.tops
        if tops is None:
            lowest = cast(jnp.full(shape, _LOWEST, jnp.float32))
            tops = loop(row.count, larger, lowest, interpret=interpret)
        top = jnp.max(functools.reduce(jnp.maximum, [tops, *(part.values() for part in row.rest)]))
        if row.ends:
            top = jnp.maximum(top, jnp.max(functools.reduce(jnp.maximum, [part.values() for part in row.ends])))

        def added(number: Any, norms: jax.Array) -> jax.Array:
            return norms + power(row.values(number), top)

        norms = loop(row.count, added, cast(jnp.zeros(shape, jnp.float32)), interpret=interpret)
        norm = jnp.sum(norms + counted(row.rest))
        if row.ends:
            norm = norm + jnp.sum(counted(row.ends))
        share = 1.0 / norm

        def written(number: Any, nothing: Any) -> Any:
            row.write(number, power(row.values(number), top) * share)
            return nothing

        loop(row.count, written, None, interpret=interpret)
        # Elements that are in another part as well are written twice, and are the same.
        for part in (*row.rest, *row.ends):
            part.write(power_of(part) * share)

    (out,) = launch(
        kernel,
        [flat],
        out=[jax.ShapeDtypeStruct(flat.shape, flat.dtype)],
        grid={"row": rows},
        scratch=scratch,
        interpret=interpret,
        name=name,
        # Values of 16 bits are coarser than a fast exponential; of 32 bits they are not.
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
    last = jnp.int32(lying.count - 1)
    fresh = there >= lying.count * tall - lying.lines
    return StagedRow(
        lying.count - 1, values, write, (Part(lambda: values(last), fresh, lambda made: write(last, made)),)
    )


def by_loads(lying: Shelf, x_ref: Any, o_ref: Any, shared: Any, *, layout: Any, interpret: bool) -> StagedRow:
    """The row by loads of the threads, the next ones asked for before the first are used."""
    first = jax.lax.axis_index("row") * lying.width
    # In whole loads, and a product last: so that the compiler knows that each is aligned.
    begin = jax.lax.div(first + (lying.vec - 1), jnp.int32(lying.vec))
    inside = jax.lax.div(first + lying.width, jnp.int32(lying.vec)) - begin
    loads = lying.size // lying.vec

    def place(number: Any) -> Any:
        return pl.ds((begin + jnp.minimum(number * loads, inside - loads)) * lying.vec, lying.size)

    def slot(number: Any) -> Any:
        return pl.ds(number * lying.size, lying.size)

    def read(number: Any) -> jax.Array:
        return load(x_ref.at[place(jnp.minimum(number, lying.count - 1))], layout, interpret=interpret)

    def values(number: Any) -> jax.Array:
        return load(shared.at[slot(number)], layout, interpret=interpret).astype(jnp.float32)

    def write(number: Any, made: jax.Array) -> None:
        o_ref[place(number)] = made.astype(o_ref.dtype)

    def step(number: Any, state: Any) -> Any:
        tops, here, *others = state
        after = read(number + lying.ahead)
        shared[slot(number)] = here
        return jnp.maximum(tops, here.astype(jnp.float32)), *others, after

    ends = _ends(lying, x_ref, o_ref, first, begin * lying.vec - first, inside * lying.vec, interpret=interpret)
    tops = jnp.full(lying.size, _LOWEST, jnp.float32)
    there = jax.lax.broadcasted_iota("int32", (lying.size,), 0)
    if not interpret:
        tops, there = plgpu.layout_cast(tops, layout), plgpu.layout_cast(there, layout)
    state = (tops, *(read(jnp.int32(number)) for number in range(lying.ahead)))
    # The chunks that were asked for last, and for which there is no room, stay where they are.
    tops, *held = loop(lying.kept, step, state, interpret=interpret)
    rest = []
    for number in range(min(lying.kept, lying.count - 1), lying.count):
        fresh = there >= lying.count * lying.size - inside * lying.vec if number == lying.count - 1 else None
        rest.append(Part(_values_of(number, held, values, lying.kept), fresh, _writer_of(number, write)))
    return StagedRow(min(lying.kept, lying.count - 1), values, write, tuple(rest), ends, tops)


def _values_of(number: int, held: Sequence[jax.Array], values: Any, kept: int) -> Callable[[], jax.Array]:
    if number < kept:
        return lambda: values(jnp.int32(number))
    return lambda: held[number - kept].astype(jnp.float32)


def _writer_of(number: int, write: Callable[[Any, jax.Array], None]) -> Callable[[jax.Array], None]:
    return lambda made: write(jnp.int32(number), made)


def _ends(
    lying: Shelf, x_ref: Any, o_ref: Any, first: Any, before: Any, inside: Any, *, interpret: bool
) -> tuple[Part, Part]:
    """The first and the last elements of a row, one for each thread: `before` of them, and those after the chunks."""
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
    here = jax.lax.broadcasted_iota("int32", (LANES,), 0)
    here = here if interpret else plgpu.layout_cast(here, layout)

    def part(start: Any, fresh: jax.Array) -> Part:
        place = pl.ds(start, LANES)
        values = load(x_ref.at[place], layout, interpret=interpret).astype(jnp.float32)

        def write(made: jax.Array) -> None:
            o_ref[place] = made.astype(o_ref.dtype)

        return Part(lambda: values, fresh, write)

    after = LANES - (lying.width - before - inside)
    return part(first, here < before), part(first + (lying.width - LANES), here >= after)
