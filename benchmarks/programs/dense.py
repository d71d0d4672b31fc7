"""The training step of a decoder: grouped heads, rotary positions, SwiGLU, a scan over layers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from .program import Draw, Program, rotated, trained

SIZES = {"layers": 4, "batch": 4, "length": 2048, "width": 2048, "heads": 16, "kv_heads": 8, "depth": 128}
TINY = {"layers": 2, "batch": 2, "length": 32, "width": 64, "heads": 4, "kv_heads": 2, "depth": 16, "words": 128}


def attention_weights(draw: Draw, s: SimpleNamespace) -> dict[str, jax.Array]:
    """Weights of all layers: the norm and the four products around attention."""
    queries, keys = s.heads * s.depth, s.kv_heads * s.depth
    return {
        "attention_norm": draw.ones(s.layers, s.width),
        "query": draw.weight(s.layers, s.width, queries),
        "key": draw.weight(s.layers, s.width, keys),
        "value": draw.weight(s.layers, s.width, keys),
        "out": draw.weight(s.layers, queries, s.width),
        "norm": draw.ones(s.layers, s.width),
    }


def outer_weights(draw: Draw, s: SimpleNamespace, layers: Any) -> dict[str, Any]:
    """The layers with embeddings before them and words after them."""
    return {
        "embedding": draw.normal(s.words, s.width),
        "layers": layers,
        "norm": draw.ones(s.width),
        "head": draw.weight(s.width, s.words),
    }


def make(s: SimpleNamespace) -> tuple[Any, ...]:
    """Weights, tokens and labels."""
    draw = Draw(0)
    layers = attention_weights(draw, s) | {
        "gate": draw.weight(s.layers, s.width, s.hidden),
        "up": draw.weight(s.layers, s.width, s.hidden),
        "down": draw.weight(s.layers, s.hidden, s.width),
    }
    tokens, labels = (draw.integers(0, s.words, s.batch, s.length) for _ in range(2))
    return outer_weights(draw, s, layers), tokens, labels


def attention(ops: Any, s: SimpleNamespace, normed: jax.Array, w: Any) -> jax.Array:
    """Attention of normed rows of (tokens, width)."""
    places = jnp.arange(s.length)[None]

    def heads(weight: jax.Array) -> jax.Array:
        return ops.matmul(normed, weight).reshape(s.batch, s.length, -1, s.depth)

    q, k = rotated(heads(w["query"]), places), rotated(heads(w["key"]), places)
    seen = ops.attention(q, k, heads(w["value"]), causal=True)
    return ops.matmul(seen.reshape(normed.shape[0], -1), w["out"])


def fed_forward(ops: Any, s: SimpleNamespace, x: jax.Array, w: Any) -> jax.Array:
    """The SwiGLU of normed rows."""
    return ops.matmul(jax.nn.silu(ops.matmul(x, w["gate"])) * ops.matmul(x, w["up"]), w["down"])


def decoder(forward: Callable[..., jax.Array]) -> Callable[[Any, SimpleNamespace], Callable[..., Any]]:
    """The training step of a decoder with this feed-forward part."""

    def build(ops: Any, s: SimpleNamespace) -> Callable[..., Any]:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            x = x + attention(ops, s, ops.rms_norm(x, w["attention_norm"]), w)
            return x + forward(ops, s, ops.rms_norm(x, w["norm"]), w), None

        def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
            x = params["embedding"][tokens].reshape(-1, s.width)
            x, _ = jax.lax.scan(layer, x, params["layers"])
            x = ops.rms_norm(x, params["norm"])
            return ops.linear_cross_entropy(x, params["head"], labels.reshape(-1))

        return trained(loss)

    return build


PROGRAM = Program(
    "dense",
    sizes=SIZES | {"hidden": 5632, "words": 32000},
    tiny=TINY | {"hidden": 96},
    make=make,
    build=decoder(fed_forward),
    value=lambda out: out[1],
)
