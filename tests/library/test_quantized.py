"""Few bits and scales: what is lost, products against float64, and gradients.

Covers `library/quantize.py`, `library/quantized_matmul.py`, `library/scaled_matmul.py` and
`library/triton/quantized.py`.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, lowered_for_a_gpu, normal, pull, value_and_pull, wide

from ejkernel.library import (
    QuantizedMatmul,
    QuantizedMatmulConfig,
    ScaledMatmul,
    ScaledMatmulConfig,
    dequantize,
    float8_matmul,
    quantize,
    quantized_matmul,
    scaled_matmul,
)
from ejkernel.library.arguments import ArgumentError
from ejkernel.ops import Invocation, check
from ejkernel.ops.core.kernel import variant

E4M3 = jnp.float8_e4m3fn


@pytest.mark.thinned
@pytest.mark.parametrize(("kind", "half"), [("int8", 0.5 / 127), ("int4", 0.5 / 7)])
@pytest.mark.parametrize("group", [None, 16])
def test_integers_lose_at_most_half_a_step_of_their_scale(kind, half, group):
    """For each channel, or each group of it; zeros stay zeros."""
    x = normal(64, 10).at[:, 3].set(0.0)
    q, scales = quantize(x, kind, group=group)
    assert scales.shape == ((10,) if group is None else (4, 10))
    most = jnp.max(jnp.abs(x.reshape(-1, group or 64, 10)), axis=1, keepdims=True)
    off = jnp.abs(dequantize(q, scales) - x).reshape(-1, group or 64, 10)
    assert np.all(off <= most * half * 1.001)
    assert not np.any(dequantize(q, scales)[:, 3])


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("rows", "group"), [(192, 96), (600, 120), (130, 65), (300, 100), (384, 128)])
def test_groups_of_any_size_are_taken_back(kind, rows, group):
    """As many groups as there would be of 128 rows, with a smaller last one: integers have whole groups alone."""
    x = normal(rows, 8) * jnp.arange(1, rows + 1)[:, None]
    q, scales = quantize(x, kind, group=group)
    wanted = np.asarray(q).astype(float) * np.repeat(wide(scales), group, axis=0)
    assert_near(dequantize(q, scales), wanted, "float32")
    assert_near(dequantize(q, scales, group=group), wanted, "float32")
    assert_near(quantized_matmul(jnp.eye(rows), q, scales, group=group, executor=UNTUNED), wanted, "float32")


@pytest.mark.parametrize("axis", [0, 1])
def test_scales_that_two_sizes_of_blocks_could_have_are_refused_until_they_are_spread(axis):
    """Two for 192 numbers are of 96 each, or of 128 and of 64; the message says how either is written."""
    values = [normal(8, 192).astype(E4M3), normal(192, 8, seed=1).astype(E4M3)]
    factors = [jnp.ones((1, 1)), jnp.ones((1, 1))]
    doubtful = jnp.array([[1.0, 8.0]]) if axis else jnp.array([[1.0], [8.0]])
    place, name = (0, "a_scales") if axis else (1, "b_scales")
    factors[place] = doubtful
    end = "[:, :192]" if axis else "[:192]"
    words = f"jnp.repeat({name}, 96, axis={axis}), or jnp.repeat({name}, 128, axis={axis}){end}"
    with pytest.raises(ArgumentError, match=re.escape(words)):
        scaled_matmul(*values, *factors, executor=UNTUNED)
    for size in (96, 128):
        factors[place] = jax.lax.slice_in_dim(jnp.repeat(doubtful, size, axis=axis), 0, 192, axis=axis)
        sides = [wide(values[0]), wide(values[1])]
        sides[place] = sides[place] * wide(factors[place])
        found = scaled_matmul(*values, *factors, preferred_element_type=jnp.float32, executor=UNTUNED)
        assert_near(found, sides[0] @ sides[1], "float32")


@pytest.mark.parametrize("block", [None, (1, 128), (128, 128), (50, 13)])
def test_float8_loses_at_most_a_sixteenth(block):
    """Blocks of 128 may leave a rest; what is far below a block's largest is rounded to steps of that."""
    x = normal(300, 260)
    q, scales = quantize(x, E4M3, block=block)
    size = block or (300, 260)
    assert scales.shape == (() if block is None else tuple(-(-s // b) for s, b in zip(x.shape, size, strict=True)))
    assert np.all(jnp.abs(dequantize(q, scales) - x) <= jnp.abs(x) / 16 + jnp.max(jnp.abs(x)) / 448 / 2**9)


@pytest.mark.parametrize("kind", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_small_numbers_beside_zeros_stay_numbers(kind):
    """Their scale would be below what a processor tells from zero, and zero by zero is no number."""
    x = (normal(4, 8) * 1e-36).at[0].set(0.0)
    back = wide(dequantize(*quantize(x, kind)))
    assert not np.any(back[0])
    assert np.max(np.abs(back - wide(x))) <= 2e-36


def test_gradients_in_float8_that_vanish_are_zeros_and_no_nans():
    """Of a loss whose gradient is 1e-36, with rows that have none."""
    a, b = normal(16, 64), normal(64, 8, seed=1)
    for blocks in (False, True):
        towards = jnp.full((16, 8), 1e-36).at[:4].set(0.0)
        found = pull(lambda a, b, blocks=blocks: float8_matmul(a, b, blocks=blocks, executor=UNTUNED), (a, b), towards)
        assert all(np.all(np.isfinite(x)) for x in found)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_what_is_no_number_is_none_afterwards(kind):
    """Integers have no NaN: the scale has it."""
    back = dequantize(*quantize(jnp.array([[1.0, 1e6], [jnp.nan, 2.0]]), kind))
    assert np.isnan(back[1, 0])


def test_scales_that_change_at_different_places_are_each_used_where_they_hold():
    """Blocks of 128 and of 192: neither is a part of the other."""
    a, b = normal(8, 384), normal(384, 16, seed=1)
    (qa, sa), (qb, sb) = quantize(a, E4M3, block=(1, 128)), quantize(b, E4M3, block=(192, 16))
    sa, sb = sa * jnp.array([[1.0, 3.0, 0.2]]), sb * jnp.array([[1.0], [5.0]])
    right, cfg = wide(dequantize(qa, sa)) @ wide(dequantize(qb, sb)), ScaledMatmulConfig("blocks")
    found = scaled_matmul(qa, qb, sa, sb, preferred_element_type=jnp.float32, cfg=cfg, executor=UNTUNED)
    assert_near(found, right, "float32")
    inv = Invocation("x", (qa, qb, sa, sb), {"dtype": "float32"})
    assert "change after 128 and after 192 of k" in ScaledMatmul().valid_cfg(inv, cfg)


@pytest.mark.parametrize("dtype", ["int32", "no dtype"])
def test_a_result_is_of_a_floating_point_dtype(dtype):
    """An error that names the argument, and not a product without its fractions."""
    q, scale = quantize(normal(4, 8), E4M3)
    with pytest.raises(TypeError, match="preferred_element_type"):
        scaled_matmul(q, q.T, scale, scale, preferred_element_type=dtype)


@pytest.mark.thinned
@pytest.mark.parametrize("way", ["dequantize", "scaled", "summed"])
@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("int4", 16)])
def test_products_and_gradients_of_integers_are_right(way, kind, group):
    """Of x and of the scales."""
    x, weight, dy = normal(2, 3, 64), normal(64, 10, seed=1), normal(2, 3, 10, seed=2)
    q, scales = quantize(weight, kind, group=group)
    back, cfg = wide(dequantize(q, scales)), QuantizedMatmulConfig(way)
    out, pull = jax.vjp(lambda x, s: quantized_matmul(x, q, s, group=group, cfg=cfg, executor=UNTUNED), x, scales)
    assert_near(out, wide(x) @ back, "float32")
    d_x, d_scales = pull(dy)
    assert_near(d_x, wide(dy) @ back.T, "float32")
    outer = np.einsum("abk,abn->kn", wide(x), wide(dy)) * np.asarray(q).astype(float)
    assert_near(d_scales, outer.reshape(-1, group or 64, 10).sum(1).reshape(scales.shape), "float32")


def test_bfloat16_activations_are_rounded_once():
    """The integers are exact in bfloat16, so scaling afterwards loses nothing before the result."""
    x = normal(8, 128, dtype="bfloat16")
    q, scales = quantize(normal(128, 32, seed=1))
    right = wide(x) @ wide(dequantize(q, scales))
    found = quantized_matmul(x, q, scales, cfg=QuantizedMatmulConfig("scaled"), executor=UNTUNED)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(wide(found), right, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("int4", 64)])
def test_the_kernel_is_right_and_is_lowered_for_a_gpu(kind, group):
    """Integers of 4 bits are taken out of bytes; rows that are no power of two."""
    x, (q, scales) = normal(20, 128, dtype="bfloat16"), quantize(normal(128, 64, seed=2), kind, group=group)
    cfg = QuantizedMatmulConfig("triton", 32, 32, 1, 1)

    def product(x, scales):
        return quantized_matmul(x, q, scales, group=group, cfg=cfg, executor=UNTUNED)

    out, pull = jax.vjp(product, x, scales)
    back = wide(dequantize(q, scales))
    assert_near(out, wide(x) @ back, "bfloat16")
    dy = normal(20, 64, dtype="bfloat16", seed=3)
    assert_near(pull(dy)[0], wide(dy) @ back.T, "bfloat16")
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, q, scales)]
    assert "library_quantized_matmul" in lowered_for_a_gpu(lambda *a: QuantizedMatmul().run(*a, cfg=cfg), *shapes)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("blocks", [(None, None), ((1, 320), (320, 1)), ((1, 128), (128, 128)), ((20, 40), (40, 13))])
