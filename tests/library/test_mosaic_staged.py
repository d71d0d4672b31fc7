"""Softmax of wide rows in shared memory by Mosaic GPU: interpreted with races looked for, and lowered for a GPU.

Covers `library/mosaic/shelf.py`, `library/mosaic/staged.py` and `library/mosaic/staging.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, normal, pull, value_and_pull
from fakes_mosaic import hopper, lowered_by_mosaic, needs_copies, needs_mosaic, races

from ejkernel.library import Softmax, SoftmaxConfig, softmax
from ejkernel.library.mosaic.shelf import launches, refuses, shelf
from ejkernel.ops import Invocation

__all__ = ["races"]
pytestmark = needs_mosaic


def staged(x, each):
    """Softmax with its rows in shared memory."""
    return softmax(x, cfg=SoftmaxConfig("mosaic", num_warps=4, each=each, shared=True), executor=UNTUNED)


def exact(x):
    """In float64."""
    powers = np.exp(np.asarray(x, np.float64) - np.asarray(x, np.float64).max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("width", "dtype", "each"),
    [
        pytest.param(2304, "bfloat16", 8, marks=needs_copies),
        pytest.param(66560, "bfloat16", 64, marks=[needs_copies, pytest.mark.slow]),
        pytest.param(1280, "float32", 4, marks=[needs_copies, pytest.mark.slow]),
        (1301, "float32", 4),
        (2189, "bfloat16", 8),
        pytest.param(2049 + 1024, "float16", 8, marks=pytest.mark.slow),
    ],
)
def test_a_row_in_shared_memory_is_that_of_float64(races, width, dtype, each):
    """By copies of one part and of two, and by loads, of rows that begin at every place of a load."""
    x = (normal(8, width, dtype="float32") * 3 + 3.0).astype(dtype)
    assert_near(staged(x, each), exact(x), dtype)


@pytest.mark.parametrize(("width", "kept"), [(1301, 1), pytest.param(2189, 3, marks=pytest.mark.slow)])
def test_chunks_for_which_there_is_no_room_stay_in_registers(races, monkeypatch, width, kept):
    """Two or more of them, the last one masked: counted once, and written."""
    monkeypatch.setattr("ejkernel.library.mosaic.shelf._ROOM", 3 * 1024 + kept * 2048)
    lying = shelf(width, 4, 4)
    assert (lying.kept, lying.line) == (kept, 0)
    assert lying.count - kept == 2
    x = normal(8, width, dtype="float32") * 3
    assert_near(staged(x, 4), exact(x), "float32")


@pytest.mark.parametrize("width", [3005, pytest.param(4096, marks=pytest.mark.slow)])
def test_chunks_of_very_wide_rows_are_read_again(races, monkeypatch, width):
    """All that fit neither shared memory nor registers: their norms are found on the way."""
    monkeypatch.setattr("ejkernel.library.mosaic.shelf._ROOM", 3 * 1024 + 2048)
    monkeypatch.setattr("ejkernel.library.mosaic.shelf._AHEAD", 32)
    lying = shelf(width, 4, 4)
    assert (lying.kept, lying.again, lying.line) == (1, lying.count - 2, 0)
    x = normal(5, width, dtype="float32") * 3
    assert_near(staged(x, 4), exact(x), "float32")


@pytest.mark.parametrize("width", [pytest.param(1280, marks=needs_copies), 1301])
def test_softmax_of_what_is_ruled_out_is_plain_jax_s(width):
    """Minus infinity in all but one place, first, last and between, and huge numbers in a part of a row."""
    x = np.full((4, width), -np.inf, np.float32)
    x[0, 0] = x[1, -1] = x[2, 700] = 2.0
    x[3] = np.where(np.arange(width) < 600, -3e38, 3e38)
    np.testing.assert_allclose(staged(jnp.asarray(x), 4), jax.nn.softmax(x, -1), rtol=1e-5)


@pytest.mark.parametrize("width", [pytest.param(1280, marks=needs_copies), 1301])
def test_rows_in_shared_memory_work_under_vmap_and_have_a_gradient(races, width):
    """As every way of the library does."""
    x, dy = normal(4, width, dtype="float32"), normal(4, width, seed=1, dtype="float32")
    two = (2, 2, width)
    made, back = value_and_pull(jax.vmap(lambda x: staged(x, 4)), (x.reshape(two),), dy.reshape(two))
    assert_near(made.reshape(4, width), exact(x), "float32")
    (wanted,) = pull(lambda x: jax.nn.softmax(x, -1), (x,), dy)
    assert_near(back.reshape(4, width), np.asarray(wanted, np.float64), "float32", slack=10)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (32000, "bfloat16"),
        (50257, "bfloat16"),
        (50304, "float32"),
        (128256, "bfloat16"),
        (151936, "bfloat16"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((16391, "float32"), (46080, "float16"))),
    ],
)
def test_rows_in_shared_memory_are_lowered_for_a_gpu(width, dtype):
    """Layouts are found and shared memory suffices, for copies, for odd and for the widest rows, and under vmap."""
    kernel = Softmax()
    for num_warps, each in launches(jax.ShapeDtypeStruct((8, width), dtype)):
        cfg = SoftmaxConfig("mosaic", num_warps=num_warps, each=each, shared=True)
        lowered_by_mosaic(lambda x, cfg=cfg: kernel.run(x, cfg=cfg), jax.ShapeDtypeStruct((8, width), dtype))
    lowered_by_mosaic(jax.vmap(lambda x: kernel.run(x, cfg=cfg)), jax.ShapeDtypeStruct((2, 8, width), dtype))


@pytest.mark.parametrize(
    ("width", "itemsize", "line", "copies"), [(32000, 2, 256, 1), (50304, 2, 128, 2), (32000, 4, 256, 1)]
)
def test_aligned_rows_come_by_few_copies(width, itemsize, line, copies):
    """Each of lines of at most 256 elements, which make up the row."""
    lying = shelf(width, itemsize, 32)
    assert (lying.line, lying.copies) == (line, copies)
    assert lying.line * lying.lines == width


@pytest.mark.parametrize("width", [50257, 32004, 8 * 4001, 16384 + 8])
def test_rows_that_no_copy_serves_are_loaded(width):
    """Odd ones, and those whose lines would be many, or of bytes that threads do not share evenly."""
    assert shelf(width, 2, 32).line == 0


@pytest.mark.parametrize(
    ("width", "count"), [(8192, 0), (16384, 2), (32000, 2), (50257, 2), (60001, 1), (128256, 1), (256_000, 1)]
)
def test_candidates_in_shared_memory_are_for_wide_rows(width, count):
    """Narrower ones are held in registers; there are fewer where no two rows fit."""
    found = launches(jax.ShapeDtypeStruct((8, width), jnp.bfloat16))
    assert len(found) == count
    assert not any(refuses(width, 2, *one) for one in found)


def test_rows_that_shared_memory_cannot_keep_say_why(monkeypatch):
    """Reasons of `valid_cfg`, by width, launch and GPU."""
    hopper(monkeypatch)
    wide = Invocation("x", (jax.ShapeDtypeStruct((4, 50257), jnp.bfloat16),), {})
    short = Invocation("x", (jax.ShapeDtypeStruct((4, 4096), jnp.bfloat16),), {})
    cfg = SoftmaxConfig("mosaic", num_warps=4, each=32, shared=True)
    assert Softmax().valid_cfg(wide, cfg) is True
    many = Invocation("x", (jax.ShapeDtypeStruct((4, 300_000), jnp.bfloat16),), {})
    large = SoftmaxConfig("mosaic", num_warps=4, each=1024, shared=True)
    assert "1024 elements a thread are too many for shared memory" in Softmax().valid_cfg(many, large)
    assert "too short for 32 elements a thread" in Softmax().valid_cfg(short, cfg)
    for other, reason in ((8, "is one warpgroup's, of 4"), (None, "is one warpgroup's, of 4")):
        assert reason in Softmax().valid_cfg(wide, SoftmaxConfig("mosaic", num_warps=other, each=32, shared=True))
    for each in (None, 0, 12):
        unaligned = SoftmaxConfig("mosaic", num_warps=4, each=each, shared=True)
        assert "must be a multiple of the 8 elements" in Softmax().valid_cfg(wide, unaligned)
    hopper(monkeypatch, "12.0")
    assert "capability 9, not 12.0" in Softmax().valid_cfg(wide, cfg)


def test_rows_that_are_too_short_are_refused_with_a_sentence():
    """A cfg that was given by hand."""
    with pytest.raises(ValueError, match="mosaic cannot compute this call: rows of 300 are too short"):
        staged(jnp.ones((2, 300)), 4)
