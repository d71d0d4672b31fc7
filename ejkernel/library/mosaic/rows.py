"""Row by row: the warpgroups of a block hold one row between them, or read it twice in chunks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..arguments import ArgumentError
from .launch import launch, load, loop, places, plgpu
from .meeting import meet, meeting
from .spread import Spread, refuses, spread

Numbers = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Row:
    """One row inside a kernel, as one of its warpgroups sees it."""

    spread: Spread
    group: Any
    layout: Any
    # Joins the vectors of all warpgroups, element by element, as the given function does with two.
    exchange: Callable[[Callable[..., jax.Array], jax.Array], jax.Array]
    interpret: bool

    def start(self, number: Any) -> tuple[Any, Any]:
        """The begin of this warpgroup's chunk of a number, and how many of its first elements are another chunk's."""
        # Counted in loads, and a product last: else the compiler sees no alignment, and loads one element at a time.
        vec = self.spread.vec
        first = (self.group * self.spread.count + number) * (self.spread.size // vec)
        begin = jnp.minimum(first, (self.spread.width - self.spread.size) // vec)
        return begin * vec, (first - begin) * vec

    def counted(self, number: int) -> jax.Array | None:
        """A mask of the elements of a chunk that no chunk before it has; None: all."""
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
        return tuple(self.total(self.joined(values)) for values in chunks)

    def joined(self, values: Sequence[jax.Array]) -> jax.Array:
        """The sum of chunks, element by element; what two chunks have is counted once."""
        kept = []
        for number, value in enumerate(values):
            mask = self.counted(number)
            kept.append(value if mask is None else jnp.where(mask, value, 0.0))
        return functools.reduce(jnp.add, kept)

    def total(self, values: jax.Array) -> jax.Array:
        """The sum over all elements of all warpgroups' vectors."""
        return jnp.sum(self.exchange(jnp.add, values))

    def largest(self, values: jax.Array) -> jax.Array:
        """The largest element of all warpgroups' vectors."""
        return jnp.max(self.exchange(jnp.maximum, values))


@dataclass(frozen=True)
class Recipe:
    """An operation on a row.

    `held(row, chunks)` makes every chunk of the result from all chunks, in float32, and the numbers of the row.
    `begin(size)`, `step(state, values, counted, seen)` and `end(row, state, seen)` find these numbers chunk by chunk,
    where `seen` is how many elements each thread had before, and `made(numbers, values)` makes a chunk of the result
    from them. `finish(values, *vectors)` does what is left with the chunk's part of each vector.
    """

    held: Callable[..., tuple[Sequence[jax.Array], Numbers]]
    begin: Callable[[int], Numbers]
    step: Callable[..., Numbers]
    end: Callable[..., Numbers]
    made: Callable[..., jax.Array]
    finish: Callable[..., jax.Array]


def by_rows(
    recipe: Recipe,
    x: jax.Array,
    vectors: Sequence[jax.Array],
    *,
    num_warps: int,
    each: int | None,
    interpret: bool,
    name: str,
    fast: bool = False,
) -> jax.Array:
    """The operation on every row; `each` elements a thread at a time, or the whole row held where it is None.

    `fast`: exponentials may be off by 1e-6 of themselves, which 16 bits do not show.
    """
    how: dict[str, Any] = {"num_warps": num_warps, "each": each, "interpret": interpret, "name": name, "fast": fast}
    return with_numbers(recipe, x, vectors, numbers=0, **how)[0]


