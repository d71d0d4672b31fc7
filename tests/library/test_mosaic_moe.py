"""Experts by Mosaic GPU: rows there and back and gated products, interpreted and lowered for a Hopper GPU.

Covers `library/mosaic/token_rows.py`, `library/moe_combine.py` and `library/moe_experts.py`.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, normal, value_and_pull, wide
from fakes_mosaic import asked, hopper, lowered_by_mosaic, needs_loops, needs_mosaic, races

from ejkernel.library import (
    MoeCombine,
    MoeCombineConfig,
    MoeDispatch,
    MoeDispatchConfig,
    RaggedDot,
    RaggedDotConfig,
    moe_combine,
    moe_dispatch,
)
from ejkernel.library.moe_experts import MoeExperts
from ejkernel.library.mosaic.tiles import rolling_refuses
from ejkernel.library.ragged_dot_tiles import masked
from ejkernel.ops import Invocation

__all__ = ["asked", "races"]
pytestmark = needs_mosaic
SENT, SUMMED = MoeDispatchConfig("mosaic"), MoeCombineConfig("mosaic")
FUSED, ROLLING = (RaggedDotConfig(way, 128, 256, 64, None, 4) for way in ("mosaic_gated", "mosaic_rolling"))
NARROW = jnp.dtype("bfloat16")


def placed(tokens, k, width, dtype):
    """Rows of tokens and of experts, weights, and a place for each row."""
    places = np.random.default_rng(0).permutation(tokens * k).reshape(tokens, k).astype("int32")
    rows = normal(tokens * k, width, dtype=dtype, seed=1)
    return normal(tokens, width, dtype=dtype), rows, normal(tokens, k, seed=2), jnp.asarray(places)


def shaped(*shapes):
    """Arrays of which only shape and dtype are known."""
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]


# Whole loads, a row that ends within a load, and one that two warpgroups share.
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((5, 3, 256), "bfloat16"),
        pytest.param((3, 2, 200), "float32", marks=pytest.mark.slow),
        pytest.param((3, 4, 5000), "float16", marks=[needs_loops, pytest.mark.slow]),
    ],
)
def test_rows_go_to_their_places_and_come_back_as_sums(races, shape, dtype):
    """With their gradients, each added up in float32 and rounded once."""
    x, rows, weights, places = placed(*shape, dtype)
    there, by = np.asarray(places), wide(weights)[:, :, None]

    def back(rows, weights):
        return moe_combine(rows, weights, places, cfg=SUMMED, executor=UNTUNED)

    made, pull = jax.vjp(back, rows, weights)
    d_rows, d_weights = pull(x)
    towards = np.zeros(rows.shape)
    towards[there] = by * wide(x)[:, None]
    assert_near(made, np.sum(wide(rows)[there] * by, axis=1), dtype, slack=0.5)
    assert_near(d_rows, towards, dtype, slack=0.5)
    assert_near(d_weights, np.einsum("tkd,td->tk", wide(rows)[there], wide(x)), "float32")


@pytest.mark.parametrize("width", [256, pytest.param(200, marks=pytest.mark.slow)])
def test_each_token_is_read_once_and_copied_to_its_experts(races, width):
    """The order is that of counting, and the gradient the sum of the copies' gradients."""
    x, logits = normal(6, width, dtype="bfloat16"), normal(6, 4, seed=1)
    ways = [MoeDispatchConfig("count"), SENT]

    def sent(x, cfg):
        return moe_dispatch(x, logits, k=2, cfg=cfg, executor=UNTUNED)

    right, ours = (sent(x, cfg) for cfg in ways)
    for one, other in zip(ours, right, strict=True):
        np.testing.assert_array_equal(one, other)
    dy = normal(12, width, dtype="bfloat16", seed=3)
    (found,) = jax.vjp(lambda x: sent(x, SENT).rows, x)[1](dy)
    assert_near(found, wide(dy)[np.asarray(right.places)].sum(1), "bfloat16", slack=0.5)


def test_rows_without_a_place_have_gradients_of_zero(races):
    """The kernel writes rows that have one alone, so plain JAX computes these."""
    _, rows, weights, places = placed(4, 2, 128, "float32")
    rows = jnp.concatenate([rows, rows[:3]])
    how = {"cfg": SUMMED, "executor": UNTUNED}
    out, pull = jax.vjp(lambda rows: moe_combine(rows, weights, places, **how), rows)
    np.testing.assert_array_equal(pull(out)[0][8:], 0)


@pytest.mark.slow
@needs_loops
@pytest.mark.parametrize("cfg", [FUSED, ROLLING], ids=lambda cfg: cfg.implementation)
def test_experts_have_the_gradients_of_plain_jax(races, cfg):
    """Of rows and all matrices, whatever computes them."""
    rows, sizes = normal(128, 256, dtype="bfloat16"), jnp.asarray((50, 78), jnp.int32)
    matrices = [normal(2, 256, 256, dtype="bfloat16", seed=seed) / 16 for seed in (1, 2, 4)]
    dy = normal(128, 256, dtype="bfloat16", seed=3)

    def pulled(cfg, *arrays):
        out, pull = jax.vjp(lambda *a: UNTUNED(MoeExperts(), *a, sizes, cfg=cfg), *arrays)
        return out, *pull(dy.astype(out.dtype))

    found = pulled(cfg, rows, *matrices)
    right = pulled(RaggedDotConfig("masked"), *(x.astype(jnp.float32) for x in (rows, *matrices)))
    for one, other in zip(found, right, strict=True):
        assert_near(one, wide(other), "bfloat16")


