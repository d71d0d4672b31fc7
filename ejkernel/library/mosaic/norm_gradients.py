"""Gradients of norms in one pass: each block goes through some rows of x and dy, and adds up the vectors' gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import together
from .launch import launch, plgpu
from .norm_rows import course_of, line_of, portions
from .rows import boards_of, row_of
from .spread import spread


def norm_gradients(
    x: jax.Array,
    dy: jax.Array,
    *,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    added: jax.Array | None = None,
    kept: jax.Array | None = None,
    centred: bool,
    eps: float,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, ...]:
    """Gradients of x and then of each vector that is given; `centred` rows had their mean taken off.

    `added` is another gradient of x, which comes on top. `kept` are the mean and the factor of each row, (2, rows), if
    the forward pass kept them: two sums of a row are left then, and nothing is summed before them.
    """
    width = x.shape[-1]
    flat, pulled = x.reshape(-1, width), dy.reshape(-1, width)
    count = flat.shape[0]
    scales = [] if weight is None else [weight]
    others = [] if added is None else [added.reshape(-1, width)]
    # The next row takes half as many registers where it is narrow.
    wide = (3 + len(others)) // 2 if x.dtype.itemsize == 4 else 0
    course = course_of(width, x.dtype.itemsize, centred=centred, added=added is not None, kept=kept is not None)
    groups, programs = portions(count, width, (bias is not None) + len(others) + wide, course.each)
    lying = spread(width, x.dtype.itemsize, groups, None)
    vectors = [vector for vector in (weight, bias) if vector is not None]
    numbers = [] if kept is None else [kept]
    chunks = range(lying.count)
    line = line_of(width, x.dtype.itemsize)
    # The same arrays once more, as a copy takes them: the interpreter has nothing that is asked for in advance.
    views = [rows.reshape(count, -1, line) for rows in (flat, pulled, *others)] if line and not interpret else []

    # The interpreter has each sum by itself.
    at_once = course.together and not interpret

    def kernel(x_ref: Any, dy_ref: Any, *refs: Any) -> None:
        other_refs, refs = refs[: len(others)], refs[len(others) :]
        scale_refs, refs = refs[: len(scales)], refs[len(scales) :]
        number_refs, refs = refs[: len(numbers)], refs[len(numbers) :]
        view_refs, refs = refs[: len(views)], refs[len(views) :]
        dx_ref, sum_refs, shared = refs[0], refs[1 : 1 + len(vectors)], refs[1 + len(vectors) :]
        program = jax.lax.axis_index("program")
        row = row_of(lying, () if at_once else shared, interpret=interpret)

        def totals_of(turn: Any, *quantities: list[jax.Array]) -> tuple[jax.Array, ...]:
            if not at_once:
                return row.sums(*quantities)
            vectors = [row.joined(values) for values in quantities]
            return together.sums(shared[0].at[turn], vectors, layout=row.layout, groups=groups)

        held = [row.load(ref, at).astype(jnp.float32) for ref in scale_refs for at in chunks]

        # The row after the last one is never used, only read.
        def place(number: Any) -> Any:
            return jnp.minimum(program + number * programs, count - 1)

        def ask(number: Any) -> None:
            for ref in view_refs:
                plgpu.async_prefetch(ref.at[place(number)])

        def read(number: Any) -> tuple[list[jax.Array], list[list[jax.Array]]]:
            there = place(number)
            told = [ref[number, there] for ref in number_refs for number in range(2)]
            return told, [[row.load(ref.at[there], at) for at in chunks] for ref in (x_ref, dy_ref, *other_refs)]

        def step(number: Any, state: Any) -> Any:
            (told, here), sums = state
            # On the way to the GPU's cache: registers have room for one row more alone, and loads come late in a step.
            ask(number + course.ahead)
            # Asked for before this row is computed, so that it is there when its turn comes.
            after = read(number + 1)
            off, given, *more = ([one.astype(jnp.float32) for one in part] for part in here)
            towards = [one * scale for one, scale in zip(given, held, strict=True)] if held else given
            if told:
                off = [one - told[0] for one in off]
            elif centred:
                (total,) = totals_of(1, off)
                off = [one - total / width for one in off]
            squares = [] if told else [[one * one for one in off]]
            products = [one * other for one, other in zip(towards, off, strict=True)]
            # With a mean that is summed four exchanges, else two: an even number, as `row_of` asks for.
            turn = 0 if centred and not told else jax.lax.rem(number, jnp.int32(2))
            totals = list(totals_of(turn, *squares, products, *([towards] if centred else [])))
            over = told[1] if told else jax.lax.rsqrt(totals.pop(0) / width + eps)
            along = totals[0] / width * over
            level = totals[1] / width if centred else None
            shares: list[list[jax.Array]] = [[] for _ in vectors]
            for at in chunks:
                normed = off[at] * over
                back = towards[at] - normed * along
                back = back if level is None else back - level
                back = over * back
                row.store(dx_ref.at[program + number * programs], at, back + more[0][at] if more else back)
                of_chunk = ([] if weight is None else [given[at] * normed]) + ([] if bias is None else [given[at]])
                for share, value in zip(shares, of_chunk, strict=True):
                    share.append(value)
            moved = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(sums, shares, strict=True)]
            return after, moved

        zeros = jnp.zeros(lying.size, jnp.float32)
        zeros = zeros if interpret else plgpu.layout_cast(zeros, row.layout)
        steps = jax.lax.div(count - program + (programs - 1), jnp.int32(programs))
        for number in range(1, course.ahead):
            ask(jnp.int32(number))
        state = (read(jnp.int32(0)), [[zeros for _ in chunks] for _ in vectors])
        _, sums = jax.lax.fori_loop(jnp.int32(0), steps, step, state)
        for ref, total in zip(sum_refs, sums, strict=True):
            for at in chunks:
                row.store(ref.at[program], at, total[at])

    dx, *partial = launch(
        kernel,
        [flat, pulled, *others, *scales, *numbers, *views],
        out=[
            jax.ShapeDtypeStruct(flat.shape, flat.dtype),
            *(jax.ShapeDtypeStruct((programs, width), jnp.float32) for _ in vectors),
        ],
        grid={"program": programs},
        scratch=[together.boards()] if at_once else boards_of(lying, interpret=interpret),
        groups={"group": groups} if groups > 1 else None,
        interpret=interpret,
        name=f"{name}_gradient",
    )
    totals = [jnp.sum(rows, axis=0) for rows in partial]
    return dx.reshape(x.shape), *(total.astype(vector.dtype) for total, vector in zip(totals, vectors, strict=True))
