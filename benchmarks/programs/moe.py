"""The training step of a mixture of experts: each token goes to some of many small feed-forward parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from .dense import SIZES, TINY, attention_weights, decoder, outer_weights
from .program import Draw, Program


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


def routed(ops: Any, s: SimpleNamespace, x: jax.Array, w: Any) -> jax.Array:
    """Copies of the rows sorted by expert, through their experts, and added up again."""
    scores, chosen = jax.lax.top_k((x @ w["router"]).astype(jnp.float32), s.chosen)
    shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=s.experts).astype(jnp.int32)
    rows = x[order // s.chosen]
    hidden = jax.nn.silu(ops.ragged_dot(rows, w["gate"], sizes)) * ops.ragged_dot(rows, w["up"], sizes)
    out = ops.ragged_dot(hidden, w["down"], sizes)
    back = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(x.shape[0], s.chosen, -1)
    return jnp.einsum("tcw,tc->tw", back, shares)


PROGRAM = Program(
    "moe",
    sizes=SIZES | {"hidden": 768, "words": 32000, "experts": 32, "chosen": 4},
    tiny=TINY | {"hidden": 32, "experts": 4, "chosen": 2},
    make=make,
    build=decoder(routed),
    value=lambda out: out[1],
)
