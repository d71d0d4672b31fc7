"""Two passes over logits for cross entropy: each row's maximum, normaliser, label and sum, then derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..narrow import rounded
from .launch import launch, loop, places, plgpu
from .recipes import running_norm
from .rows import Row, boards_of, put, row_of
from .spread import Spread, block_spread

# Where a running maximum begins.
_LOWEST = float(jnp.finfo(jnp.float32).min)


def row_sums(
    logits: jax.Array,
    labels: jax.Array,
    *,
    total: bool,
    block: int,
    num_warps: int,
    interpret: bool,
    words: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | float]:
    """Each row's maximum, the sum of its exponentials once that is taken off, its label's logit and, if asked, its sum.

    For a label out of range it is the nearest word's logit. Columns beyond so many words are left out.
    """
    rows, columns = logits.shape
    words = words or columns
    lying = block_spread(columns, logits.dtype.itemsize, block, num_warps)
    unmasked = _unmasked(lying, words)

    def kernel(logits_ref: Any, labels_ref: Any, out_ref: Any, *shared: Any) -> None:
        row, at = row_of(lying, shared, interpret=interpret), jax.lax.axis_index("row")
        mine = logits_ref.at[at]

        def step(number: Any, state: Any, counted: Any = None) -> Any:
            *running, added = state
            values = row.load(mine, number)
            moved = running_norm(tuple(running), values, counted, None)
            if total:
                added = added + (values if counted is None else jnp.where(counted, values, 0.0))
            return *moved, added

        zeros = _zeros(row)
        state: Any = (zeros + _LOWEST, zeros, zeros if total else None)
        state = loop(unmasked, step, state, interpret=interpret) if unmasked else state
        for number in range(unmasked, lying.count):
            state = step(number, state, _counted(row, number, words))
        top, norm, added = state
        highest = row.largest(top)
        share = jnp.where(top == highest, 1.0, jnp.exp(top - highest))
        sums = [highest, row.total(norm * share), mine[jnp.clip(labels_ref[at], 0, words - 1)]]
        sums += [row.total(added)] if total else []
        put(row, [out_ref.at[number] for number in range(len(sums))], at, sums)

    (made,) = launch(
        kernel,
        [logits, labels.astype(jnp.int32)],
        out=[jax.ShapeDtypeStruct((4 if total else 3, rows), jnp.float32)],
        grid={"row": rows},
        scratch=boards_of(lying, interpret=interpret),
        groups={"group": lying.groups} if lying.groups > 1 else None,
        interpret=interpret,
        name="library_row_sums",
    )
    return made[0], made[1], made[2], made[3] if total else 0.0


def row_slopes(
    logits: jax.Array,
    labels: jax.Array,
    numbers: Sequence[jax.Array],
    slopes: Callable[..., jax.Array],
    *,
    dtype: Any,
    block: int,
    num_warps: int,
    interpret: bool,
    words: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`slopes(logits, top, share, is_label, words) * scale`, rounded, and what rounding took from each row's sum.

    `numbers` are each row's top, share and scale. Columns beyond so many words get zeros.
    """
    rows, columns = logits.shape
    words = words or columns
    lying = block_spread(columns, logits.dtype.itemsize, block, num_warps)
    unmasked = _unmasked(lying, words)

    def kernel(logits_ref: Any, labels_ref: Any, *refs: Any) -> None:
        number_refs, made_ref, lost_ref, shared = refs[:3], refs[3], refs[4], refs[5:]
        row, at = row_of(lying, shared, interpret=interpret), jax.lax.axis_index("row")
        mine, made = logits_ref.at[at], made_ref.at[at]
        label, (top, share, scale) = labels_ref[at], (ref[at] for ref in number_refs)
        counting = places(lying.size, row.layout, interpret=interpret)

        def step(number: Any, lost: jax.Array, counted: Any = None) -> jax.Array:
            values = row.load(mine, number)
            begin = row.start(number)[0]
            wide = slopes(values, top, share, counting == label - begin, words) * scale
            if counted is not None and words < columns:
                wide = jnp.where(counting < words - begin, wide, 0.0)
            # XLA, which interprets it, may take a conversion and one back away.
            near = rounded(wide, dtype) if interpret else wide.astype(dtype).astype(jnp.float32)
            row.store(made, number, near)
            off = wide - near
            return lost + (off if counted is None else jnp.where(counted, off, 0.0))

        lost = _zeros(row)
        lost = loop(unmasked, step, lost, interpret=interpret) if unmasked else lost
        for number in range(unmasked, lying.count):
            lost = step(number, lost, _counted(row, number, words))
        put(row, [lost_ref.at[0]], at, [row.total(lost)])

    made, lost = launch(
        kernel,
        [logits, labels.astype(jnp.int32), *numbers],
        out=[jax.ShapeDtypeStruct(logits.shape, dtype), jax.ShapeDtypeStruct((1, rows), jnp.float32)],
        grid={"row": rows},
        scratch=boards_of(lying, interpret=interpret),
        groups={"group": lying.groups} if lying.groups > 1 else None,
        interpret=interpret,
        name="library_row_slopes",
    )
    return made, lost[0]


def _zeros(row: Row) -> jax.Array:
    zeros = jnp.zeros(row.spread.size, jnp.float32)
    return zeros if row.interpret else plgpu.layout_cast(zeros, row.layout)


def _unmasked(lying: Spread, words: int) -> int:
    """The number of first chunks in which every warpgroup has words alone, and none twice."""
    return replace(lying, width=words).unmasked


def _counted(row: Row, number: int, words: int) -> jax.Array | None:
    """A mask of the elements of a chunk that are words and that no chunk before it has; None: all."""
    counted = row.counted(number)
    if words == row.spread.width:
        return counted
    here = places(row.spread.size, row.layout, interpret=row.interpret)
    are_words: jax.Array = here < words - row.start(number)[0]
    return are_words if counted is None else are_words & counted
