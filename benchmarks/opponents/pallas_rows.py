"""JAX's own Pallas kernels for rows: rms_norm, layer_norm and softmax of `jax.experimental.pallas.ops.gpu`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library.jax_pallas import gpu_kernels

from .opponent import Call, Opponent

# What the library's norms add to the variance.
EPSILON = 1e-6
# The kernel counts by its best one. The norms choose their warps themselves.
SOFTMAX_WARPS = (2, 4, 8, 16, 32)
# Elements of a row that a thread holds: with more of them Triton compiles for minutes.
MOST_HELD = 128


def rms_norm(x: Any, weight: Any, *, gradient: str = "triton", interpret: bool = False) -> jax.Array:
    """JAX's kernel has a bias, and rows in two dimensions."""
    kernel = gpu_kernels("rms_norm").rms_norm
    return kernel(x[None], weight, jnp.zeros_like(weight), None, 3, EPSILON, gradient, interpret)[0]


def layer_norm(x: Any, weight: Any, bias: Any, *, gradient: str = "triton", interpret: bool = False) -> jax.Array:
    """JAX's kernel has rows in two dimensions."""
    return gpu_kernels("layer_norm").layer_norm(x[None], weight, bias, None, 3, EPSILON, gradient, interpret)[0]


def softmax(x: Any, *, num_warps: int, interpret: bool = False) -> jax.Array:
    """A whole row in one block."""
    return gpu_kernels("softmax").softmax(x, num_warps=num_warps, interpret=interpret)


def opponents(call: Call) -> Iterator[Opponent]:
    """Every kernel for the operation."""
    if call.op == "rms_norm":
        yield Opponent("jax rms_norm", rms_norm)
    elif call.op == "layer_norm":
        yield Opponent("jax layer_norm", layer_norm)
    # It has no gradient.
    elif call.op == "softmax" and not call.backward:
        block = 1 << (call.arrays[0].shape[-1] - 1).bit_length()
        for warps in (warps for warps in SOFTMAX_WARPS if block <= 32 * warps * MOST_HELD):
            yield Opponent(f"jax softmax({warps} warps)", functools.partial(softmax, num_warps=warps))