def test_products_of_float8_are_right(blocks):
    """Whatever shares a scale, in every way that can."""
    near, other = (
        quantize(x, E4M3, block=s) for x, s in zip((normal(20, 320), normal(320, 260, seed=3)), blocks, strict=True)
    )
    right = wide(dequantize(*near)) @ wide(dequantize(*other))
    whole = blocks[0] is None or blocks[0][1] == 320
    for way in ("float8" if whole else "blocks", "bfloat16", "float32"):
        how = {"preferred_element_type": jnp.float32, "cfg": ScaledMatmulConfig(way), "executor": UNTUNED}
        found = scaled_matmul(near[0], other[0], near[1], other[1], **how)
        assert_near(found, right, "bfloat16" if way == "bfloat16" else "float32")


@pytest.mark.parametrize("blocks", [False, True])
def test_training_in_float8_has_gradients(blocks):
    """As near as three bits are: a few hundredths of their size."""
    a, b, dy = normal(2, 10, 300), normal(300, 130, seed=1), normal(2, 10, 130, seed=2)
    made = value_and_pull(lambda a, b: float8_matmul(a, b, blocks=blocks, executor=UNTUNED), (a, b), dy)
    right = (a @ b, dy @ b.T, jnp.einsum("abk,abn->kn", a, dy))
    for found, wanted in zip(made, right, strict=True):
        assert found.shape == wanted.shape
        off = float(jnp.sqrt(jnp.mean((found - wanted) ** 2) / jnp.mean(wanted**2)))
        assert 0.005 < off < 0.1


