"""Soft caps, sinks, values of another width and what is hidden and no number: every plain way against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, normal, numeric_pull, pull

from ejkernel.library import Attention, AttentionConfig, attention
from ejkernel.ops import Invocation, check

WAYS = [
    AttentionConfig("sliced"),
    AttentionConfig("sliced", block_q=3),
    AttentionConfig("chunked", block_q=4, block_k=3),
]


def exact(q, k, v, sinks=None, *, cap=None, causal=False, mask=None, bias=None):
    """In float64, head by head."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    heads, each = q.shape[2], q.shape[2] // k.shape[2]
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b in range(q.shape[0]):
        for h in range(heads):
            scores = q[b, :, h] @ k[b, :, h // each].T * q.shape[-1] ** -0.5
            scores = scores if bias is None else scores + np.asarray(bias, np.float64)[0, h]
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            seen = np.tril(np.ones(scores.shape, bool)) if causal else np.ones(scores.shape, bool)
            seen = seen if mask is None else seen & np.asarray(mask)[0, 0]
            weights = np.where(seen, np.exp(scores), 0.0)
            norm = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64)[h]))
            shown = np.nan_to_num(v[b, :, h // each])
            out[b, :, h] = np.where(norm > 0, weights @ shown / np.where(norm == 0, 1, norm), 0)
    return out


def inputs(dtype="float32", width=4):
    """Four heads on two, eight queries on seven keys, values of another width."""
    q, k = normal(2, 8, 4, 6, dtype=dtype), normal(2, 7, 2, 6, dtype=dtype, seed=1)
    return q, k, normal(2, 7, 2, width, dtype=dtype, seed=2), normal(4, seed=3)


@pytest.mark.thinned
@pytest.mark.parametrize(("dtype", "causal"), [("float32", True), ("float16", False)])
@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_soft_caps_sinks_and_widths_are_those_of_float64(way, causal, dtype):
    """All of them at once, with a bias, for grouped heads."""
    q, k, v, sinks = inputs(dtype)
    bias = normal(1, 4, 8, 7, seed=5)
    given = {"causal": causal, "bias": bias, "logits_soft_cap": 1.5, "sinks": sinks, "cfg": way, "executor": UNTUNED}
    found = attention(q, k, v, **given)
    assert_near(found, exact(q, k, v, sinks, cap=1.5, causal=causal, bias=bias), dtype)


@pytest.mark.parametrize("way", [WAYS[1], pytest.param(WAYS[2], marks=pytest.mark.slow)], ids=str)
def test_gradients_are_those_of_float64(way):
    """Of queries, keys, values and sinks."""
    q, k, v, sinks = (x[:1] if x.ndim == 4 else x for x in inputs())
    dy = normal(1, 8, 4, 4, seed=9)

    def fn(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, logits_soft_cap=2.0, causal=True, cfg=way, executor=UNTUNED)

    found = pull(fn, (q, k, v, sinks), dy)
    for at, gradient in enumerate(found):
        wanted = numeric_pull(lambda *a: exact(*a, cap=2.0, causal=True), (q, k, v, sinks), dy, at)
        assert_near(gradient, wanted, "float32", slack=10)


@pytest.mark.thinned
@pytest.mark.parametrize("hidden_by", ["mask", "lengths"])
@pytest.mark.parametrize(
    "way", [AttentionConfig("xla"), WAYS[0], pytest.param(WAYS[2], marks=pytest.mark.slow)], ids=str
)
def test_what_is_hidden_need_not_be_a_number(way, hidden_by):
    """Neither results nor gradients see it: keys behind a mask, and keys and queries beyond their lengths."""
    q, k, v, _ = inputs(width=6)
    seen = jnp.arange(7) < 5
    k, v = (jnp.where(seen[None, :, None, None], x, jnp.nan) for x in (k, v))
    if hidden_by == "mask":
        how = {"mask": jnp.broadcast_to(seen, (2, 1, 8, 7))}
    else:
        q = q.at[:, 6:].set(jnp.inf)
        how = {"key_value_lengths": jnp.array([5, 5]), "query_lengths": jnp.array([6, 6])}

    def fn(q, k, v):
        return attention(q, k, v, cfg=way, executor=UNTUNED, **how)

    clean = [jnp.nan_to_num(x, nan=0.0, posinf=0.0) for x in (q, k, v)]
    np.testing.assert_allclose(fn(q, k, v), fn(*clean), rtol=1e-5, atol=1e-6)
    dy = normal(2, 8, 4, 6, seed=9)
    for one, other in zip(pull(fn, (q, k, v), dy), pull(fn, tuple(clean), dy), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_mask_of_each_head_hides_from_its_keys_alone():
    """Keys of one head may be hidden where another head sees them."""
    q, k, v, _ = inputs(width=6)
    mask = jnp.ones((1, 4, 8, 7), bool).at[:, :2, :, 3].set(False)
    k = k.at[:, 3, 0].set(jnp.nan)
    found = attention(q, k, v, mask=mask, cfg=WAYS[0], executor=UNTUNED)
    assert bool(jnp.isfinite(found).all())


def test_without_a_way_of_jax_s_own_the_heuristic_is_a_plain_one():
    """And those say why they do not take the call."""
    q, k, v, sinks = inputs()
    inv = Invocation("x", (q, k, v, None, None, None, None, sinks), {"scale": 0.4, "logits_soft_cap": 2.0})
    kernel = Attention()
    for hook in (kernel.heuristic_cfg, kernel.heuristic_cfg_cpu, kernel.heuristic_cfg_gpu):
        assert kernel.valid_cfg(inv, hook(inv)) is True
        assert hook(inv).implementation in ("sliced", "chunked")
    assert "no soft cap and no sinks" in kernel.valid_cfg(inv, AttentionConfig("xla"))
    with pytest.raises(ValueError, match="values as wide as keys, not 4"):
        attention(q, k, v, cfg=AttentionConfig("xla"), executor=UNTUNED)


def test_every_candidate_of_a_call_with_all_of_it_agrees():
    """As tuning on this machine checks them, gradients included."""
    q, k, v, sinks = inputs()
    trials = check(Attention(), q, k, v, None, None, None, None, sinks, scale=0.4, causal=True, logits_soft_cap=5.0)
    assert {trial.status for trial in trials} <= {"ok", "invalid", "twin"}
    assert sum(trial.status == "ok" for trial in trials) >= 2


def test_the_gradient_may_be_another_way_s():
    """Forward and backward are two fields of the cfg: the gradient is computed from the arguments by the other."""
    q, k, v, _ = inputs(width=6)
    kernel, cfg = Attention(), AttentionConfig("sliced", block_q=4, block_k=3, backward="chunked")
    how = {"scale": 0.4, "causal": True}
    out, kept = jax.jit(lambda *a: kernel.fwd_with_residuals_gpu(*a, **how, cfg=cfg))(q, k, v)
    assert kept is None
    dy = np.ones_like(out)
    grads = jax.jit(lambda *a: kernel.vjp_gpu(None, out, dy, *a, **how, cfg=cfg))(q, k, v)
    wanted = pull(lambda *a: kernel.run(*a, **how, cfg=AttentionConfig("xla")), (q, k, v), dy)
    for one, other in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    program = jax.make_jaxpr(lambda *a: kernel.vjp_gpu(None, out, out, *a, scale=0.4, cfg=cfg))(q, k, v)
    assert "scan" in str(program)


def test_a_backward_that_cannot_run_rules_the_cfg_out():
    """With its name."""
    q, k, v, _ = inputs(width=6)
    inv = Invocation("x", (q, k, v), {"scale": 0.4})
    assert Attention().valid_cfg(inv, AttentionConfig("sliced", backward="chunked")) is True
    assert "cudnn cannot compute the gradient" in Attention().valid_cfg(
        inv, AttentionConfig("sliced", backward="cudnn")
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logits_soft_cap": 0.0}, "logits_soft_cap must be a finite number over 0"),
        ({"logits_soft_cap": "30"}, "logits_soft_cap must be a finite number over 0"),
        ({"sinks": jnp.ones(3)}, r"a logit for each head of q, \(4,\); got float32 of shape \(3,\)"),
        ({"sinks": jnp.ones(4, int)}, "sinks must be a floating-point array"),
    ],
)
def test_bad_input_is_refused(given, message):
    """With a sentence that says what is wanted."""
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, **given)


def test_keys_and_values_differ_in_width_alone():
    """Other differences are an error that names both shapes."""
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match="same shape but for the last axis"):
        attention(q, k, v[:, :5])
