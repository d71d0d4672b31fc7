"""Edges of the operations for serving and experts: nothing to compute, 64 bits, and what is no number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, normal

from ejkernel import library
from ejkernel.library import (
    DecodeAttentionConfig,
    GatedDeltaRuleConfig,
    MoeCombineConfig,
    MoeConfig,
    QuantizedMatmulConfig,
    RaggedDotConfig,
    ResidualNormConfig,
    SampleConfig,
    ScaledMatmulConfig,
    TopKConfig,
)
from ejkernel.library.arguments import ArgumentError, ArgumentTypeError

BEYOND = 1 << 32
Q4, KEY = normal(2, 6, 2, 4), jax.random.key(0)
PAGES, TABLE, LENGTHS, ONE = normal(6, 4, 2, 8), jnp.array([[0, 1], [2, 3]]), jnp.array([5, 8]), normal(2, 4, 8)
EIGHT, SCALES = library.quantize(normal(8, 4))
NARROW, SCALE = library.quantize(normal(8, 8), jnp.float8_e4m3fn)
DECODE = [
    None,
    DecodeAttentionConfig("gather"),
    DecodeAttentionConfig("fused"),
    DecodeAttentionConfig("split", parts=2),
    DecodeAttentionConfig("loop", block=4),
]


def run(name, *args, **kwargs):
    """A call of the library that is never tuned."""
    return getattr(library, name)(*args, **kwargs, executor=UNTUNED)


def moe(x, logits, inner, **how):
    """A layer of three experts of this inner width."""
    up, down = normal(3, x.shape[-1], inner), normal(3, inner, x.shape[-1])
    return run("moe", x, logits, up, up, down, k=2, **how)


# Calls without a sum to add up, or without anything to add it up for, and the shapes of their results.
EMPTY = {
    "top_k of none": (lambda: run("top_k", normal(3, 5), 0), [(3, 0)] * 2),
    "top_k of nothing": (lambda: run("top_k", normal(3, 0), 0, cfg=TopKConfig("bits", bits=4)), [(3, 0)] * 2),
    "top_k without rows": (lambda: run("top_k", normal(0, 2000), 3, cfg=TopKConfig("parts")), [(0, 3)] * 2),
    "sample without rows": (lambda: run("sample", KEY, normal(0, 5), top_k=2, cfg=SampleConfig("sort")), [(0,)]),
    "moe without tokens": (lambda: moe(normal(0, 8), normal(0, 3), 4), [(0, 8)]),
    "moe without a width": (lambda: moe(normal(2, 5, 0), normal(2, 5, 3), 4), [(2, 5, 0)]),
    "moe without an inner width": (lambda: moe(normal(5, 8), normal(5, 3), 0), [(5, 8)]),
    "moe without an inner width, by cfg": (
        lambda: moe(normal(5, 8), normal(5, 3), 0, cfg=MoeConfig(experts=RaggedDotConfig("tiled", block_m=4))),
        [(5, 8)],
    ),
    "quantized_matmul without k": (lambda: run("quantized_matmul", normal(3, 0), EIGHT[:0], SCALES), [(3, 4)]),
    "quantized_matmul without k, by cfg": (
        lambda: run("quantized_matmul", normal(3, 0), EIGHT[:0], SCALES, cfg=QuantizedMatmulConfig("scaled")),
        [(3, 4)],
    ),
    "scaled_matmul without k": (lambda: run("scaled_matmul", NARROW[:, :0], NARROW[:0], 1.0, SCALE), [(8, 8)]),
    "scaled_matmul without k, by cfg": (
        lambda: run("scaled_matmul", NARROW[:, :0], NARROW[:0], SCALE, SCALE, cfg=ScaledMatmulConfig("blocks")),
        [(8, 8)],
    ),
    "float8_matmul without k": (lambda: run("float8_matmul", normal(2, 3, 0), normal(0, 4)), [(2, 3, 4)]),
    "quantize without rows": (lambda: library.quantize(normal(0, 4)), [(0, 4), (4,)]),
    "quantize without columns": (lambda: library.quantize(normal(4, 0), jnp.float8_e4m3fn), [(4, 0), ()]),
    "quantize groups without rows": (lambda: library.quantize(normal(0, 4), group=2), [(0, 4), (0, 4)]),
    "dequantize without rows": (lambda: library.dequantize(EIGHT[:0], SCALES), [(0, 4)]),
    "residual_norm without a width": (
        lambda: run("residual_norm", normal(3, 0), normal(3, 0), normal(0), kind="layer"),
        [(3, 0)] * 2,
    ),
    "residual_norm without rows, by cfg": (
        lambda: run("residual_norm", *[normal(0, 32)] * 2, normal(32), cfg=ResidualNormConfig("lanes", lanes=16)),
        [(0, 32)] * 2,
    ),
    "rms_norm without rows, by cfg": (
        lambda: run("rms_norm", normal(0, 32), normal(32), cfg=library.RmsNormConfig("lanes", lanes=16)),
        [(0, 32)],
    ),
    "linear_cross_entropy without a width": (
        lambda: run("linear_cross_entropy", normal(2, 3, 0), normal(0, 4), jnp.zeros((2, 3), jnp.int32)),
        [()],
    ),
    **{
        f"decode_attention without {what}, {cfg and cfg.implementation}": (
            lambda given=given, cfg=cfg: run("decode_attention", *given, cfg=cfg),
            [given[0].shape],
        )
        for cfg in DECODE
        for what, given in {
            "a width": (ONE[..., :0], PAGES[..., :0], PAGES[..., :0], TABLE, LENGTHS),
            "pages": (ONE, PAGES, PAGES, TABLE[:, :0], LENGTHS * 0),
            "sequences": (ONE[:0], PAGES, PAGES, TABLE[:0], LENGTHS[:0]),
        }.items()
    },
}


@pytest.mark.parametrize(("call", "shapes"), EMPTY.values(), ids=EMPTY)
def test_nothing_to_compute_has_a_result(call, shapes):
    """Zeros, ones for scales, or log(vocab): of the right shape, with a cfg as without, and the same twice."""
    for _ in range(2):
        made = jax.tree.leaves(call())
        assert [x.shape for x in made] == shapes
        assert all(len(np.unique(np.asarray(x, np.float32))) <= 1 for x in made)


def test_heads_without_a_width_see_all_keys_alike():
    """Every score is zero, so the output is the mean of the values, and so is its gradient."""
    q, v = normal(1, 3, 2, 0), normal(1, 5, 2, 4)
    k = normal(1, 5, 2, 0)

    for _ in range(2):
        out, pull = jax.vjp(lambda *given: run("attention", *given), q, k, v)
        np.testing.assert_allclose(out, jnp.broadcast_to(v.mean(1, keepdims=True), out.shape), rtol=1e-5)
        assert [x.shape for x in pull(out)] == [q.shape, k.shape, v.shape]
        np.testing.assert_allclose(run("attention", q, k, v), out, rtol=1e-5)


WIDE = {
    "lengths of pages": lambda: run(
        "decode_attention", ONE, PAGES, PAGES, TABLE, np.asarray(LENGTHS, np.int64) + BEYOND
    ),
    "page_table": lambda: run("decode_attention", ONE, PAGES, PAGES, np.asarray(TABLE, np.int64) + BEYOND, LENGTHS),
    "page_table to write": lambda: library.append_to_pages(
        PAGES, PAGES, ONE[:, :2], ONE[:, :2], np.asarray(TABLE, np.int64) + BEYOND, LENGTHS - 1
    ),
    "lengths to write": lambda: library.append_to_pages(
        PAGES, PAGES, ONE[:, :2], ONE[:, :2], TABLE, np.asarray(LENGTHS, np.int64) - 1 + BEYOND
    ),
    "lengths of a rule": lambda: run(
        "gated_delta_rule", Q4, Q4, Q4, *[Q4[..., 0]] * 2, lengths=np.array([3, 6]) + BEYOND
    ),
    "lengths of a state": lambda: run("linear_attention", Q4, Q4, Q4, lengths=np.array([3, 6]) + BEYOND),
    "places": lambda: run("moe_combine", normal(8, 4), normal(4, 2), np.arange(8).reshape(4, 2) + BEYOND),
    "numbers": lambda: run("top_k", np.arange(8) + BEYOND, 3),
}


@pytest.mark.parametrize("x64", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("call", WIDE.values(), ids=WIDE)
def test_64_bits_are_read_before_they_are_narrowed(call, x64):
    """What 32 bits would make a good value of is refused, and the message has the value as it was given."""
    with jax.enable_x64(x64), pytest.raises(ArgumentError, match="429496"):
        call()


def test_64_bits_that_fit_serve():
    """Integers of numpy have 64 bits by themselves."""
    table, lengths = np.asarray(TABLE, np.int64), np.asarray(LENGTHS, np.int64)
    right = run("decode_attention", ONE, PAGES, PAGES, TABLE, LENGTHS)

    np.testing.assert_allclose(run("decode_attention", ONE, PAGES, PAGES, table, lengths), right, rtol=1e-6)
    assert run("top_k", np.array([3, -5, 9]), 2)[0].tolist() == [9, 3]


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("cfg", DECODE[1:], ids=lambda cfg: cfg.implementation)
def test_pages_that_no_sequence_uses_need_not_be_numbers(cfg):
    """Memory that was never written may hold anything, and neither results nor gradients see it."""
    # The first sequence has one token on its second page, the second one fills its pages.
    bad = PAGES.at[1, 1:].set(jnp.nan).at[4:].set(jnp.inf)

    def total(q, k, v):
        return run("decode_attention", q, k, v, TABLE, LENGTHS, cfg=cfg).sum()

    for got, want in zip(
        jax.tree.leaves(jax.value_and_grad(total, argnums=(0, 1, 2))(ONE, bad, bad)),
        jax.tree.leaves(jax.value_and_grad(total, argnums=(0, 1, 2))(ONE, PAGES, PAGES)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize(
    ("name", "way"),
    [("gated_delta_rule", "scan"), ("gated_delta_rule", "chunked"), ("gated_linear_attention", "levels")],
)
def test_tokens_beyond_a_sequence_need_not_be_numbers(name, way):
    """Padding counts for nothing, in results, states and gradients."""
    gates = [-jnp.abs(Q4[..., 0])] * (2 if name == "gated_delta_rule" else 1)
    given = (Q4, Q4 / 4, Q4, *gates)
    cfg = GatedDeltaRuleConfig(way, None if way == "scan" else 4)

    def total(*arrays):
        out, state = run(name, *arrays, lengths=jnp.array([3, 6]), cfg=cfg)
        return out.sum() + state.sum()

    bad = [x.at[0, 3:].set(jnp.nan) for x in given]
    pulled = [jax.value_and_grad(total, argnums=tuple(range(len(given))))(*arrays) for arrays in (bad, given)]
    for got, want in zip(*map(jax.tree.leaves, pulled), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["unrolled", "reduce", "scatter"])
def test_rows_without_a_place_need_not_be_numbers(way):
    """A row that belongs to no token is not read, and its gradient is zero."""
    rows, places = normal(8, 4).at[6:].set(jnp.nan), jnp.array([[0, 3], [5, 2]])

    def total(rows, weights):
        return run("moe_combine", rows, weights, places, cfg=MoeCombineConfig(way)).sum()

    out, (d_rows, d_weights) = jax.value_and_grad(total, argnums=(0, 1))(rows, normal(2, 2))
    assert np.isfinite(out)
    assert np.isfinite(d_weights).all()
    assert not d_rows[6:].any()


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 4, "top_p": 0.5, "min_p": 0.1}],
    ids=str,
)
def test_a_logit_that_is_no_number_wins_its_row(filters):
    """As in JAX's argmax, whatever filters there are: a broken row is seen. Other rows draw what they drew."""
    logits = normal(4, 16)
    right = run("sample", KEY, logits, **filters)

    drawn = run("sample", KEY, logits.at[1, 5].set(jnp.nan), **filters)
    assert drawn.tolist() == [right[0], 5, right[2], right[3]]


