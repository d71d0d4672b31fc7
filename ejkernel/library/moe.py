"""A whole layer of experts: routing, rows sent to experts and through them, and the weighted sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from ..ops import Executor
from .arguments import ArgumentError, ArgumentTypeError, float_array, same, same_dtype
from .call import planned, program
from .moe_combine import MoeCombineConfig, combined
from .moe_dispatch import MoeDispatchConfig, moe_dispatch
from .moe_experts import moe_experts
from .ragged_dot import RaggedDotConfig
from .rows import float_rows
from .top_k import TopKConfig


@dataclass(frozen=True)
class MoeConfig:
    """Configs of the layer's parts; a part without one is tuned by itself."""

    route: TopKConfig | None = None
    dispatch: MoeDispatchConfig | None = None
    experts: RaggedDotConfig | None = None
    combine: MoeCombineConfig | None = None


@planned()
def moe(
    x: jax.Array,
    router_logits: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    k: int,
    normalize: bool = True,
    cfg: MoeConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """Each token through its k experts: `silu(x @ w_gate) * (x @ w_up) @ w_down`, summed with the router's weights.

    `x` is (..., width), `router_logits` (..., experts), `w_gate` and `w_up` (experts, width, inner), `w_down` (experts,
    inner, width). Each part is a kernel with a config of its own.
    """
    x, logits = float_rows("x", x), float_rows("router_logits", router_logits)
    if x.shape[:-1] != logits.shape[:-1]:
        raise ArgumentError(f"x and router_logits differ before the last axis: {x.shape} and {logits.shape}")
    gate = float_array("w_gate", w_gate, ("experts", "width", "inner"))
    up = float_array("w_up", w_up, ("experts", "width", "inner"))
    down = float_array("w_down", w_down, ("experts", "inner", "width"))
    if gate.shape != up.shape:
        raise ArgumentError(f"w_gate and w_up must have the same shape, got {gate.shape} and {up.shape}")
    for name, weight in (("w_gate", gate), ("w_up", up), ("w_down", down)):
        same_dtype("x", x, name, weight)
        same("experts", "router_logits", logits, logits.shape[-1], name, weight, weight.shape[0])
    same("width", "x", x, x.shape[-1], "w_gate", gate, gate.shape[1])
    same("inner", "w_up", up, up.shape[2], "w_down", down, down.shape[1])
    same("width", "x", x, x.shape[-1], "w_down", down, down.shape[2])
    if cfg is not None and not isinstance(cfg, MoeConfig):
        raise ArgumentTypeError(f"cfg={cfg!r} of moe is a {type(cfg).__qualname__}; use a MoeConfig")
    parts = cfg or MoeConfig()

    def layer(executor: Executor[Any, Any] | None) -> jax.Array:
        # The number of tokens is said: a width of zero leaves it open.
        tokens = math.prod(x.shape[:-1])
        flat, routed = x.reshape(tokens, x.shape[-1]), logits.reshape(tokens, logits.shape[-1])
        how: dict[str, Any] = {"route": parts.route, "cfg": parts.dispatch, "executor": executor}
        sent = moe_dispatch(flat, routed, k=k, normalize=normalize, **how)
        rows = moe_experts(sent.rows, gate, up, down, sent.group_sizes, cfg=parts.experts, executor=executor)
        out = combined(rows, sent.weights, sent.places, cfg=parts.combine, executor=executor)
        return out.reshape(x.shape)

    return program("library.moe", layer, executor)  # type: ignore[no-any-return]
