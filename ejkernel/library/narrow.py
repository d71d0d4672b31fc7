"""Products of narrow numbers that lose nothing else: wide gradients, numbers in two parts, and powers of two."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

# float16 ends at 65504 and has its full precision down to 6e-5. Weights of at most 1 are lifted so far that those of
# two billionths still have it; a sum of them divides the lift away.
_FLOAT16_LIFT = 15 * math.log(2)


def product_in(dtype: Any, form: str, one: jax.Array, other: jax.Array) -> jax.Array:
    """`einsum` in float32 of two arrays of float32 that are rounded to this dtype first.

    The gradient passes the rounding by: what comes back is float32, whichever dtype the products had.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return jnp.einsum(form, one, other, preferred_element_type=jnp.float32)
    return _product(form, jnp.dtype(dtype).name, one, other)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _product(form: str, dtype: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(form, one.astype(dtype), other.astype(dtype), preferred_element_type=jnp.float32)


@_product.defjvp
def _product_jvp(form: str, dtype: str, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (one, other), (d_one, d_other) = primals, tangents
    # As narrow as the product has them: nothing is held in float32 for this alone.
    narrow = one.astype(dtype), other.astype(dtype)
    wide: dict[str, Any] = {"preferred_element_type": jnp.float32}
    moved = jnp.einsum(form, d_one, narrow[1], **wide) + jnp.einsum(form, narrow[0], d_other, **wide)
    return _product(form, dtype, one, other), moved


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """The array, of float32, with values that this dtype has; what is too small for its full precision is zero."""
    info = jnp.finfo(dtype)
    # Not a conversion and one back: XLA may take both away.
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)


def lifting(largest: jax.Array) -> jax.Array:
    """The power of two that brings numbers up to this large to just below the largest one of float16."""
    largest = jax.lax.stop_gradient(largest)
    exponent = jnp.where(jnp.isfinite(largest) & (largest > 0), 15 - jnp.frexp(largest)[1], 0)
    return jnp.ldexp(jnp.float32(1), exponent)


def split(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Two arrays of this dtype and a power of two; their sum, divided by it, has twice the dtype's bits of this one.

    So a product of a wide array is one of two narrow ones.
    """
    wide = x.astype(jnp.float32)
    lift = lifting(jnp.max(jnp.abs(wide))) if jnp.dtype(dtype) == jnp.float16 else 1.0
    coarse = rounded(wide * lift, dtype)
    return coarse.astype(dtype), (wide * lift - coarse).astype(dtype), lift


def exp_in(dtype: Any, x: jax.Array) -> jax.Array:
    """`exp(x)` for x of at most 0, as float32 that this dtype holds exactly; for float16 lifted by a factor.

    Its derivative is that rounded number. So weights, their sum and both gradients agree, and what cancels exactly
    (a row's gradients of its scores add up to nothing) still does.
    """
    return jnp.exp(x) if jnp.dtype(dtype) == jnp.float32 else _exp(jnp.dtype(dtype).name, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _exp(dtype: str, x: jax.Array) -> jax.Array:
    return rounded(jnp.exp(x + (_FLOAT16_LIFT if dtype == "float16" else 0.0)), dtype)


@_exp.defjvp
def _exp_jvp(dtype: str, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    made = _exp(dtype, *primals)
    return made, made * tangents[0]