def with_numbers(
    recipe: Recipe,
    x: jax.Array,
    vectors: Sequence[jax.Array],
    *,
    numbers: int,
    num_warps: int,
    each: int | None,
    interpret: bool,
    name: str,
    fast: bool = False,
) -> Sequence[jax.Array]:
    """The result of `by_rows`, and so many of each row's numbers, (numbers, rows), if any."""
    width = x.shape[-1]
    refused = refuses(width, x.dtype.itemsize, num_warps, each)
    if refused:
        raise ArgumentError(f"mosaic cannot compute this call: {refused}")
    flat = x.reshape(-1, width)
    lying = spread(width, x.dtype.itemsize, num_warps // 4, each)

    def kernel(x_ref: Any, *refs: Any) -> None:
        vector_refs, rest = refs[: len(vectors)], refs[len(vectors) :]
        o_ref, number_refs, shared = rest[0], rest[1 : 1 + bool(numbers)], rest[1 + bool(numbers) :]
        at = jax.lax.axis_index("row")
        row = row_of(lying, shared, interpret=interpret)
        mine, made = x_ref.at[at], o_ref.at[at]

        def tell(found: Numbers) -> None:
            for ref in number_refs:
                put(row, [ref.at[number] for number in range(numbers)], at, found[:numbers])

        def finished(number: Any, values: jax.Array) -> None:
            others = [row.load(ref, number).astype(jnp.float32) for ref in vector_refs]
            row.store(made, number, recipe.finish(values, *others))

        if each is None:
            chunks = [row.load(mine, number).astype(jnp.float32) for number in range(lying.count)]
            values_made, found = recipe.held(row, chunks)
            for number, values in enumerate(values_made):
                finished(number, values)
            tell(found)
            return
        # Chunks that may reach over the row's end come last, and are masked.
        whole = lying.unmasked

        def next_chunk(number: Any, state: Numbers) -> Numbers:
            values = row.load(mine, number).astype(jnp.float32)
            return recipe.step(state, values, None, number.astype(jnp.float32))

        state = recipe.begin(lying.size)
        if not interpret:
            state = tuple(plgpu.layout_cast(one, row.layout) for one in state)
        if whole:
            state = loop(whole, next_chunk, state, interpret=interpret)
        seen: Any = jnp.float32(whole)
        for number in range(whole, lying.count):
            counted = row.counted(number)
            state = recipe.step(state, row.load(mine, number).astype(jnp.float32), counted, seen)
            seen = seen + (1.0 if counted is None else jnp.where(counted, 1.0, 0.0))
        found = recipe.end(row, state, seen)
        tell(found)

        # Backwards: what was read last is the likeliest to be in a cache.
        def finish(number: Any, nothing: Any) -> Any:
            there = lying.count - 1 - number
            finished(there, recipe.made(found, row.load(mine, there).astype(jnp.float32)))
            return nothing

        loop(lying.count, finish, None, interpret=interpret)

    kept = [jax.ShapeDtypeStruct((numbers, flat.shape[0]), jnp.float32)] if numbers else []
    out, *told = launch(
        kernel,
        [flat, *vectors],
        out=[jax.ShapeDtypeStruct(flat.shape, flat.dtype), *kept],
        grid={"row": flat.shape[0]},
        scratch=boards_of(lying, interpret=interpret),
        groups={"group": lying.groups} if lying.groups > 1 else None,
        interpret=interpret,
        name=name,
        approx_math=fast,
    )
    return out.reshape(x.shape), *told


def put(row: Row, refs: Sequence[Any], at: Any, values: Sequence[jax.Array]) -> None:
    """Writes a row's numbers, which all its warpgroups know, by one of them."""

    def write() -> None:
        for ref, value in zip(refs, values, strict=True):
            ref[at] = value

    if row.spread.groups == 1:
        write()
    else:
        pl.when(row.group == 0)(write)


def boards_of(lying: Spread, *, interpret: bool) -> list[Any]:
    """Shared memory in which warpgroups show each other vectors, and what they meet by: two of each, in turns."""
    if lying.groups == 1:
        return []
    boards = [plgpu.SMEM((lying.groups, lying.size), jnp.float32) for _ in range(2)]
    return [*boards, *(one for _ in boards for one in meeting(lying.groups, interpret=interpret))]


def row_of(lying: Spread, shared: Sequence[Any], *, interpret: bool) -> Row:
    """The row of this block, with what `boards_of` gave it.

    A warpgroup reduces a vector to a number by way of shared memory, and all warpgroups of a block have the same place
    there: two that reduce different vectors at once get wrong numbers. So they show each other their vectors, and
    each reduces what is joined of all, which is the same everywhere. Before the next one is reduced, all have met. A
    block that goes through several rows has an even number of exchanges for each: a board is written again only after
    all have met at the other one.
    """
    layout = plgpu.Layout.WG_STRIDED((lying.size,), vec_size=lying.vec)
    group = jax.lax.axis_index("group") if lying.groups > 1 else 0
    turns = itertools.cycle(itertools.zip_longest(shared[:2], shared[2:])) if shared else None

    def exchange(join: Callable[..., jax.Array], mine: jax.Array) -> jax.Array:
        if turns is None:
            return mine
        board, barrier = next(turns)
        board[group] = mine
        meet(barrier)
        shown = [load(board.at[one], layout, interpret=interpret) for one in range(lying.groups)]
        return functools.reduce(join, shown)

    return Row(lying, group, layout, exchange, interpret)
