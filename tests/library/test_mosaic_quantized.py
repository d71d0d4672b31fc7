"""Weights of 8 and 4 bits by Mosaic GPU: interpreted with races looked for, beside float64, and lowered for a GPU.

Covers `library/mosaic/quantized.py`, `library/mosaic/quantized_ahead.py`, `library/mosaic/quantized_blocks.py`,
`library/mosaic/quantized_tiles.py` and `library/mosaic/words.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, normal, wide
from fakes_mosaic import hopper, lowered_by_mosaic, needs_mosaic, races

from ejkernel.library import QuantizedMatmul, QuantizedMatmulConfig, dequantize, quantize, quantized_matmul
from ejkernel.library.mosaic.quantized_tiles import registers, strips
from ejkernel.ops import Invocation
from ejkernel.ops.core.kernel import variant

__all__ = ["races"]
needs_words = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic GPU of this JAX does not load words of 16 bits transposed"
)
pytestmark = needs_mosaic


def by_mosaic(n, k, stages, parts, workers):
    """Columns and depth of a block, steps that are held, parts of the depth and warpgroups."""
    return QuantizedMatmulConfig("mosaic", n, k, None, stages, parts, workers)


def ahead(n, k, stages, parts, workers):
    """The same, with weights that are made wide while others are multiplied."""
    return QuantizedMatmulConfig("mosaic_ahead", n, k, None, stages, parts, workers)


def call(rows, depth, width, kind, group=None):
    """The shapes of a call."""
    scales = (width,) if group is None else (depth // group, width)
    shapes = ((rows, depth), "bfloat16"), ((depth, width), kind), (scales, "float32")
    return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes)


@pytest.mark.parametrize("bits", [8, 4])
def test_every_word_of_16_bits_holds_the_numbers_that_it_was_made_of(bits):
    """All words: the numbers come out of bits alone, exact and with their signs."""
    from ejkernel.library.mosaic.words import widened

    words = np.arange(1 << 16)
    held = jnp.asarray(words.astype(np.uint16).view(np.int16))
    found = [widened(held, number, bits, interpret=True) for number in range(16 // bits)]
    for number, made in enumerate(found):
        low = words >> (number * bits) & ((1 << bits) - 1)
        assert np.array_equal(wide(made), np.where(low >> (bits - 1), low - (1 << bits), low))


@needs_words
@pytest.mark.parametrize(
    ("kind", "rows", "shape", "group", "cfg"),
    [
        ("int8", 20, (192, 256), None, by_mosaic(128, 64, 2, 1, 2)),
        ("int4", 5, (192, 256), 64, by_mosaic(256, 64, 2, 2, 1)),
        ("int8", 20, (320, 512), None, ahead(256, 128, 2, 2, 2)),
        pytest.param("int4", 5, (320, 256), None, ahead(256, 64, 2, 2, 2), marks=pytest.mark.slow),
        pytest.param("int8", 130, (448, 256), None, ahead(256, 128, 3, 3, 2), marks=pytest.mark.slow),
        pytest.param("int8", 1, (192, 384), None, ahead(256, 64, 2, 1, 2), marks=pytest.mark.slow),
        pytest.param("int8", 16, (256, 512), None, ahead(128, 64, 2, 2, 2), marks=pytest.mark.slow),
        pytest.param("int8", 1, (448, 384), None, by_mosaic(256, 128, 3, 3, 2), marks=pytest.mark.slow),
        pytest.param("int8", 130, (256, 128), 128, by_mosaic(128, 128, 2, 2, 1), marks=pytest.mark.slow),
        pytest.param("int4", 64, (320, 768), None, by_mosaic(512, 64, 2, 2, 4), marks=pytest.mark.slow),
        pytest.param("int4", 9, (384, 512), 128, by_mosaic(512, 64, 3, 2, 2), marks=pytest.mark.slow),
    ],
)
def test_a_product_of_few_bits_is_that_of_float64(races, kind, rows, shape, group, cfg):
    """Rows that are no multiple of 8, columns and depths that blocks do not divide, parts and groups of the depth."""
    x = normal(rows, shape[0], dtype="bfloat16")
    q, scales = quantize(normal(*shape, seed=1), kind, group=group)
    made = quantized_matmul(x, q, scales, group=group, cfg=cfg, executor=UNTUNED)
    assert made.dtype == jnp.bfloat16
    assert_near(made, wide(x) @ wide(dequantize(q, scales)), "bfloat16")


@needs_words
@pytest.mark.slow
def test_it_works_under_vmap_and_has_gradients(races):
    """Those of the plain form, of x and of the scales."""
    x, cfg = normal(2, 3, 128, dtype="bfloat16"), by_mosaic(128, 64, 2, 2, 1)
    q, scales = quantize(normal(128, 128, seed=1))

    def product(x, scales):
        return quantized_matmul(x, q, scales, cfg=cfg, executor=UNTUNED)

    made, pull = jax.vjp(jax.vmap(product, in_axes=(0, None)), x, scales)
    back = wide(dequantize(q, scales))
    assert_near(made, wide(x) @ back, "bfloat16")
    dy = normal(2, 3, 128, dtype="bfloat16", seed=2)
    d_x, d_scales = pull(dy)
    assert_near(d_x, wide(dy) @ back.T, "bfloat16")
    outer = np.einsum("abk,abn->kn", wide(x), wide(dy))
    assert_near(d_scales, (outer * np.asarray(q).astype(float)).sum(0), "bfloat16")


@needs_words
@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("int8", None),
        ("int4", 128),
        pytest.param("int4", None, marks=pytest.mark.slow),
        pytest.param("int8", 128, marks=pytest.mark.slow),
    ],
)
def test_every_candidate_for_a_batch_is_lowered_for_a_gpu(monkeypatch, kind, group):
    """Words are loaded by the instruction that transposes; few candidates, and none of them refused."""
    hopper(monkeypatch)
    kernel, shapes = QuantizedMatmul(), call(64, 8192, 8192, kind, group)
    inv = Invocation(kernel.op_id, shapes, {})
    offered = variant(kernel, "candidate_cfgs", platform="gpu")(inv)
    offered = [cfg for cfg in offered if cfg.implementation.startswith("mosaic")]
    assert 5 <= len(offered) <= 9
    assert [kernel.valid_cfg(inv, cfg) for cfg in offered] == [True] * len(offered)
    for cfg in offered:
        text = lowered_by_mosaic(lambda *a, cfg=cfg: kernel.run(*a, cfg=cfg), *shapes)
        assert "library_quantized_matmul" in text
        assert "ldmatrix" in text


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_warpgroups_ask_for_no_more_registers_than_their_block_has(workers):
    """The copying one hands on what the others ask for, from equal shares in eights: more would be waited for."""
    copying, multiplying = registers(workers)
    begin = 65536 // (128 * (workers + 1)) // 8 * 8
    assert copying < begin < multiplying <= 255
    assert copying + workers * multiplying <= begin * (workers + 1)
    assert copying % 8 == multiplying % 8 == 0


@pytest.mark.parametrize(
    ("depth", "width", "parts"), [(8192, 8192, {2, 4, 8}), (4096, 14336, {1, 2, 7}), (64, 256, {1})]
)
def test_the_depth_has_as_many_parts_as_leave_few_multiprocessors_idle(depth, width, parts):
    """Of 132: 32 blocks of columns four times, or 56 twice and, in three rounds, seven times."""
    assert {strip.parts for strip in strips(*call(64, depth, width, "int8"))} == parts


@needs_words
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8, 100, 256])
@pytest.mark.parametrize("shape", [(4096, 11008), (11008, 4096), (64, 256)])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_candidates_for_odd_sizes_are_lowered_for_a_gpu(monkeypatch, kind, shape, rows):
    """Sizes that blocks do not divide, under vmap too; each is valid, or says why it is not."""
    hopper(monkeypatch)
    kernel, shapes = QuantizedMatmul(), call(rows, *shape, kind)
    inv = Invocation(kernel.op_id, shapes, {})
    offered = variant(kernel, "candidate_cfgs", platform="gpu")(inv)
    offered = [cfg for cfg in offered if cfg.implementation.startswith("mosaic")]
    offered = [cfg for cfg in offered if kernel.valid_cfg(inv, cfg) is True]
    assert offered
    for cfg in offered:
        lowered_by_mosaic(lambda *a, cfg=cfg: kernel.run(*a, cfg=cfg), *shapes)
    batched = jax.ShapeDtypeStruct((2, *shapes[0].shape), jnp.bfloat16)
    several = jax.vmap(lambda *a: kernel.run(*a, cfg=offered[0]), in_axes=(0, None, None))
    lowered_by_mosaic(several, batched, *shapes[1:])


def test_what_cannot_run_says_why(monkeypatch):
    """By JAX, block, dtype, shape and GPU."""
    hopper(monkeypatch)
    kernel, good = QuantizedMatmul(), by_mosaic(256, 64, 4, 4, 2)

    def judged(cfg=good, shapes=None, **sizes):
        sizes = {"rows": 64, "depth": 8192, "width": 8192, "kind": "int8", **sizes}
        return kernel.valid_cfg(Invocation("x", shapes or call(**sizes), {}), cfg)

    if jax.__version_info__ < (0, 11):
        assert "use jax 0.11" in judged()
        return
    assert judged() is True
    assert "must be given" in judged(by_mosaic(256, 64, 4, None, 2))
    assert "1 to 256 rows" in judged(rows=257)
    x, *rest = call(8, 128, 256, "int8")
    assert "not 8 of float16" in judged(shapes=(jax.ShapeDtypeStruct(x.shape, jnp.float16), *rest))
    assert "warpgroups are not served" in judged(by_mosaic(256, 64, 4, 4, 1))
    assert "depths of 64 or 128" in judged(by_mosaic(256, 32, 4, 4, 2))
    assert "multiples of 64 and 128" in judged(width=8200)
    assert "multiples of 64 and 256" in judged(width=8192 + 128, kind="int4")
    assert "do not divide groups of 32" in judged(group=32)
    assert "does not have 4 parts" in judged(depth=128)
    assert "shared memory" in judged(by_mosaic(256, 128, 5, 4, 2))
    assert judged(ahead(256, 64, 4, 4, 2)) is True
    assert "scales of groups" in judged(ahead(256, 64, 4, 4, 2), group=128)
    hopper(monkeypatch, "10.0")
    assert "capability 9, not 10.0" in judged()


@needs_words
def test_a_cfg_by_hand_that_cannot_run_is_refused_with_a_sentence():
    """And not by what the compiler says."""
    q, scales = quantize(normal(128, 128))
    with pytest.raises(ValueError, match="cannot compute this call: it takes 1 to 256 rows of bfloat16"):
        quantized_matmul(normal(8, 128), q, scales, cfg=by_mosaic(128, 64, 2, 1, 1), executor=UNTUNED)
