"""The passes of cross entropy over logits: each row's maximum, normaliser, label and sum, then their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..narrow import rounded
from .launch import inside, launch, launch_all, load, power_of_two, store
from .served import missing

# Where a running maximum begins.
_LOWEST = float(jnp.finfo(jnp.float32).min)
# Elements of a block for each thread: it holds a maximum and a sum, and loads a logit, for each of them.
_MOST_EACH = 64


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
    rows, words = logits.shape[0], words or logits.shape[1]
    block = min(block, power_of_two(words))
    whole, rest = divmod(words, block)

    def kernel(logits_ref: Any, labels_ref: Any, out_ref: Any) -> None:
        row = pl.program_id(0)

        def step(number: Any, state: Any, mask: Any = None) -> Any:
            top, norm, added = state
            values = load(logits_ref.at[row, number * block + jnp.arange(block)], mask, -math.inf)
            # One exponential for each logit: of what is smaller, it or the maximum before, against the larger.
            less = jnp.where(values == top, 1.0, jnp.exp(-jnp.abs(top - values)))
            norm = jnp.where(values > top, norm * less + 1.0, norm + less)
            if total:
                added = added + (values if mask is None else jnp.where(mask, values, 0.0))
            return jnp.maximum(top, values), norm, added

        zeros = jnp.zeros(block, jnp.float32)
        state: Any = (zeros + _LOWEST, zeros, zeros if total else None)
        if whole:
            state = jax.lax.fori_loop(jnp.int32(0), jnp.int32(whole), step, state)
        if rest:
            state = step(whole, state, inside(whole, block, words, 0, (block,)))
        top, norm, added = state
        highest = jnp.max(top)
        share = jnp.where(top == highest, 1.0, jnp.exp(top - highest))
        label = jnp.clip(labels_ref[row], 0, words - 1)
        out_ref[0, row] = highest
        out_ref[1, row] = jnp.sum(norm * share)
        out_ref[2, row] = logits_ref[row, label]
        if total:
            out_ref[3, row] = jnp.sum(added)

    made = launch(
        kernel,
        [logits, labels.astype(jnp.int32)],
        out=jax.ShapeDtypeStruct((4 if total else 3, rows), jnp.float32),
        grid=(rows,),
        in_specs=[pl.BlockSpec(), pl.BlockSpec()],
        out_specs=pl.BlockSpec(),
        num_warps=num_warps,
        num_stages=1,
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
    into: Sequence[jax.Array] = (),
) -> tuple[jax.Array, jax.Array]:
    """`slopes(logits, top, share, is_label, words) * scale`, rounded, and what rounding took from each row's sum.

    `numbers` are each row's top, share and scale. Columns beyond so many words get zeros. `into` is an array of more
    rows and the number of the first one to write: that array is returned.
    """
    rows, columns = logits.shape
    words = words or columns
    block = min(block, power_of_two(columns))
    blocks = pl.cdiv(columns, block)
    placing = [jnp.reshape(into[1], 1).astype(jnp.int32), into[0]] if into else []
    shape = into[0].shape if into else logits.shape

    def kernel(logits_ref: Any, labels_ref: Any, top_ref: Any, share_ref: Any, scale_ref: Any, *refs: Any) -> None:
        made_ref, lost_ref = refs[-2:]
        row, number = pl.program_id(0), pl.program_id(1)
        place = number * block + jnp.arange(block, dtype=jnp.int32)
        mask = inside(number, block, columns, 0, (block,)) if columns % block else None
        values = load(logits_ref.at[row, place], mask)
        wide = slopes(values, top_ref[row], share_ref[row], place == labels_ref[row], words) * scale_ref[row]
        if words % block or words < columns:
            wide = jnp.where(inside(number, block, words, 0, (block,)), wide, 0.0)
        # XLA, which interprets it, may take a conversion and one back away.
        near = rounded(wide, dtype) if interpret else wide.astype(dtype).astype(jnp.float32)
        there = refs[0][0] + row if into else row
        store(made_ref.at[there, place], near.astype(dtype), mask)
        lost_ref[row, number] = jnp.sum(wide - near)

    made, lost = launch_all(
        kernel,
        [logits, labels.astype(jnp.int32), *numbers, *placing],
        out=[jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((rows, blocks), jnp.float32)],
        grid=(rows, blocks),
        in_specs=[pl.BlockSpec()] * (5 + len(placing)),
        out_specs=[pl.BlockSpec()] * 2,
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        name="library_row_slopes",
        aliases={6: 0} if into else None,
    )
    return made, jnp.sum(lost, axis=1)


def refuses(block: int, num_warps: int) -> str:
    """The reason why rows cannot be read so; empty where they can."""
    if missing():
        return missing()
    if block < 1 or num_warps < 1 or block & (block - 1) or num_warps & (num_warps - 1):
        return f"block={block} and num_warps={num_warps} must be powers of two"
    if block // (32 * num_warps) > _MOST_EACH:
        return f"a block of {block} is too much for the registers of {num_warps} warps"
    return ""
