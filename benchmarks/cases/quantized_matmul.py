"""Products with weights of few bits, as a server of a small model has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import QuantizedMatmul, quantize

from .case import Case, normal


def plain(x: Any, q_weight: Any, scales: Any) -> jax.Array:
    """Weights in the dtype of x, then a product."""
    groups = 1 if scales.ndim == 1 else scales.shape[0]
    factor = scales if scales.ndim == 1 else jnp.repeat(scales, q_weight.shape[0] // groups, axis=0)
    return x @ (q_weight.astype(jnp.float32) * factor).astype(x.dtype)


def case(kind: str, shape: tuple[int, int, int], *, group: int | None = None, dtype: Any = jnp.bfloat16) -> Case:
    """A case from (rows, inner, columns)."""
    rows, depth, width = shape

    def make(rng: Any) -> Any:
        weight = normal(rng, (depth, width), jnp.float32, depth**-0.5)
        return (normal(rng, (rows, depth), dtype), *quantize(weight, kind, group=group)), {}

    held = depth * width * (1 if kind == "int8" else 0.5)
    title = f"{kind}{'' if group is None else f' by {group}'} {rows}x{depth} by {width}"
    flops = 2 * rows * depth * width
    return Case("quantized_matmul", title, "cpu", make, QuantizedMatmul, plain, flops, held)


CASES = [case("int8", (8, 2048, 2048)), case("int4", (8, 1024, 2048), group=128)]