@needs_loops
@pytest.mark.parametrize(
    ("block_n", "width", "inner"),
    [
        (128, 128, 128),
        pytest.param(256, 192, 192, marks=pytest.mark.slow),
        pytest.param(256, 192, 320, marks=pytest.mark.slow),
    ],
    ids=["whole tiles", "parts of tiles", "parts of several tiles"],
)
def test_gradients_of_a_group_without_rows_and_of_rows_without_a_group_are_those_of_plain_jax(
    races, block_n, width, inner
):
    """Of tiles that a cfg by hand may have, though `valid_cfg` refuses those that are not whole."""
    rows, sizes = normal(136, width, dtype="bfloat16"), jnp.asarray((50, 0, 70), jnp.int32)
    shapes = [(3, width, inner), (3, width, inner), (3, inner, width)]
    matrices = [normal(*shape, dtype="bfloat16", seed=seed) / 16 for seed, shape in enumerate(shapes, start=1)]
    dy = normal(136, width, dtype="bfloat16", seed=4)

    def plain(rows, gate, up, down):
        def dot(lhs, matrix):
            return masked(lhs, matrix, sizes, transposed=False, dtype=jnp.float32)

        return dot(jax.nn.silu(dot(rows, gate)) * dot(rows, up), down)

    cfg = replace(FUSED, block_n=block_n)
    found = value_and_pull(lambda *a: UNTUNED(MoeExperts(), *a, sizes, cfg=cfg), (rows, *matrices), dy)
    arrays = [x.astype(jnp.float32) for x in (rows, *matrices)]
    for one, other in zip(found, value_and_pull(plain, arrays, dy.astype(jnp.float32)), strict=True):
        assert_near(one, wide(other), "bfloat16")
    assert not np.any(found[1][120:])
    assert not any(np.any(made[1]) for made in found[2:])


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("cfg", [RaggedDotConfig("masked"), RaggedDotConfig("tiled", block_m=16)])
def test_plain_experts_have_the_gradients_that_jax_derives(cfg):
    """The rule for all three products, in float32."""
    arrays = [normal(24, 8), normal(3, 8, 16, seed=1), normal(3, 8, 16, seed=2), normal(3, 16, 8, seed=4)]
    sizes, dy = jnp.asarray((5, 0, 19)), normal(24, 8, seed=3)

    def plain(rows, gate, up, down):
        def dot(lhs, matrix):
            return masked(lhs, matrix, sizes, transposed=False, dtype=jnp.float32)

        return dot(jax.nn.silu(dot(rows, gate)) * dot(rows, up), down)

    found = value_and_pull(lambda *a: UNTUNED(MoeExperts(), *a, sizes, cfg=cfg), arrays, dy)
    for one, other in zip(found, value_and_pull(plain, arrays, dy), strict=True):
        assert_near(one, wide(other), "float32")


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((8192, 4, 2048), "bfloat16"), ((64, 8, 7168), "bfloat16"), ((100, 2, 200), "float32")]
)
@pytest.mark.parametrize("mapped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_and_their_gradients_are_lowered_for_a_gpu(shape, dtype, mapped):
    """Two kernels of either, under a vmap too."""
    tokens, k, width = shape

    def both(x, rows, weights, experts, places):
        sent = MoeDispatch().run(x, experts, count=8, cfg=SENT)
        d_x = MoeDispatch().vjp(places, sent, sent, x, experts, count=8, cfg=SENT)
        out = MoeCombine().run(rows, weights, places, cfg=SUMMED)
        return sent, d_x, out, MoeCombine().vjp((), out, out, rows, weights, places, permuted=True, cfg=SUMMED)

    shapes = ((tokens, width), dtype), ((tokens * k, width), dtype), ((tokens, k), "float32")
    shapes = shaped(*shapes, *[((tokens, k), "int32")] * 2)
    if mapped:
        both, shapes = jax.vmap(both), [jax.ShapeDtypeStruct((3, *one.shape), one.dtype) for one in shapes]
    text = lowered_by_mosaic(both, *shapes)
    for name in ("sent", "summed", "pulled"):
        assert f"library_moe_{name}" in text


@needs_loops
@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_and_their_gradients_are_lowered_for_a_gpu(x64):
    """Two kernels forward; backward one for the gate, one for the rows, and one for all matrices."""
    kernel = MoeExperts()

    def both(rows, gate, up, down, sizes):
        out, kept = kernel.fwd_with_residuals(rows, gate, up, down, sizes, cfg=FUSED)
        back = kernel.vjp(kept, out, out, rows, gate, up, down, sizes, cfg=FUSED)
        return kernel.run(rows, gate, up, down, sizes, cfg=FUSED), back

    upwards, down = ((8, 512, 768), NARROW), ((8, 768, 512), NARROW)
    with jax.enable_x64(x64):
        text = lowered_by_mosaic(both, *shaped(((1024, 512), NARROW), upwards, upwards, down, ((8,), "int32")))
    for name in ("gated", "pair", "gated_back", "dot_rolling", "dot_outer_rolling"):
        assert f"library_ragged_{name}" in text


def test_what_cannot_run_says_why(monkeypatch):
    """By the width and dtype of rows, how many a token has, whole tiles, and GPU."""
    found = hopper(monkeypatch)
    monkeypatch.setattr(sys.modules["ejkernel.library.ragged_dot"], "device_of", lambda inv: found)
    x, experts = shaped(((64, 256), NARROW), ((64, 4), "int32"))
    inv = Invocation("x", (x, experts), {"count": 8})
    assert MoeDispatch().valid_cfg(inv, SENT) is True
    assert SENT in MoeDispatch().candidate_cfgs_gpu(inv)
    rows, weights, places = shaped(((1280, 64), NARROW), ((64, 20), "float32"), ((64, 20), "int32"))
    inv = Invocation("x", (rows, weights, places), {})
    assert "20 rows of a token" in MoeCombine().valid_cfg(inv, SUMMED)
    assert MoeCombine().valid_cfg(inv, MoeCombineConfig("reduce")) is True
    inv = Invocation("x", (x, *shaped(((64, 4), "float32"), ((64, 4), "int32"))), {})
    assert MoeCombine().valid_cfg(inv, SUMMED) is True
    assert SUMMED in MoeCombine().candidate_cfgs_gpu(inv)
    narrow = Invocation("x", shaped(((64, 64), NARROW), ((64, 4), "int32")), {})
    assert "shorter than the 128" in MoeDispatch().valid_cfg(narrow, SENT)
    double = Invocation("x", shaped(((64, 256), "float64"), ((64, 4), "int32")), {})
    assert "not float" in MoeDispatch().valid_cfg(double, SENT) or not jax.config.jax_enable_x64
    upwards, down = ((8, 512, 768), NARROW), ((8, 768, 512), NARROW)
    call = shaped(((1024, 512), NARROW), upwards, upwards, down, ((8,), "int32"))
    inv = Invocation("x", tuple(call), {})
    if jax.__version_info__ >= (0, 10, 2):
        assert MoeExperts().valid_cfg(inv, FUSED) is True
        assert "not whole tiles" in rolling_refuses(1024, (512, 768 - 64), (128, 256, 64))
        assert "not whole tiles" in rolling_refuses(64, (512, 768), (128, 256, 64))
    assert "block_n must be 128 at least" in MoeExperts().valid_cfg(inv, replace(FUSED, block_n=64))
    assert FUSED in MoeExperts().candidate_cfgs_gpu(inv)
    assert ROLLING in RaggedDot().candidate_cfgs_gpu(Invocation("x", (call[0], call[1], call[4]), {}))
    found.compute_capability = "10.0"
    assert "capability 9, not 10.0" in MoeExperts().valid_cfg(inv, FUSED) or jax.__version_info__ < (0, 10, 2)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="guesses were measured from JAX 0.11 on")
