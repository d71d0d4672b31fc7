"""The largest of a vocabulary, and the experts of a router."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import TopK

from .case import Case, normal


def plain(x: Any, *, k: int) -> tuple[jax.Array, jax.Array]:
    """JAX's own top-k."""
    values, indices = jax.lax.top_k(x, k)
    return values, indices


def case(rows: int, width: int, k: int) -> Case:
    """A case of so many rows."""

    def make(rng: Any) -> Any:
        return (normal(rng, (rows, width), jnp.float32),), {"k": k}

    return Case("top_k", f"{k} of {rows}x{width}", "cpu", make, TopK, plain, 0, 4 * rows * width)


CASES = [case(32, 32768, 50), case(4096, 128, 8)]
