"""The two passes over logits by Pallas kernels: what they add up to, and their derivatives."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from .linear_cross_entropy_chunks import Passes
from .linear_cross_entropy_terms import Slopes, Sums, Terms, sloped, summed
from .narrow import rounded
from .reverse import recomputed

# How derivatives are computed, whatever the launch of the sums: the fastest of three, or within 1% of it, for four
# sizes of logits on an H200.
_SLOPES: dict[str, Any] = {"block": 1024, "num_warps": 4}


def passes(block: int, num_warps: int, interpret: bool, backend: str = "triton") -> Passes:
    """Both passes by one of the backends; the launch is that of the sums."""
    kernels = importlib.import_module(f".{backend}.cross_entropy", __package__)

    def sums(logits: jax.Array, labels: jax.Array, terms: Terms) -> Sums:
        def kernel(logits: jax.Array, labels: jax.Array) -> Any:
            launch: dict[str, Any] = {"block": block, "num_warps": num_warps, "interpret": interpret}
            return kernels.row_sums(logits, labels, total=bool(terms.smoothing), **launch)

        def plain(logits: jax.Array, labels: jax.Array) -> Any:
            return tuple(summed(logits, labels, terms))

        # For gradients of gradients.
        return Sums(*recomputed(kernel, plain)(logits, labels))

    def slope(logits: jax.Array, labels: jax.Array, sums: Sums, scales: Any, dtype: Any, terms: Terms) -> Slopes:
        if dtype == jnp.float32:
            return sloped(logits, labels, sums, scales, dtype, terms)
        lift, words = terms.lowering(sums, dtype), logits.shape[1]

        def plain(logits: jax.Array, labels: jax.Array, *numbers: jax.Array) -> Any:
            top, share, scale = (x[:, None] for x in numbers)
            is_label = jnp.arange(words)[None, :] == labels[:, None]
            wide = terms.slopes(logits, top, share, is_label, words) * scale
            near = rounded(wide, dtype)
            return near.astype(dtype), jnp.sum(wide - near, axis=1)

        def kernel(logits: jax.Array, labels: jax.Array, *numbers: jax.Array) -> Any:
            return kernels.row_slopes(
                logits, labels, numbers, terms.slopes, dtype=dtype, interpret=interpret, **_SLOPES
            )

        numbers = (sums.top, terms.shares(sums), scales * lift)
        values, lost = recomputed(kernel, plain)(logits, labels, *numbers)
        return Slopes(values, lost, lift)

    return Passes(sums, slope)