def test_experts_have_mosaics_ways_without_tuning_on_hopper_gpus_alone(asked):
    """Rows to experts and back, the first two products at once, and blocks that stay for long groups."""
    rows, upwards, down = ((32768, 2048), NARROW), ((32, 2048, 768), NARROW), ((32, 768, 2048), NARROW)
    weights, places, sizes = ((8192, 4), "float32"), ((8192, 4), "int32"), ((32,), "int32")
    calls = [
        ("mosaic", MoeDispatch(), [((8192, 2048), NARROW), places], {"count": 32}),
        ("mosaic", MoeCombine(), [rows, weights, places], {}),
        ("mosaic_gated", MoeExperts(), [rows, upwards, upwards, down, sizes], {}),
        ("mosaic_rolling", RaggedDot(), [((32768, 768), NARROW), down, sizes], {}),
    ]
    for newest, kernel, shapes, static in calls:
        assert asked(kernel, *shapes, **static).implementation == newest
        assert asked(kernel, *shapes, capability="8.0", **static).implementation != newest


def test_a_row_without_a_place_has_no_gradient_by_any_way():
    """Where a place is out of range under a trace; the kernel would leave that row unwritten."""
    rows, weights = normal(4, 128), jnp.ones((2, 2))
    places = jnp.asarray([[0, 1], [2, -1]], jnp.int32)

    def pulled(way):
        kernel, cfg = MoeCombine(), MoeCombineConfig(way)
        return jax.jit(lambda dy, *a: kernel.vjp_cpu((), None, dy, *a, cfg=cfg))(normal(2, 128), rows, weights, places)

    for made, wanted in zip(pulled("mosaic")[:2], pulled("unrolled")[:2], strict=True):
        np.testing.assert_allclose(made, wanted)
