"""Calls of cuDNN's attention: the fields of XLA's `CudnnfMHABackendConfig` that are not at their defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

ELEMENTS = {"bfloat16": "BF16", "float16": "F16"}
# The axes that a product adds up, and those that it goes through side by side, of its left and its right factor.
Axes = tuple[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]]


def call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    layouts: Sequence[tuple[int, ...]],
    about: Mapping[str, Any],
) -> Any:
    """XLA's custom call; its last result is room that XLA takes for itself, and is left out."""
    made = jax.ffi.ffi_call(
        target,
        (*results, jax.ShapeDtypeStruct((0,), jnp.uint8)),
        output_layouts=(*layouts, (0,)),
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({"cudnn_fmha_backend_config": dict(about)}),
    )
    return lambda *arrays: made(*arrays)[:-1]


def config(q: Any, keys: int, scale: float, products: Mapping[str, Axes], **more: Any) -> dict[str, Any]:
    """The fields for queries (batch, length, heads, head_dim), scores of so many keys, and the products by name."""
    batch, queries, heads, _ = q.shape
    return {
        "algorithm": {
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": ELEMENTS[q.dtype.name],
            "dimensions": [str(extent) for extent in (batch, heads, queries, keys)],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        **{f"{name}_dot_dimension_numbers": _product(*axes) for name, axes in products.items()},
        "seed": 42,
        "max_seg_per_batch": 1,
        **more,
    }


def _product(contracted: tuple[int, int], batched: tuple[tuple[int, int], tuple[int, int]]) -> dict[str, list[str]]:
    sides = ("lhs", "rhs")
    found = {f"{side}_contracting_dimensions": [str(at)] for side, at in zip(sides, contracted, strict=True)}
    return found | {
        f"{side}_batch_dimensions": [str(at) for at in axes] for side, axes in zip(sides, batched, strict=True)
    }
