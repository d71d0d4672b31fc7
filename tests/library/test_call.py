"""What a call of the library costs once it is warm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, normal

from ejkernel import library
from ejkernel.library import (
    append_to_pages,
    attention,
    decode_attention,
    dequantize,
    float8_matmul,
    gated_delta_rule,
    gated_linear_attention,
    layer_norm,
    linear_attention,
    linear_cross_entropy,
    matmul,
    moe,
    moe_combine,
    moe_dispatch,
    quantize,
    quantized_matmul,
    ragged_dot,
    residual_norm,
    rms_norm,
    sample,
    scaled_matmul,
    softmax,
    top_k,
)
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Tuner, calls_made
from ejkernel.ops.core.bind import bind
from ejkernel.ops.core.errors import OpsError
from ejkernel.ops.core.kernel import variant

Q, X, W = normal(1, 8, 2, 4), normal(8, 8), normal(8)
B = normal(8, 8, dtype="bfloat16")
GATES, STACK, KEY = -jnp.abs(normal(1, 8, 2)), normal(2, 8, 8), jax.random.key(0)
PAGES, TABLE, ONE, LENGTHS = normal(4, 4, 2, 4), jnp.array([[2, 0]]), normal(1, 2, 4), jnp.array([5])
EIGHT, NARROW = jnp.ones((8, 8), jnp.int8), jnp.ones((8, 8), jnp.float8_e4m3fn)
SERVING = {
    "append_to_pages": lambda run: append_to_pages(PAGES, PAGES, ONE, ONE, TABLE, LENGTHS),
    "decode_attention": lambda run: decode_attention(ONE, PAGES, PAGES, TABLE, LENGTHS, window=4, executor=run),
    "decode_attention without pages": lambda run: decode_attention(Q[:, :1], Q, Q, None, LENGTHS, executor=run),
    "dequantize": lambda run: dequantize(EIGHT, W),
    "float8_matmul": lambda run: float8_matmul(X, X, executor=run),
    "gated_delta_rule": lambda run: gated_delta_rule(Q, Q, Q, GATES, GATES, lengths=LENGTHS, scale=0.5, executor=run),
    "gated_linear_attention": lambda run: gated_linear_attention(Q, Q, Q, GATES, executor=run),
    "linear_attention": lambda run: linear_attention(Q, Q, Q, decay=jnp.ones(2), executor=run),
    "moe": lambda run: moe(X, normal(8, 2), STACK, STACK, STACK, k=1, executor=run),
    "moe_combine": lambda run: moe_combine(X, normal(4, 2), jnp.arange(8).reshape(4, 2), executor=run),
    "moe_dispatch": lambda run: moe_dispatch(X, normal(8, 4), k=2, executor=run),
    "quantize": lambda run: quantize(X, jnp.float8_e4m3fn),
    "quantized_matmul": lambda run: quantized_matmul(X, EIGHT, W, executor=run),
    "residual_norm": lambda run: residual_norm(X, X, W, kind="rms", eps=1e-5, executor=run),
    "sample": lambda run: sample(KEY, X, temperature=0.7, top_k=5, executor=run),
    "scaled_matmul": lambda run: scaled_matmul(NARROW, NARROW, 0.5, 2, executor=run),
    "top_k": lambda run: top_k(X, 3, executor=run),
}
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


@pytest.mark.parametrize("name", [*CALLS, *SERVING])
def test_a_warm_call_takes_the_short_way(name, monkeypatch):
    """The second call of arrays and plain options is looked up by its types, and nothing is taken apart."""
    call = (CALLS | SERVING)[name]
    first = jax.tree.leaves(call(UNTUNED))
    for way in ("call_anew", "call_planned"):
        monkeypatch.setattr(Executor, way, lambda *_: pytest.fail("took the long way"))

    for one, other in zip(first, jax.tree.leaves(call(UNTUNED)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_function_has_its_warm_call():
    """A function of the library that is not called above fails here; those of providers compute nothing."""
    public = {name for name in library.__all__ if name[0].islower() and "provider" not in name}
    assert public == {name.split()[0] for name in (*CALLS, *SERVING)}


def test_a_server_s_temperatures_share_one_program():
    """A number for each request compiles nothing, and draws what an array of it draws."""
    for temperature in (0.5, 0.6, 0.7):
        sample(KEY, X, temperature=temperature, executor=UNTUNED)
    entries = len(UNTUNED._table)

    for temperature in (0.8, 0.9, 1, 2):
        one = sample(KEY, X, temperature=temperature, executor=UNTUNED)
        np.testing.assert_array_equal(one, sample(KEY, X, temperature=jnp.full(8, temperature), executor=UNTUNED))
    assert len(UNTUNED._table) == entries


def test_a_tuning_does_not_rely_on_promotion_of_ranks():
    """Its inputs, checks and candidates keep to JAX's strictest setting, as the programs of some users do."""
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(0, 1))
    with jax.numpy_rank_promotion("raise"):
        CALLS["rms_norm"](Executor(selector))

    assert {trial.status for trial in selector.tuner.record.trials} <= {"ok", "invalid"}


