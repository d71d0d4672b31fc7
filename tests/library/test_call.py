"""What a call of the library costs once it is warm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, normal

from ejkernel.library import attention, layer_norm, linear_cross_entropy, matmul, ragged_dot, rms_norm, softmax
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Tuner, calls_made

Q, X, W = normal(1, 8, 2, 4), normal(8, 8), normal(8)
B = normal(8, 8, dtype="bfloat16")
CALLS = {
    "attention": lambda run: attention(Q, Q, Q, causal=True, executor=run),
    "attention with a mask": lambda run: attention(Q, Q, Q, mask=jnp.ones((1, 1, 8, 8), bool), executor=run),
    "layer_norm": lambda run: layer_norm(X, W, W, executor=run),
    "linear_cross_entropy": lambda run: linear_cross_entropy(X, X, jnp.zeros(8, jnp.int32), executor=run),
    "matmul": lambda run: matmul(B, B, W, executor=run),
    "ragged_dot": lambda run: ragged_dot(X, normal(2, 8, 8), jnp.array([4, 4]), executor=run),
    "rms_norm": lambda run: rms_norm(X, W, executor=run),
    "softmax": lambda run: softmax(X, executor=run),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_takes_the_short_way(name, monkeypatch):
    """The second call of arrays and plain options is looked up by its types, and nothing is taken apart."""
    CALLS[name](UNTUNED)
    for way in ("call_anew", "call_planned"):
        monkeypatch.setattr(Executor, way, lambda *_: pytest.fail("took the long way"))

    CALLS[name](UNTUNED)


@pytest.mark.parametrize("name", CALLS)
def test_nothing_relies_on_promotion_of_ranks(name):
    """Every candidate keeps to JAX's strictest setting, as the programs of some users do."""
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(0, 1))
    with jax.numpy_rank_promotion("raise"):
        CALLS[name](Executor(selector))

    assert {trial.status for trial in selector.tuner.record.trials} <= {"ok", "invalid"}


LABELS = jnp.zeros(8, jnp.int32)
# An option as numpy and as Python write it.
NUMBERS = {
    "axis": (lambda run, n: softmax(X, axis=n, executor=run), np.int64(0), 0),
    "window": (lambda run, n: attention(Q, Q, Q, window=n, executor=run), np.int32(2), 2),
    "scale": (lambda run, n: attention(Q, Q, Q, scale=n, executor=run), np.float32(0.5), 0.5),
    "causal": (lambda run, n: attention(Q, Q, Q, causal=n, executor=run), np.bool_(True), True),
    "eps": (lambda run, n: rms_norm(X, eps=n, executor=run), np.float32(0.5), 0.5),
    "transpose_a": (lambda run, n: matmul(X, X, transpose_a=n, executor=run), np.bool_(True), True),
    "ignore_index": (
        lambda run, n: linear_cross_entropy(X, X, LABELS, ignore_index=n, executor=run),
        np.int64(-1),
        -1,
    ),
    "z_loss": (lambda run, n: linear_cross_entropy(X, X, LABELS, z_loss=n, executor=run), np.float32(0.5), 0.5),
    "label_smoothing": (
        lambda run, n: linear_cross_entropy(X, X, LABELS, label_smoothing=n, executor=run),
        np.float32(0.5),
        0.5,
    ),
    "vocab_first": (
        lambda run, n: linear_cross_entropy(X, X, LABELS, vocab_first=n, executor=run),
        np.bool_(True),
        True,
    ),
}


@pytest.mark.parametrize(("act", "theirs", "ours"), NUMBERS.values(), ids=NUMBERS)
def test_a_number_of_numpy_is_a_number(act, theirs, ours):
    """An option makes the same call, with the same key, whoever's number it is."""
    with calls_made() as calls:
        for number in (theirs, ours):
            act(UNTUNED, number)
    assert len(calls.entries) == 1
