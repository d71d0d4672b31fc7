"""What a call of the library costs once it is warm."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from fakes_library import UNTUNED, normal

from ejkernel.library import attention, layer_norm, linear_cross_entropy, matmul, ragged_dot, rms_norm, softmax
from ejkernel.ops import Executor

Q, X, W = normal(1, 8, 2, 4), normal(8, 8), normal(8)
CALLS = {
    "attention": lambda: attention(Q, Q, Q, causal=True, executor=UNTUNED),
    "attention with a mask": lambda: attention(Q, Q, Q, mask=jnp.ones((1, 1, 8, 8), bool), executor=UNTUNED),
    "layer_norm": lambda: layer_norm(X, W, W, executor=UNTUNED),
    "linear_cross_entropy": lambda: linear_cross_entropy(X, X, jnp.zeros(8, jnp.int32), executor=UNTUNED),
    "matmul": lambda: matmul(X, X, executor=UNTUNED),
    "ragged_dot": lambda: ragged_dot(X, normal(2, 8, 8), jnp.array([4, 4]), executor=UNTUNED),
    "rms_norm": lambda: rms_norm(X, W, executor=UNTUNED),
    "softmax": lambda: softmax(X, executor=UNTUNED),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_takes_the_short_way(name, monkeypatch):
    """The second call of arrays and plain options is looked up by its types, and nothing is taken apart."""
    CALLS[name]()
    monkeypatch.setattr(Executor, "_call", lambda *_: pytest.fail("took the long way"))

    CALLS[name]()
