"""Residual and norm of transformers: by the width of the model, for many tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import ResidualNorm

from .case import Case, normal


def plain(x: Any, residual: Any, weight: Any, *, kind: str = "rms") -> tuple[jax.Array, jax.Array]:
    """The sum in the argument's dtype, its rms norm in float32."""
    summed = x + residual
    wide = summed.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (normed * weight.astype(jnp.float32)).astype(x.dtype), summed


def case(rows: int, width: int, *, dtype: Any = jnp.bfloat16, backward: bool = False) -> Case:
    """A case of so many rows."""

    def make(rng: Any) -> Any:
        shapes = ((rows, width), (rows, width), (width,))
        return tuple(normal(rng, size, dtype) for size in shapes), {"kind": "rms"}

    # Two in and two out; then three in and one out.
    traffic = jnp.dtype(dtype).itemsize * rows * width * (8 if backward else 4)
    name = "" if dtype == jnp.bfloat16 else f" {jnp.dtype(dtype).name}"
    title = f"{rows}x{width}{name}{', gradient' if backward else ''}"
    return Case("residual_norm", title, "cpu", make, ResidualNorm, plain, 0, traffic, backward)


CASES = [case(2048, 1024), case(1024, 1024, backward=True)]