class Asked:
    """A chooser that takes the heuristic cfg, and remembers what it was asked for."""

    def __init__(self):
        self.questions = []

    def choose(self, inv, kernel):
        self.questions.append((inv, kernel))
        return variant(kernel, "heuristic_cfg", platform="cpu")(inv)


@pytest.mark.parametrize("name", [*CALLS, *SERVING])
def test_no_way_relies_on_promotion_of_ranks(name):
    """Nor do the functions around their kernels, nor gradients; seen by tracing alone."""
    asked = Asked()
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(lambda: {**CALLS, **SERVING}[name](Executor(asked)))
        # Three functions of serving make no kernel call.
        assert asked.questions or name in ("append_to_pages", "dequantize", "quantize")
        for inv, kernel in asked.questions:
            for cfg in (cfg for cfg in kernel.candidate_cfgs(inv) if kernel.valid_cfg(inv, cfg) is True):
                fn = bind(kernel, cfg, inv, "cpu")
                jax.eval_shape(lambda fn=fn, inv=inv: _pulled(fn, inv))


def _pulled(fn, inv):
    args = [None if arg is None else jnp.zeros(arg.shape, arg.dtype) if _is_float(arg) else arg for arg in inv.args]

    def of_floats(*given):
        left = iter(given)
        return fn(*(next(left) if arg is not None and _is_float(arg) else arg for arg in args), **inv.kwargs)

    out, pull = jax.vjp(of_floats, *(arg for arg in args if arg is not None and _is_float(arg)))
    return pull(jax.tree.map(_ones_like, out))


def _is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def _ones_like(x):
    return jnp.ones_like(x) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0)


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
    """An option makes the same call, with the same key, by a number of Python's or of numpy's."""
    with calls_made() as calls:
        for number in (theirs, ours):
            act(UNTUNED, number)
    assert len(calls.entries) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: softmax(X, cfg=library.SoftmaxConfig("lanes", lanes=3)), "3 lanes do not divide rows of 8"),
        (lambda: softmax(X, cfg=library.SoftmaxConfig("split", parts=3)), "3 parts do not divide rows of 8"),
        (lambda: softmax(X, cfg=library.SoftmaxConfig("lanes", lanes=-2)), "lanes=-2; give a size from 1 on"),
        (lambda: residual_norm(X, X, W, cfg=library.ResidualNormConfig("lanes", lanes=3)), "3 lanes do not divide"),
        (lambda: attention(Q, Q, Q, cfg=library.AttentionConfig("cudnn")), "cudnn runs on GPUs alone"),
        (lambda: decoded("cudnn"), "cudnn runs on GPUs alone"),
        (lambda: decoded("split", parts=-2), "parts=-2; give a size from 1 on"),
        (lambda: decoded("loop", block=-2), "block=-2; give a size from 1 on"),
        (
            lambda: ragged_dot(X, normal(2, 8, 8), jnp.array([4, 4]), cfg=library.RaggedDotConfig("tiled", block_m=-4)),
            "block_m=-4; give a size from 1 on",
        ),
        (
            lambda: linear_cross_entropy(
                X, X, jnp.zeros(8, jnp.int32), cfg=library.LinearCrossEntropyConfig("chunked_tokens", chunk=-2)
            ),
            "chunk=-2; give a size from 1 on",
        ),
        (
            lambda: gated_delta_rule(Q, Q, Q, GATES, GATES, cfg=library.GatedDeltaRuleConfig("chunked", -4)),
            "chunk=-4; give a size from 1 on",
        ),
        (lambda: sample(KEY, X, cfg=library.SampleConfig("nope")), "names no implementation of sample"),
        (
            lambda: moe(X, normal(8, 2), STACK, STACK, STACK, k=1, cfg=library.RaggedDotConfig("xla")),
            "a RaggedDotConfig; use a MoeConfig",
        ),
    ],
)
def test_a_config_given_by_hand_that_cannot_serve_says_why(call, words):
    """An error of the library's own, in place of one of JAX."""
    with pytest.raises(OpsError, match=words):
        call()


def decoded(way, **sizes):
    cfg = library.DecodeAttentionConfig(way, **sizes)
    return decode_attention(ONE, PAGES, PAGES, TABLE, LENGTHS, cfg=cfg, executor=UNTUNED)
