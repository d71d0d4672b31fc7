"""Norms of rows that stream through shared memory: blocks stay on their multiprocessors, and hold the vectors.

A block of one warpgroup takes a step of one wide row or several narrow ones at a time, while copies of the next steps
are under way: what a multiprocessor waits for is memory alone. Sums over a step's rows are found together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from . import bulk
from .launch import launch, load, plgpu
from .streams import Stream

# Chunks of one row, of several rows.
Chunks = list[jax.Array]


def layer_norm(
    x: jax.Array,
    vectors: Sequence[jax.Array],
    finished: Callable[[jax.Array, Iterable[jax.Array]], jax.Array],
    *,
    numbers: int,
    eps: float,
    stream: Stream,
    interpret: bool,
    name: str,
) -> Sequence[jax.Array]:
    """`finished(normed, vectors)` of every row, and so many of each row's mean and factor, (numbers, rows), if any."""
    width = x.shape[-1]
    count = x.size // width
    steps = x.reshape(count // stream.tall, stream.tall * width)

    def kernel(x_ref: Any, *refs: Any) -> None:
        vector_refs, rest = refs[: len(vectors)], refs[len(vectors) :]
        o_ref, number_refs, shared = rest[0], rest[1 : 1 + bool(numbers)], rest[1 + bool(numbers) :]
        going = Going(stream, width, [x_ref], shared, interpret)
        held = [[going.part(ref, at).astype(jnp.float32) for ref in vector_refs] for at in range(stream.chunks)]

        def step(number: Any, state: tuple[()]) -> tuple[()]:
            there, ((rows,), later) = going.place(number), going.taken(number)
            means = [total / width for total in going.sums(0, [added(row) for row in rows])]
            later()
            off = [[one - mean for one in row] for row, mean in zip(rows, means, strict=True)]
            squares = going.sums(1, [added([one * one for one in row]) for row in off])
            overs = [jax.lax.rsqrt(square / width + eps) for square in squares]
            for row, (some, over) in enumerate(zip(off, overs, strict=True)):
                for at, one in enumerate(some):
                    going.put(o_ref.at[there], row, at, finished(one * over, held[at]))
                for ref in number_refs:
                    for which, value in list(enumerate((means[row], over)))[:numbers]:
                        ref[which, there * stream.tall + row] = value
            return state

        going.through(step, ())

    out = [jax.ShapeDtypeStruct(steps.shape, x.dtype)]
    out += [jax.ShapeDtypeStruct((numbers, count), jnp.float32)] if numbers else []
    made, *kept = _launched(kernel, [steps, *vectors], out, stream, arrays=1, name=name, interpret=interpret)
    return made.reshape(x.shape), *kept


def gradients(
    x: jax.Array,
    dy: jax.Array,
    *,
    weight: jax.Array | None,
    bias: jax.Array | None,
    kept: jax.Array | None,
    eps: float,
    stream: Stream,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, ...]:
    """Gradients of layer_norm: of x, and then of each vector that is given; `kept` are each row's mean and factor."""
    width = x.shape[-1]
    count = x.size // width
    shape = (count // stream.tall, stream.tall * width)
    vectors = [vector for vector in (weight, bias) if vector is not None]
    scales, numbers = [] if weight is None else [weight], [] if kept is None else [kept]
    programs = stream.programs(count)

    def kernel(x_ref: Any, dy_ref: Any, *refs: Any) -> None:
        scale_refs, refs = refs[: len(scales)], refs[len(scales) :]
        number_refs, refs = refs[: len(numbers)], refs[len(numbers) :]
        dx_ref, sum_refs, shared = refs[0], refs[1 : 1 + len(vectors)], refs[1 + len(vectors) :]
        going = Going(stream, width, [x_ref, dy_ref], shared, interpret)
        held = [going.part(ref, at).astype(jnp.float32) for ref in scale_refs for at in range(stream.chunks)]

        def told(number: Any) -> list[list[jax.Array]]:
            first = going.place(number) * stream.tall
            rows = range(stream.tall)
            return [[ref[which, first + row] for which in range(2)] for ref in number_refs for row in rows]

        def step(number: Any, state: Any) -> Any:
            known, totals = state
            there, ((rows, pulled), later) = going.place(number), going.taken(number)
            # On its way while this step is computed.
            next_known = told(number + 1)
            if known:
                means, overs = [one[0] for one in known], [one[1] for one in known]
            else:
                means = [total / width for total in going.sums(1, [added(row) for row in rows])]
            off = [[one - mean for one in row] for row, mean in zip(rows, means, strict=True)]
            towards = [[one * held[at] for at, one in enumerate(row)] for row in pulled] if held else pulled
            wanted = [] if known else [[one * one for one in row] for row in off]
            wanted += [[a * b for a, b in zip(*pair, strict=True)] for pair in zip(towards, off, strict=True)]
            turn = jax.lax.rem(number, jnp.int32(2)) if known else 0
            found = list(going.sums(turn, [added(row) for row in [*wanted, *towards]]))
            later()
            if not known:
                overs = [jax.lax.rsqrt(found.pop(0) / width + eps) for _ in range(stream.tall)]
            moved = [list(total) for total in totals]
            for row in range(stream.tall):
                over = overs[row]
                along, level = found[row] / width * over, found[stream.tall + row] / width
                for at in range(stream.chunks):
                    normed = off[row][at] * over
                    going.put(dx_ref.at[there], row, at, over * (towards[row][at] - normed * along - level))
                    shares = [pulled[row][at] * normed] * bool(scales) + [pulled[row][at]] * (bias is not None)
                    for total, share in zip(moved, shares, strict=True):
                        total[at] = total[at] + share
            return next_known, moved

        zeros = jnp.zeros(stream.size, jnp.float32)
        zeros = zeros if interpret else plgpu.layout_cast(zeros, going.layout)
        _, totals = going.through(step, (told(jnp.int32(0)), [[zeros] * stream.chunks for _ in vectors]))
        for ref, total in zip(sum_refs, totals, strict=True):
            for at, one in enumerate(total):
                ref[going.program, pl.ds(at * stream.size, stream.size)] = one

    out = [jax.ShapeDtypeStruct(shape, x.dtype)]
    out += [jax.ShapeDtypeStruct((programs, width), jnp.float32) for _ in vectors]
    given = [x.reshape(shape), dy.reshape(shape), *scales, *numbers]
    dx, *partial = _launched(kernel, given, out, stream, arrays=2, name=f"{name}_gradient", interpret=interpret)
    sums = [jnp.sum(rows, axis=0) for rows in partial]
    return dx.reshape(x.shape), *(total.astype(vector.dtype) for total, vector in zip(sums, vectors, strict=True))


class Going:
    """A block that goes through steps of some arrays: `part`s of vectors, and steps of rows that were `taken`."""

    def __init__(self, stream: Stream, width: int, refs: Sequence[Any], shared: Sequence[Any], interpret: bool) -> None:
        self.stream, self.width, self.refs, self.interpret = stream, width, refs, interpret
        self.layout = plgpu.Layout.WG_STRIDED((stream.size,), vec_size=16 // refs[0].dtype.itemsize)
        self.program, self.programs = jax.lax.axis_index("program"), jax.lax.axis_size("program")
        self.whole = refs[0].shape[0]
        self.steps = jax.lax.div(self.whole - self.program + (self.programs - 1), jnp.int32(self.programs))
        if not interpret:
            *self.slots, self.barriers, self.boards = shared

    def place(self, number: Any) -> Any:
        """The step of all steps that is this block's of this number; after its last one some step."""
        return jnp.minimum(self.program + number * self.programs, self.whole - 1)

    def part(self, ref: Any, at: int) -> jax.Array:
        """A chunk of a vector, or of a row behind a reference."""
        return load(ref.at[pl.ds(at * self.stream.size, self.stream.size)], self.layout, interpret=self.interpret)

    def put(self, ref: Any, row: int, at: int, values: jax.Array) -> None:
        """Writes a chunk of a row of a step."""
        ref[pl.ds(row * self.width + at * self.stream.size, self.stream.size)] = values.astype(ref.dtype)

    def through(self, step: Callable[[Any, Any], Any], state: Any) -> Any:
        """Does a step for each number, in order; copies of the first steps begin before."""
        if not self.interpret:
            bulk.begin(self.barriers, self.stream.stages)
            for number in range(self.stream.stages):
                self._ask(jnp.int32(number), number)
        return jax.lax.fori_loop(jnp.int32(0), self.steps, step, state)

    def taken(self, number: Any) -> tuple[list[list[Chunks]], Callable[[], None]]:
        """The chunks of each array's rows in float32, and what begins the next copies, once all threads have met."""
        if self.interpret:
            there = self.place(number)
            return self._rows([ref.at[there] for ref in self.refs]), lambda: None
        slot = jax.lax.rem(number, jnp.int32(self.stream.stages))
        turn = jax.lax.div(number, jnp.int32(self.stream.stages))
        bulk.arrived(self.barriers.at[slot], jax.lax.rem(turn, jnp.int32(2)))
        rows = self._rows([held.at[slot] for held in self.slots])
        return rows, lambda: self._ask(number + self.stream.stages, slot)

    def sums(self, turn: Any, vectors: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The sum of each; all threads have met by then. Turns are 0 and 1, one after the other."""
        if self.interpret:
            return [jnp.sum(vector) for vector in vectors]
        return bulk.sums(self.boards.at[turn], vectors, layout=self.layout)

    def _ask(self, number: Any, slot: Any) -> None:
        @pl.when(number < self.steps)
        def _() -> None:
            there = self.place(number)
            pairs = [(ref.at[there], held.at[slot]) for ref, held in zip(self.refs, self.slots, strict=True)]
            bulk.bring(self.barriers.at[slot], pairs)

    def _rows(self, refs: Sequence[Any]) -> list[list[Chunks]]:
        chunks = range(self.stream.chunks)
        return [
            [
                [self.part(ref, row * self.stream.chunks + at).astype(jnp.float32) for at in chunks]
                for row in range(self.stream.tall)
            ]
            for ref in refs
        ]


def added(values: Sequence[jax.Array]) -> jax.Array:
    """The sum of the values, element by element."""
    total = values[0]
    for one in values[1:]:
        total = total + one
    return total


def _launched(
    kernel: Callable[..., None],
    given: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
    stream: Stream,
    *,
    arrays: int,
    name: str,
    interpret: bool,
) -> Sequence[jax.Array]:
    steps, length = given[0].shape
    slots = [plgpu.SMEM((stream.stages, length), given[0].dtype) for _ in range(arrays)]
    return launch(
        kernel,
        given,
        out=out,
        grid={"program": stream.programs(steps * stream.tall)},
        scratch=[] if interpret else [*slots, bulk.barriers(stream.stages), bulk.boards()],
        interpret=interpret,
        name=name,
        # Else all threads meet before and after each chunk that is written.
        unsafe_no_auto_barriers=True,
    )
