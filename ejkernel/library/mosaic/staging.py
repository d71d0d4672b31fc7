"""The way of a row to shared memory: by asynchronous copies, or by the threads' own loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import LANES, load, loop, plgpu
from .recipes import running_norm
from .shelf import LONGEST, Shelf

# Below every finite number, and a difference to it is a number.
LOWEST = float(jnp.finfo(jnp.float32).min)


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
    # The largest elements that each thread saw on the way, if it did, and its norms of chunks that are read again.
    tops: jax.Array | None = None
    norms: jax.Array | None = None
    # Chunks that are read again, and how.
    again: range = range(0)
    read: Callable[[Any], jax.Array] | None = None


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
    tops = jnp.full(lying.size, LOWEST, jnp.float32)
    there = jax.lax.broadcasted_iota("int32", (lying.size,), 0)
    if not interpret:
        tops, there = plgpu.layout_cast(tops, layout), plgpu.layout_cast(there, layout)
    state = (tops, *(read(jnp.int32(number)) for number in range(lying.ahead)))
    # The chunks that were asked for last, and for which there is no room, stay where they are.
    tops, *held = loop(lying.kept, step, state, interpret=interpret)
    norms, again = None, range(lying.kept, lying.kept + lying.again)

    def seen(number: Any, state: Any) -> Any:
        running, here, *others = state
        after = read(number + again.start + lying.ahead)
        return running_norm(running, here.astype(jnp.float32), None, None), *others, after

    if again:
        zeros = jnp.zeros(lying.size, jnp.float32)
        zeros = zeros if interpret else plgpu.layout_cast(zeros, layout)
        (tops, norms), *held = loop(len(again), seen, ((tops, zeros), *held), interpret=interpret)
    rest = []
    for number in range(min(again.stop, lying.count - 1), lying.count):
        fresh = there >= lying.count * lying.size - inside * lying.vec if number == lying.count - 1 else None
        rest.append(Part(_values_of(number, held, values, again.stop), fresh, _writer_of(number, write)))
    first_chunks = min(lying.kept, lying.count - 1)
    return StagedRow(first_chunks, values, write, tuple(rest), ends, tops, norms, again, read)


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
