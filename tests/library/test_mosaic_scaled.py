"""float8 with scales by Mosaic GPU: interpreted with races looked for, beside float64, and lowered for a GPU.

Covers `library/mosaic/scaled.py` and `library/mosaic/scaled_tiles.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from fakes_library import UNTUNED, assert_near, normal, wide
from fakes_mosaic import hopper, lowered_by_mosaic, needs_loops, needs_mosaic, races

from ejkernel.library import ScaledMatmul, ScaledMatmulConfig, dequantize, quantize, scaled_matmul
from ejkernel.ops import Invocation
from ejkernel.ops.core.kernel import variant

__all__ = ["races"]
pytestmark = needs_mosaic
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


# Blocks of quantize that give scales by blocks, for each row or column, and for everything.
OF_A = {"blocks": (1, 128), "rows": (1, 256), "one": None}
OF_B = {"blocks": (128, 128), "columns": (256, 1), "one": None, "wide": (256, 64)}


def call(m, k, n, kinds=(E4M3, E4M3), near="blocks", other="blocks"):
    """The shapes of a call with scales of 1x128 and 128x128, or that do not change along k."""
    of_a = {"blocks": (m, k // 128), "rows": (m, 1), "one": (1, 1)}[near]
    of_b = {"blocks": (k // 128, n // 128), "columns": (1, n), "one": (1, 1)}[other]
    sizes = ((m, k), kinds[0]), ((k, n), kinds[1]), (of_a, jnp.float32), (of_b, jnp.float32)
    return tuple(jax.ShapeDtypeStruct(*size) for size in sizes)


@needs_loops
@pytest.mark.parametrize(
    ("m", "kinds", "cfg"),
    [
        (136, (E4M3, E4M3), ScaledMatmulConfig("mosaic", 128, 128, 2, 2)),
        pytest.param(192, (E5M2, E4M3), ScaledMatmulConfig("mosaic", 192, 128, 2, 3), marks=pytest.mark.slow),
        pytest.param(264, (E4M3, E5M2), ScaledMatmulConfig("mosaic", 256, 128, 2, 2), marks=pytest.mark.slow),
    ],
)
def test_a_product_of_float8_is_that_of_float64(races, m, kinds, cfg):
    """Every block of the depth has its own scales; rows that blocks do not divide, and both kinds of float8."""
    near = quantize(normal(m, 256), kinds[0], block=(1, 128))
    other = quantize(normal(256, 128, seed=1), kinds[1], block=(128, 128))
    found = scaled_matmul(near[0], other[0], near[1], other[1], cfg=cfg, executor=UNTUNED)
    assert_near(found, wide(dequantize(*near)) @ wide(dequantize(*other)), "bfloat16")


@needs_loops
@pytest.mark.parametrize(
    ("near", "other", "cfg"),
    [
        ("rows", "columns", ScaledMatmulConfig("mosaic", 128, 128, 2, 2, 256)),
        ("one", "one", ScaledMatmulConfig("mosaic", 128, 128, 2, 2)),
        *(
            pytest.param(*pair, ScaledMatmulConfig("mosaic", 256, 128, 2, 2), marks=pytest.mark.slow)
            for pair in (("rows", "columns"), ("one", "wide"), ("rows", "blocks"), ("blocks", "columns"))
        ),
        pytest.param("rows", "one", ScaledMatmulConfig("mosaic", 192, 128, 2, 3, 256), marks=pytest.mark.slow),
    ],
)
def test_scales_that_do_not_change_along_the_depth_multiply_the_result(races, near, other, cfg):
    """For each row and column, for everything, or on one side alone, where the other has blocks."""
    left = quantize(normal(136, 256) * jnp.arange(1, 137)[:, None], E4M3, block=OF_A[near])
    right = quantize(normal(256, 128, seed=1) * jnp.arange(1, 129), E4M3, block=OF_B[other])
    found = scaled_matmul(left[0], right[0], left[1], right[1], cfg=cfg, executor=UNTUNED)
    wanted = wide(dequantize(*left)) @ wide(dequantize(*right))
    # Rows and columns of like size, so that none is lost beside the largest.
    size = jnp.arange(1, 137)[:, None] * jnp.arange(1, 129)
    assert_near(found / size, wanted / wide(size), "bfloat16")


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("float16", "float32"))]
)
def test_every_candidate_for_a_layer_is_lowered_for_a_gpu(monkeypatch, dtype):
    """Three blocks, with as many stages as the result leaves room for."""
    hopper(monkeypatch)
    kernel, shapes = ScaledMatmul(), call(4096, 7168, 4096)
    inv = Invocation(kernel.op_id, shapes, {"dtype": dtype})
    offered = variant(kernel, "candidate_cfgs", platform="gpu")(inv)
    offered = [cfg for cfg in offered if cfg.implementation == "mosaic"]
    assert len(offered) == 3
    assert [kernel.valid_cfg(inv, cfg) for cfg in offered] == [True] * 3
    for cfg in offered:
        text = lowered_by_mosaic(lambda *a, cfg=cfg: kernel.run(*a, dtype=dtype, cfg=cfg), *shapes)
        assert "library_scaled_matmul" in text


@pytest.mark.parametrize(
    ("near", "other"),
    [
        ("rows", "columns"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("one", "one"), ("one", "blocks"), ("rows", "one"))),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_scales_of_rows_columns_and_everything_are_lowered_for_a_gpu(monkeypatch, near, other, dtype):
    """In steps of 128, and of 256 where the result is rounded to bfloat16 and no scale changes along the depth."""
    hopper(monkeypatch)
    kernel, shapes = ScaledMatmul(), call(4096, 7168, 4096, near=near, other=other)
    inv = Invocation(kernel.op_id, shapes, {"dtype": dtype})
    offered = [cfg for cfg in kernel.candidate_cfgs_gpu(inv) if cfg.implementation == "mosaic"]
    deep = dtype == "bfloat16" and other != "blocks"
    assert [cfg.block_k for cfg in offered] == [None] * 3 + ([256] * 3 if deep else [])
    assert [kernel.valid_cfg(inv, cfg) for cfg in offered] == [True] * len(offered)
    for cfg in offered:
        text = lowered_by_mosaic(lambda *a, cfg=cfg: kernel.run(*a, dtype=dtype, cfg=cfg), *shapes)
        assert "library_scaled_matmul" in text


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this JAX takes factors of one kind")
def test_both_kinds_of_float8_are_lowered_for_a_gpu():
    """As the gradients of training have them, with rows that blocks do not divide and under vmap."""
    cfg, shapes = ScaledMatmulConfig("mosaic", 192, 128, 4, 3), call(1000, 512, 384, (E5M2, E4M3))
    lowered_by_mosaic(lambda *a: ScaledMatmul().run(*a, cfg=cfg), *shapes)
    several = [jax.ShapeDtypeStruct((2, *shape.shape), shape.dtype) for shape in shapes]
    lowered_by_mosaic(jax.vmap(lambda *a: ScaledMatmul().run(*a, cfg=cfg)), *several)


def test_what_cannot_run_says_why(monkeypatch):
    """By JAX, block, scales, shape and GPU."""
    hopper(monkeypatch)
    kernel, good = ScaledMatmul(), ScaledMatmulConfig("mosaic", 128, 128, 4, 2)

    def judged(cfg=good, shapes=None, **static):
        return kernel.valid_cfg(Invocation("x", shapes or call(256, 256, 256), static), cfg)

    assert judged() is True
    mixed = judged(shapes=call(256, 256, 256, (E5M2, E4M3)))
    assert mixed is True if jax.__version_info__ >= (0, 11) else "of one kind" in mixed
    assert "must be given" in judged(ScaledMatmulConfig("mosaic", 128))
    assert "are not served" in judged(ScaledMatmulConfig("mosaic", 128, 64, 4, 2))
    a, b, rows, blocks = call(256, 256, 256)
    halves = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert "scales of a that change along the depth are of 1x128" in judged(shapes=(a, b, halves, blocks))
    assert "scales of b that change along the depth are of 128x128" in judged(shapes=(a, b, rows, halves))
    assert "multiples of 8, 128 and 128" in judged(shapes=call(250, 256, 256))
    assert "multiples of 8, 128 and 128" in judged(shapes=call(256, 200, 256, near="one", other="one"))
    deep = ScaledMatmulConfig("mosaic", 128, 128, 2, 2, 256)
    assert "need steps of 128, not 256" in judged(deep)
    even = call(256, 256, 256, near="rows", other="columns")
    assert judged(deep, even) is True
    assert "too far off for a result in float32" in judged(deep, even, dtype="float32")
    assert "are not served" in judged(ScaledMatmulConfig("mosaic", 128, 128, 2, 2, 64), even)
    assert "shared memory" in judged(ScaledMatmulConfig("mosaic", 128, 128, 7, 2))
    hopper(monkeypatch, "10.0")
    assert "capability 9, not 10.0" in judged()
