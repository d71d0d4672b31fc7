"""The end of the demo: a small training step, tuned as a whole by one command and confirmed by running it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..ops import (
    AutotuneOptions,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    OperationStores,
    Tuner,
    autotune,
)
from .attention import attention
from .linear_cross_entropy import linear_cross_entropy
from .matmul import matmul
from .rms_norm import rms_norm

# For finding the calls, tuning them, and running the step before and after. XLA for GPUs times the step's own products
# while it compiles: on an H200 that took ten seconds more.
SECONDS = {"cpu": 25.0}
LONGEST_SECONDS = 45.0

_LAYERS, _BATCH, _LENGTH, _WIDTH, _HEADS, _WORDS = 2, 4, 128, 128, 4, 4096

Model = dict[str, jax.Array]


def model() -> Model:
    """Random weights; those of all layers in one array."""
    shapes = {
        "embedding": (_WORDS, _WIDTH),
        "qkv": (_LAYERS, _WIDTH, 3 * _WIDTH),
        "out": (_LAYERS, _WIDTH, _WIDTH),
        "up": (_LAYERS, _WIDTH, 4 * _WIDTH),
        "down": (_LAYERS, 4 * _WIDTH, _WIDTH),
        "head": (_WIDTH, _WORDS),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    made = {n: jax.random.normal(k, s) * s[-2] ** -0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    return {**made, "norms": jnp.ones((_LAYERS, 2, _WIDTH))}


def tokens() -> jax.Array:
    """One batch of words, and the word behind the last."""
    return jax.random.randint(jax.random.key(1), (_BATCH, _LENGTH + 1), 0, _WORDS)


def step(model: Model, tokens: jax.Array, executor: Executor[Any, Any]) -> tuple[Model, jax.Array]:
    """One step of gradient descent: a scan over layers, gradients and the update."""

    def layer(x: jax.Array, w: Model) -> tuple[jax.Array, None]:
        qkv = matmul(rms_norm(x, w["norms"][0], executor=executor), w["qkv"], executor=executor)
        heads = qkv.reshape(_BATCH, _LENGTH, 3, _HEADS, _WIDTH // _HEADS)
        mixed = attention(*(heads[:, :, i] for i in range(3)), causal=True, executor=executor)
        x = x + matmul(mixed.reshape(x.shape), w["out"], executor=executor)
        up = matmul(rms_norm(x, w["norms"][1], executor=executor), w["up"], activation="gelu", executor=executor)
        return x + matmul(up, w["down"], executor=executor), None

    def loss(model: Model) -> jax.Array:
        layers = {name: model[name] for name in ("norms", "qkv", "out", "up", "down")}
        x, _ = jax.lax.scan(layer, model["embedding"][tokens[:, :-1]], layers)
        flat, labels = x.reshape(-1, _WIDTH), tokens[:, 1:].reshape(-1)
        return linear_cross_entropy(flat, model["head"], labels, executor=executor)

    value, slopes = jax.value_and_grad(loss)(model)
    return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, model, slopes), value


def tuned(stores: OperationStores, seconds: float | None = None) -> AutotuningResult:
    """Tunes the step with one command: every call measured as it runs there, and the step run before and after."""
    seconds = seconds or SECONDS.get(jax.default_backend(), LONGEST_SECONDS)
    selector: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(ConfigCache(), tuner=Tuner(), persistent=stores)
    executor: Executor[Any, Any] = Executor(selector)
    options = AutotuneOptions(seconds=seconds, confirm=True, progress=False)
    return autotune(lambda weights, words: step(weights, words, executor), model(), tokens(), tuning=options)
