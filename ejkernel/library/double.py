"""Operations on float64, which JAX makes under `jax_enable_x64`: XLA's way is the only one, so nothing is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .arguments import ArgumentError
from .rows import across


def is_double(*arrays: jax.Array | None) -> bool:
    """Is one of them float64?"""
    return any(array is not None and array.dtype.name == "float64" for array in arrays)


def refuse_cfg(cfg: Any) -> None:
    """Raises where a way is named for a call that has one alone."""
    if cfg is not None:
        raise ArgumentError(f"{cfg} cannot compute in float64; leave cfg out, and XLA does, or use float32")


def matmul(
    a: jax.Array, b: jax.Array, *biases: jax.Array, finish: Callable[[jax.Array], jax.Array], dtype: Any
) -> jax.Array:
    """`finish(a @ b + bias)` in float64."""
    total = jnp.matmul(a, b, preferred_element_type=jnp.float64)
    return finish(sum((across(bias, total) for bias in biases), total)).astype(dtype)


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * weight` in float64."""
    wide = x.astype(jnp.float64)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (normed if weight is None else normed * across(weight, normed)).astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float) -> jax.Array:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` in float64."""
    wide = x.astype(jnp.float64)
    off = wide - jnp.mean(wide, -1, keepdims=True)
    normed = off * jax.lax.rsqrt(jnp.mean(off * off, -1, keepdims=True) + eps)
    scaled = normed if weight is None else normed * across(weight, normed)
    return (scaled if bias is None else scaled + across(bias, scaled)).astype(x.dtype)
