"""The two passes over logits by Pallas kernels: what they add up to, and their derivatives."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from .linear_cross_entropy_chunks import Passes
from .linear_cross_entropy_terms import Slopes, Stack, Sums, Terms, sloped, summed
from .narrow import rounded
from .reverse import recomputed

# How derivatives are computed, whatever the launch of the sums: the fastest of three, or within 1% of it, for four
# sizes of logits on an H200.
_SLOPES: dict[str, Any] = {"block": 1024, "num_warps": 4}


def passes(block: int, num_warps: int, interpret: bool, backend: str = "triton") -> Passes:
    """Both passes by one of the backends; the launch is that of the sums."""
    kernels = importlib.import_module(f".{backend}.cross_entropy", __package__)

    def sums(logits: jax.Array, labels: jax.Array, terms: Terms, words: int | None = None) -> Sums:
        def kernel(logits: jax.Array, labels: jax.Array) -> Any:
            launch: dict[str, Any] = {"block": block, "num_warps": num_warps, "interpret": interpret, "words": words}
            return kernels.row_sums(logits, labels, total=bool(terms.smoothing), **launch)

        def plain(logits: jax.Array, labels: jax.Array) -> Any:
            return tuple(summed(logits, labels, terms, words))

        # For gradients of gradients.
        return Sums(*recomputed(kernel, plain)(logits, labels))

    def slope(
        logits: jax.Array,
        labels: jax.Array,
        sums: Sums,
        scales: Any,
        dtype: Any,
        terms: Terms,
        words: int | None = None,
        into: Stack | None = None,
    ) -> Slopes:
        if dtype == jnp.float32:
            return sloped(logits, labels, sums, scales, dtype, terms, words, into)
        lift, columns, counted = terms.lowering(sums, dtype), jnp.arange(logits.shape[1]), words or logits.shape[1]

        def plain(logits: jax.Array, labels: jax.Array, *numbers: jax.Array) -> Any:
            top, share, scale = (x[:, None] for x in numbers[:3])
            wide = terms.slopes(logits, top, share, columns[None, :] == labels[:, None], counted) * scale
            wide = jnp.where(columns[None, :] < counted, wide, 0.0)
            near = rounded(wide, dtype)
            made = near.astype(dtype)
            return Stack(*numbers[3:]).written(made) if numbers[3:] else made, jnp.sum(wide - near, axis=1)

        def kernel(logits: jax.Array, labels: jax.Array, *numbers: jax.Array) -> Any:
            how: dict[str, Any] = {"dtype": dtype, "interpret": interpret, "words": words, **_SLOPES}
            if numbers[3:] and backend == "triton":
                how["into"] = numbers[3:]
            values, lost = kernels.row_slopes(logits, labels, numbers[:3], terms.slopes, **how)
            is_part = numbers[3:] and backend != "triton"
            return Stack(*numbers[3:]).written(values) if is_part else values, lost

        numbers = (sums.top, terms.shares(sums), scales * lift, *(into or ()))
        values, lost = recomputed(kernel, plain)(logits, labels, *numbers)
        return Slopes(values, lost, lift)

    return Passes(sums, slope)
