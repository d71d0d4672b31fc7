"""The training step of a vision transformer: layer norms, biases, gelu, attention that sees everything."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from .program import Draw, Program, trained


def make(s: SimpleNamespace) -> tuple[Any, ...]:
    """Weights, pictures as rows of pixels for each patch, and classes."""
    draw = Draw(0)

    def product(name: str, inner: int, outer: int) -> dict[str, jax.Array]:
        return {name: draw.weight(s.layers, inner, outer), f"{name}_bias": draw.zeros(s.layers, outer)}

    def norm(name: str, *shape: int) -> dict[str, jax.Array]:
        return {name: draw.ones(*shape, s.width), f"{name}_bias": draw.zeros(*shape, s.width)}

    inner = s.heads * s.depth
    layers = norm("first", s.layers) | norm("second", s.layers)
    layers |= product("qkv", s.width, 3 * inner) | product("out", inner, s.width)
    layers |= product("up", s.width, s.hidden) | product("down", s.hidden, s.width)
    params = {
        "patch": draw.weight(s.pixels, s.width),
        "place": draw.normal(s.patches, s.width, scale=0.02),
        "layers": layers,
        **norm("norm"),
        "head": draw.weight(s.width, s.classes),
    }
    return params, draw.normal(s.batch, s.patches, s.pixels), draw.integers(0, s.classes, s.batch)


def build(ops: Any, s: SimpleNamespace) -> Callable[..., Any]:
    """The training step."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        normed = ops.layer_norm(x, w["first"], w["first_bias"])
        qkv = ops.matmul(normed, w["qkv"], w["qkv_bias"]).reshape(s.batch, s.patches, 3, s.heads, s.depth)
        seen = ops.attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
        x = x + ops.matmul(seen.reshape(x.shape[0], -1), w["out"], w["out_bias"])
        normed = ops.layer_norm(x, w["second"], w["second_bias"])
        hidden = ops.matmul(normed, w["up"], w["up_bias"], activation="gelu")
        return x + ops.matmul(hidden, w["down"], w["down_bias"]), None

    def loss(params: Any, pictures: jax.Array, classes: jax.Array) -> jax.Array:
        x = ops.matmul(pictures.reshape(-1, s.pixels), params["patch"]).reshape(s.batch, s.patches, -1)
        x, _ = jax.lax.scan(layer, (x + params["place"]).reshape(-1, s.width), params["layers"])
        x = ops.layer_norm(x, params["norm"], params["norm_bias"]).reshape(s.batch, s.patches, -1)
        pooled = jnp.mean(x.astype(jnp.float32), axis=1).astype(x.dtype)
        return ops.linear_cross_entropy(pooled, params["head"], classes)

    return trained(loss)


_SIZES = {"layers": 12, "batch": 64, "patches": 256, "pixels": 768, "width": 1024, "heads": 16, "depth": 64}

PROGRAM = Program(
    "vit",
    sizes=_SIZES | {"hidden": 4096, "classes": 1000},
    tiny={"layers": 2, "batch": 2, "patches": 16, "pixels": 48, "width": 64, "heads": 4, "depth": 16}
    | {"hidden": 128, "classes": 16},
    make=make,
    build=build,
    value=lambda out: out[1],
)