def test_a_token_whose_router_is_no_number_spoils_no_other():
    """Its own output is no number; all other tokens have theirs."""
    x, logits = normal(5, 8), normal(5, 3)
    right, made = moe(x, logits, 4), moe(x, logits.at[1, 0].set(jnp.nan), 4)

    others = np.array([0, 2, 3, 4])
    assert np.isnan(made[1]).all()
    np.testing.assert_allclose(made[others], right[others], rtol=1e-5)


REFUSED = {
    "scale of pages": (lambda s: run("decode_attention", ONE, PAGES, PAGES, TABLE, LENGTHS, scale=s), "multiply q"),
    "scale of a rule": (lambda s: run("gated_delta_rule", Q4, Q4, Q4, *[Q4[..., 0]] * 2, scale=s), "multiply q"),
    "scale of a state": (lambda s: run("linear_attention", Q4, Q4, Q4, scale=s), "multiply q"),
}


@pytest.mark.parametrize("scale", ["half", jnp.ones(2), jnp.float32(0.5)], ids=["text", "vector", "array"])
@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_a_scale_is_a_number(call, words, scale):
    """A trace could not read an array, so none is taken outside of one either."""
    with pytest.raises(ArgumentTypeError, match=words):
        call(scale)


def test_a_number_of_numpy_scales_narrow_queries():
    """float32 is a number there, and makes nothing wide."""
    narrow = Q4.astype(jnp.bfloat16)
    given = (narrow, narrow, narrow)
    one, other = (run("linear_attention", *given, scale=scale)[0] for scale in (np.float32(0.5), 0.5))

    assert one.dtype == jnp.bfloat16
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("number", [10**400, 1e300, float("nan"), float("inf")], ids=["huge", "large", "nan", "inf"])
def test_a_number_that_float32_has_not_is_a_sentence(number):
    """In place of an overflow somewhere inside."""
    with pytest.raises(ArgumentError, match="float32"):
        run("sample", KEY, normal(2, 8), temperature=number)
    with pytest.raises(ArgumentError, match=r"a_scales=.* is no finite float32"):
        run("scaled_matmul", NARROW, NARROW, number, 1.0)