@pytest.mark.parametrize("blocks", [False, True])
def test_shards_of_a_float8_product_add_up_the_gradient_of_what_they_share(blocks):
    """Each has scales of its own: a gradient is as near to that of the whole as rounding allows."""
    a, b, dy = normal(4, 128), normal(128, 8, seed=1), normal(4, 8, seed=2)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, shared = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()

    def product(a, b):
        return float8_matmul(a, b, blocks=blocks, executor=UNTUNED)

    sharded = jax.shard_map(product, mesh=mesh, in_specs=(spec, shared), out_specs=spec)
    for found, wanted in zip(pull(sharded, (a, b), dy), (dy @ b.T, a.T @ dy), strict=True):
        assert float(jnp.sqrt(jnp.mean((found - wanted) ** 2) / jnp.mean(wanted**2))) < 0.1
    alone = jax.jit(jax.grad(lambda a: sharded(a, b).sum()))(a)
    assert alone.shape == a.shape


@pytest.mark.slow
def test_every_candidate_passes_the_check_of_a_tuning():
    """Products of integers, and of float8 with either kind of scales."""
    q, scales = quantize(normal(64, 16))
    trials = [*check(QuantizedMatmul(), normal(4, 64, dtype="bfloat16"), q, scales)]
    near, other = quantize(normal(8, 256), E4M3, block=(1, 128)), quantize(normal(256, 128), E4M3, block=(128, 128))
    trials += check(ScaledMatmul(), near[0], other[0], near[1], other[1])
    assert [trial.status for trial in trials] == ["ok"] * len(trials)
    assert len(trials) >= 6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize(jnp.ones((6, 4)), group=4), "group=4 does not divide the 6 rows"),
        (lambda: quantize(jnp.ones((6, 4)), "int8", block=(2, 2)), "int8 takes group="),
        (lambda: dequantize(*quantize(jnp.ones((6, 4)), group=2), group=3), "group=3 needs"),
        (lambda: dequantize(*quantize(jnp.ones((6, 4)), group=2), group=4), "does not divide the 6 rows of q"),
        (lambda: dequantize(*quantize(jnp.ones((6, 4)), E4M3), group=2), "group=2 is for integers"),
        (lambda: quantize(jnp.ones((300, 4)), E4M3, block=(100, 4)), "does not fit x"),
        (lambda: quantize(jnp.ones((6, 4)), "int16"), "dtype=int16 has no scales"),
        (
            lambda: quantized_matmul(jnp.ones((2, 5)), *quantize(jnp.ones((6, 4)))),
            "x and q_weight differ in k: 5 and 6",
        ),
        (
            lambda: quantized_matmul(jnp.ones((2, 6)), *quantize(jnp.ones((6, 4))), group=3),
            "scales must have the shape",
        ),
        (lambda: quantized_matmul(jnp.ones((2, 6)), jnp.ones((6, 4)), jnp.ones(4)), "use int8 or int4"),
        (lambda: scaled_matmul(jnp.ones((2, 6)), jnp.ones((6, 4)), 1.0, 1.0), "a is float32"),
        (
            lambda: scaled_matmul(jnp.ones((2, 6), E4M3), jnp.ones((6, 4), E4M3), jnp.ones((2, 5)), 1.0),
            "a_scales of shape",
        ),
        (lambda: float8_matmul(jnp.ones((2, 6)), jnp.ones((5, 4))), "a and b differ in k"),
    ],
)
def test_bad_arguments_are_named(call, words):
    """Before anything is measured."""
    with pytest.raises((ValueError, TypeError), match=words):
        call()


@pytest.mark.parametrize("dtype", ["foo", 5])
def test_what_is_no_dtype_is_named_beside_those_that_are_served(dtype):
    """The error is of the library's own, and not numpy's, which names no argument."""
    words = f"dtype={dtype!r} is no dtype; use int8, int4, float8_e4m3fn, float8_e5m2"
    with pytest.raises(ArgumentError, match=re.escape(words)):
        quantize(jnp.ones((6, 4)), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_factors_are_rounded_to_bfloat16_for_such_results_alone(dtype, platform):
    """Rounded factors are hundreds of times as far off as a float32 result is; the heuristic keeps to that."""
    kernel = ScaledMatmul()
    narrow = jnp.zeros((8, 256), jnp.float8_e4m3fn)
    scales = (jnp.ones((8, 2)), jnp.ones((2, 1)))
    inv = Invocation(kernel.op_id, (narrow, narrow.T, *scales), {"dtype": dtype})

    assert (kernel.valid_cfg(inv, ScaledMatmulConfig("bfloat16")) is True) == (dtype == "bfloat16")
    guess = variant(kernel, "heuristic_cfg", platform=platform)(inv)
    assert kernel.valid_cfg(inv, guess) is True
