"""The training step of a mixture of experts: each token goes to some of many small feed-forward parts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from .dense import SIZES, TINY, attention, attention_weights, decoder, outer_weights
from .operations import routed
from .program import Draw, Program, trained


def make(s: SimpleNamespace) -> tuple[Any, ...]:
    """Weights, tokens and labels."""
    draw = Draw(0)
    layers = attention_weights(draw, s) | {
        "router": draw.weight(s.layers, s.width, s.experts),
        "gate": draw.weight(s.layers, s.experts, s.width, s.hidden),
        "up": draw.weight(s.layers, s.experts, s.width, s.hidden),
        "down": draw.weight(s.layers, s.experts, s.hidden, s.width),
    }
    tokens, labels = (draw.integers(0, s.words, s.batch, s.length) for _ in range(2))
    return outer_weights(draw, s, layers), tokens, labels


def experts(ops: Any, s: SimpleNamespace, x: jax.Array, w: Any) -> jax.Array:
    """A layer in which products alone are replaced."""
    return routed(ops, x, x @ w["router"], w["gate"], w["up"], w["down"], s.chosen)


def whole(ops: Any, s: SimpleNamespace) -> Callable[..., Any]:
    """The step with whole layers of experts, and each sum normed where it is made."""

    def layer(carry: tuple[jax.Array, jax.Array], w: Any) -> tuple[tuple[jax.Array, jax.Array], None]:
        normed, x = ops.residual_norm(*carry, w["attention_norm"])
        normed, x = ops.residual_norm(attention(ops, s, normed, w), x, w["norm"])
        return (ops.moe(normed, normed @ w["router"], w["gate"], w["up"], w["down"], k=s.chosen), x), None

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embedding"][tokens].reshape(-1, s.width)
        carry, _ = jax.lax.scan(layer, (jnp.zeros_like(x), x), params["layers"])
        normed, _ = ops.residual_norm(*carry, params["norm"])
        return ops.linear_cross_entropy(normed, params["head"], labels.reshape(-1))

    return trained(loss)


_SIZES: dict[str, Any] = {
    "sizes": SIZES | {"hidden": 768, "words": 32000, "experts": 32, "chosen": 4},
    "tiny": TINY | {"hidden": 32, "experts": 4, "chosen": 2},
}
PROGRAM = Program("moe", **_SIZES, make=make, build=decoder(experts), value=lambda out: out[1])
WHOLE = Program("experts", **_SIZES, make=make, build=whole, value=lambda out: out[1])
