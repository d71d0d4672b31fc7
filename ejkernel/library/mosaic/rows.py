"""Row by row: the warpgroups of a block hold one row between them, or read it twice in chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..arguments import ArgumentError
from .launch import launch, load, loop, places, plgpu
from .spread import Spread, refuses, spread

Numbers = tuple[jax.Array, ...]
_TURN = {"sum": jnp.add, "max": jnp.maximum}


@dataclass(frozen=True)
class Row:
    """One row inside a kernel, as one of its warpgroups sees it."""

    spread: Spread
    group: Any
    layout: Any
    exchange: Callable[[Numbers], list[Numbers]]
    interpret: bool

    def start(self, number: Any) -> tuple[Any, Any]:
        """The begin of this warpgroup's chunk of a number, and how many of its first elements are another chunk's."""
        first = (self.group * self.spread.count + number) * self.spread.size
        begin = jnp.minimum(first, self.spread.width - self.spread.size)
        return begin, first - begin

    def counted(self, number: int) -> jax.Array | None:
        """Which elements of a chunk no chunk before it has; None: all."""
        if not self.spread.may_overlap(number):
            return None
        here = places(self.spread.size, self.layout, interpret=self.interpret)
        return jnp.greater_equal(here, self.start(number)[1])

    def load(self, ref: Any, number: Any) -> jax.Array:
        """A chunk of a row, as it is in memory."""
        begin, _ = self.start(number)
        return load(ref.at[pl.ds(begin, self.spread.size)], self.layout, interpret=self.interpret)

    def store(self, ref: Any, number: Any, values: jax.Array) -> None:
        """Writes a chunk; elements of two chunks are written twice, by one warpgroup, and are the same."""
        ref[pl.ds(self.start(number)[0], self.spread.size)] = values.astype(ref.dtype)

    def sums(self, *chunks: Sequence[jax.Array]) -> Numbers:
        """The sums of some quantities over the row, each given by its values for every chunk."""
        totals = []
        for values in chunks:
            kept = []
            for number, value in enumerate(values):
                mask = self.counted(number)
                kept.append(value if mask is None else jnp.where(mask, value, 0.0))
            totals.append(jnp.sum(functools.reduce(jnp.add, kept)))
        return self.joined(tuple(totals), ("sum",) * len(totals))

    def joined(self, mine: Numbers, how: Sequence[str]) -> Numbers:
        """Numbers of all warpgroups, added up or the largest of them."""
        if self.spread.groups == 1:
            return mine
        found = self.exchange(mine)
        return tuple(
            functools.reduce(_TURN[way], column) for way, column in zip(how, zip(*found, strict=True), strict=True)
        )


@dataclass(frozen=True)
class Recipe:
    """An operation on a row.

    `held(row, chunks)` finds the numbers of a row from all its chunks, in float32. `begin(size)`, `step(state, values,
    counted, seen)` and `end(row, state, seen)` find them chunk by chunk, where `seen` is how many elements each thread
    had before. `finish(numbers, values, *vectors)` makes a chunk of the result. `exchanged`: so many
    numbers a warpgroup tells the others, one exchange after the other.
    """

    held: Callable[..., Numbers]
    begin: Callable[[int], Numbers]
    step: Callable[..., Numbers]
    end: Callable[..., Numbers]
    finish: Callable[..., jax.Array]
    exchanged: Sequence[int]


def by_rows(
    recipe: Recipe,
    x: jax.Array,
    vectors: Sequence[jax.Array],
    *,
    num_warps: int,
    each: int | None,
    interpret: bool,
    name: str,
) -> jax.Array:
    """The operation on every row; `each` elements a thread at a time, or the whole row held where it is None."""
    width = x.shape[-1]
    refused = refuses(width, x.dtype.itemsize, num_warps, each)
    if refused:
        raise ArgumentError(f"mosaic cannot compute this call: {refused}")
    flat = x.reshape(-1, width)
    lying = spread(width, x.dtype.itemsize, num_warps // 4, each)
    layout = plgpu.Layout.WG_STRIDED((lying.size,), vec_size=lying.vec)

    def kernel(x_ref: Any, *refs: Any) -> None:
        vector_refs, rest = refs[: len(vectors)], refs[len(vectors) :]
        o_ref, shared = rest[0], rest[1:]
        group = jax.lax.axis_index("group") if lying.groups > 1 else 0
        at = jax.lax.axis_index("row")
        tell = told_by(shared, group, lying.groups)
        row = Row(lying, group, layout, functools.partial(tell, 0), interpret)
        mine, made = x_ref.at[at], o_ref.at[at]

        def finished(numbers: Numbers, number: Any, values: jax.Array) -> None:
            others = [row.load(ref, number).astype(jnp.float32) for ref in vector_refs]
            row.store(made, number, recipe.finish(numbers, values, *others))

        if each is None:
            chunks = [row.load(mine, number).astype(jnp.float32) for number in range(lying.count)]
            numbers = recipe.held(row, chunks)
            for number, values in enumerate(chunks):
                finished(numbers, number, values)
            return
        # Chunks that may reach over the row's end come last, and are masked.
        whole = lying.unmasked

        def look(number: Any, state: Numbers) -> Numbers:
            values = row.load(mine, number).astype(jnp.float32)
            return recipe.step(state, values, None, number.astype(jnp.float32))

        state = recipe.begin(lying.size)
        if not interpret:
            state = tuple(plgpu.layout_cast(one, layout) for one in state)
        if whole:
            state = loop(whole, look, state, interpret=interpret)
        seen: Any = jnp.float32(whole)
        for number in range(whole, lying.count):
            counted = row.counted(number)
            state = recipe.step(state, row.load(mine, number).astype(jnp.float32), counted, seen)
            seen = seen + (1.0 if counted is None else jnp.where(counted, 1.0, 0.0))
        numbers = recipe.end(row, state, seen)

        # Backwards: what was read last is the likeliest to be in a cache.
        def finish(number: Any, nothing: Any) -> Any:
            there = lying.count - 1 - number
            finished(numbers, there, row.load(mine, there).astype(jnp.float32))
            return nothing

        loop(lying.count, finish, None, interpret=interpret)

    (out,) = launch(
        kernel,
        [flat, *vectors],
        out=[jax.ShapeDtypeStruct(flat.shape, flat.dtype)],
        grid={"row": flat.shape[0]},
        scratch=told_scratch(recipe.exchanged, lying.groups),
        groups={"group": lying.groups} if lying.groups > 1 else None,
        interpret=interpret,
        name=name,
    )
    return out.reshape(x.shape)


def told_scratch(numbers: Sequence[int], groups: int) -> list[Any]:
    """Shared memory and barriers by which warpgroups tell each other as many numbers, exchange by exchange."""
    if groups == 1:
        return []
    boards = [plgpu.SMEM((2 * groups * count,), jnp.float32) for count in numbers]
    return [*boards, *(plgpu.Barrier(num_arrivals=groups) for _ in numbers)]


def told_by(shared: Sequence[Any], group: Any, groups: int) -> Callable[[Any, Numbers], list[Numbers]]:
    """Tells the other warpgroups some numbers and returns those of all; each call uses the next part of the scratch.

    Rows take turns, 0 and 1: a warpgroup that is one row ahead writes where the others no longer read.
    """
    half = len(shared) // 2
    pairs = iter(zip(shared[:half], shared[half:], strict=True))

    def tell(turn: Any, mine: Numbers) -> list[Numbers]:
        board, barrier = next(pairs)
        count = len(mine)
        for number, value in enumerate(mine):
            board[(turn * groups + group) * count + number] = value
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return [tuple(board[(turn * groups + one) * count + at] for at in range(count)) for one in range(groups)]

    return tell
