"""Softmax of wide rows: a block of one warpgroup keeps a row in shared memory, and a multiprocessor has several blocks.

While one block waits for its row, others compute and write theirs. No row is shared, so that nothing is joined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..arguments import ArgumentError
from .launch import launch, loop, plgpu
from .shelf import refuses, shelf
from .staging import LOWEST, Part, StagedRow, by_lines, by_loads

# Chunks that are asked for in advance where they are read again.
_AGAIN = 3


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
            lowest = cast(jnp.full(shape, LOWEST, jnp.float32))
            tops = loop(row.count, larger, lowest, interpret=interpret)
        top = jnp.max(functools.reduce(jnp.maximum, [tops, *(part.values() for part in row.rest)]))
        if row.ends:
            top = jnp.maximum(top, jnp.max(functools.reduce(jnp.maximum, [part.values() for part in row.ends])))

        def added(number: Any, norms: jax.Array) -> jax.Array:
            return norms + power(row.values(number), top)

        zeros = cast(jnp.zeros(shape, jnp.float32))
        norms = zeros if row.norms is None else row.norms * power(tops, top)
        norms = loop(row.count, added, norms, interpret=interpret)
        norm = jnp.sum(norms + counted(row.rest))
        if row.ends:
            norm = norm + jnp.sum(counted(row.ends))
        share = 1.0 / norm

        def written(number: Any, nothing: Any) -> Any:
            row.write(number, power(row.values(number), top) * share)
            return nothing

        loop(row.count, written, None, interpret=interpret)
        if row.again and row.read is not None:
            _written_again(row, row.read, lambda values: power(values, top) * share, interpret=interpret)
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


def _written_again(
    row: StagedRow, read: Callable[[Any], jax.Array], made: Callable[[jax.Array], jax.Array], *, interpret: bool
) -> None:
    """Reads chunks once more and writes their results: backwards, since the last ones are the likeliest in a cache."""
    end = row.again.stop - 1

    def there(number: Any) -> Any:
        return jnp.maximum(end - number, row.again.start)

    def step(number: Any, state: Any) -> Any:
        here, *others = state
        after = read(there(number + _AGAIN))
        row.write(there(number), made(here.astype(jnp.float32)))
        return *others, after

    state = tuple(read(there(jnp.int32(number))) for number in range(_AGAIN))
    loop(len(row.again), step, state, interpret=interpret)
