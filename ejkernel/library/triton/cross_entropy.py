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
    logits: jax.Array, labels: jax.Array, *, total: bool, block: int, num_warps: int, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | float]:
    """Each row's maximum, the sum of its exponentials once that is taken off, its label's logit and, if asked, its sum.

    For a label out of range it is the nearest word's logit.
    """
    rows, words = logits.shape
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
) -> tuple[jax.Array, jax.Array]:
    """`slopes(logits, top, share, is_label, words) * scale`, rounded, and what rounding took from each row's sum.

    `numbers` are each row's top, share and scale.
    """
    rows, words = logits.shape
    block = min(block, power_of_two(words))
    blocks = pl.cdiv(words, block)

    def kernel(
        logits_ref: Any, labels_ref: Any, top_ref: Any, share_ref: Any, scale_ref: Any, made_ref: Any, lost_ref: Any
    ) -> None:
        row, number = pl.program_id(0), pl.program_id(1)
        place = number * block + jnp.arange(block, dtype=jnp.int32)
        mask = inside(number, block, words, 0, (block,)) if words % block else None
        values = load(logits_ref.at[row, place], mask)
        wide = slopes(values, top_ref[row], share_ref[row], place == labels_ref[row], words) * scale_ref[row]
        # XLA, which interprets it, may take a conversion and one back away.
        near = rounded(wide, dtype) if interpret else wide.astype(dtype).astype(jnp.float32)
        store(made_ref.at[row, place], near.astype(dtype), mask)
        lost = wide - near if mask is None else jnp.where(mask, wide - near, 0.0)
        lost_ref[row, number] = jnp.sum(lost)

    made, lost = launch_all(
        kernel,
        [logits, labels.astype(jnp.int32), *numbers],
        out=[jax.ShapeDtypeStruct(logits.shape, dtype), jax.ShapeDtypeStruct((rows, blocks), jnp.float32)],
        grid=(rows, blocks),
        in_specs=[pl.BlockSpec()] * 5,
        out_specs=[pl.BlockSpec()] * 2,
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        name="library_row_slopes",
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
