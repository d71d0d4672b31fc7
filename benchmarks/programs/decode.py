"""One decoding step: a token for each sequence, with the keys and values of those before it in a cache."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from .dense import SIZES, TINY, attention_weights, fed_forward, outer_weights
from .program import Draw, Program, rotated


def make(s: SimpleNamespace) -> tuple[Any, ...]:
    """Weights, a cache for each layer, the latest tokens and how many are in the cache."""
    draw = Draw(0)
    layers = attention_weights(draw, s) | {
        "gate": draw.weight(s.layers, s.width, s.hidden),
        "up": draw.weight(s.layers, s.width, s.hidden),
        "down": draw.weight(s.layers, s.hidden, s.width),
    }
    # A list: layers that are called one after the other need no slices of one large array.
    params = outer_weights(draw, s, [{name: w[at] for name, w in layers.items()} for at in range(s.layers)])
    shape = (s.batch, s.length, s.kv_heads, s.depth)
    cache = [tuple(draw.normal(*shape) for _ in range(2)) for _ in range(s.layers)]
    return params, cache, draw.integers(0, s.words, s.batch), draw.integers(s.length // 2, s.length, s.batch)


def build(ops: Any, s: SimpleNamespace) -> Callable[..., Any]:
    """The step: new cache, the next tokens and how sure they are."""

    def attended(x: jax.Array, w: Any, cache: Any, filled: jax.Array) -> tuple[jax.Array, Any]:
        normed = ops.rms_norm(x, w["attention_norm"])

        def heads(weight: jax.Array) -> jax.Array:
            return ops.matmul(normed, weight).reshape(s.batch, 1, -1, s.depth)

        places = filled[:, None]
        q, k, v = rotated(heads(w["query"]), places), rotated(heads(w["key"]), places), heads(w["value"])
        at = (jnp.arange(s.batch), filled)
        keys, values = (old.at[at].set(new[:, 0]) for old, new in zip(cache, (k, v), strict=True))
        seen = ops.attention(q, keys, values, key_value_lengths=filled + 1)
        return x + ops.matmul(seen.reshape(s.batch, -1), w["out"]), (keys, values)

    def step(params: Any, cache: Any, tokens: jax.Array, filled: jax.Array) -> Any:
        x, kept = params["embedding"][tokens], []
        for w, old in zip(params["layers"], cache, strict=True):
            x, new = attended(x, w, old, filled)
            x = x + fed_forward(ops, s, ops.rms_norm(x, w["norm"]), w)
            kept.append(new)
        logits = ops.matmul(ops.rms_norm(x, params["norm"]), params["head"]).astype(jnp.float32)
        return kept, jnp.argmax(logits, axis=-1), jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    return step


PROGRAM = Program(
    "decode",
    sizes=SIZES | {"batch": 64, "length": 4096, "hidden": 5632, "words": 32000},
    tiny=TINY | {"batch": 4, "length": 64, "hidden": 96},
    make=make,
    build=build,
    value=lambda out: out[2],
    donated=(1,),
    following=lambda args, out: (args[0], out[0], *args[2:]),
)
