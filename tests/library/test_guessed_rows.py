"""Norms and softmax without tuning: which way, by the number of rows, their width and the GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from fakes_mosaic import asked

from ejkernel.library import (
    LayerNorm,
    LayerNormConfig,
    ResidualNorm,
    RmsNorm,
    RmsNormConfig,
    Softmax,
    SoftmaxConfig,
)

__all__ = ["asked"]

measured = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="these rules were measured with JAX 0.11")
NORMS = [(RmsNorm(), RmsNormConfig), (LayerNorm(), LayerNormConfig)]


def rows(count, width):
    """An array of rows."""
    return (count, width), jnp.bfloat16


@pytest.mark.parametrize(("kernel", "config"), NORMS, ids=["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ((64, 2048), {"implementation": "triton", "rows": 1, "num_warps": 4}),
        ((2048, 768), {"implementation": "triton", "rows": 2, "num_warps": 1}),
        ((2048, 4096), {"implementation": "triton", "rows": 2, "num_warps": 8}),
        ((2048, 5120), {"implementation": "triton", "rows": 2, "num_warps": 8}),
        ((8192, 5120), {"implementation": "mosaic", "num_warps": 4}),
        ((64, 8192), {"implementation": "xla"}),
        ((1024, 8192), {"implementation": "triton", "rows": 2, "num_warps": 16}),
    ],
)
@measured
def test_norms_go_by_the_number_of_rows_and_the_cache(asked, kernel, config, shape, fields):
    """Two rows to a block where there are many, Mosaic's beyond the cache, XLA's for a few rows of 8192."""
    if config is LayerNormConfig and fields["implementation"] == "mosaic":
        fields = {**fields, "kept": shape[1] >= 4096}
    assert asked(kernel, rows(*shape)) == config(**fields)


@pytest.mark.parametrize(
    ("shape", "dtype", "fields"),
    [
        ((8192, 4096), "bfloat16", {"streams": True}),
        ((32768, 1024), "float16", {"streams": True}),
        ((8191, 4096), "bfloat16", {"streams": True}),
        ((32766, 1024), "bfloat16", {}),
        ((8192, 4096), "float32", {"kept": True}),
        ((16384, 1280), "bfloat16", {}),
    ],
)
@measured
def test_rows_from_memory_stream_where_they_are_whole_steps(asked, shape, dtype, fields):
    """Others have a block for each row, wide ones with their numbers kept."""
    assert asked(LayerNorm(), (shape, jnp.dtype(dtype))) == LayerNormConfig("mosaic", num_warps=4, **fields)


@measured
def test_rows_do_not_stream_without_tuning_where_too_many_blocks_would_stay(asked):
    """Under vmap, and on fewer multiprocessors than were measured."""
    held = LayerNormConfig("mosaic", num_warps=4, kept=True)
    assert asked(LayerNorm(), rows(512, 4096), batch=((16, (0,)),)) == held
    assert asked(LayerNorm(), rows(8192, 4096), cores=131) == held
    assert asked(LayerNorm(), rows(8192, 4096), cores=132).streams


@measured
def test_a_vmap_counts_as_rows(asked):
    """A row under a vmap of 4096 is one of as many."""
    assert asked(RmsNorm(), rows(1, 4096), batch=((4096, (0,)),)) == asked(RmsNorm(), rows(4096, 4096))


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ((1, 3072), {"implementation": "mosaic", "num_warps": 4}),
        ((1024, 768), {"implementation": "mosaic", "num_warps": 4}),
        ((8, 50257), {"implementation": "online"}),
        ((64, 50257), {"implementation": "mosaic", "num_warps": 8}),
        ((256, 50257), {"implementation": "mosaic", "num_warps": 4, "each": 16, "shared": True}),
        ((256, 16384), {"implementation": "triton", "rows": 1, "num_warps": 16}),
    ],
)
@measured
def test_softmax_goes_by_what_a_row_to_a_block_keeps_busy(asked, shape, fields):
    """Wide rows: divided where few, in registers up to one a multiprocessor, in shared memory beyond."""
    assert asked(Softmax(), rows(*shape)) == SoftmaxConfig(**fields)


@pytest.mark.parametrize(
    ("kernel", "shape", "implementation"),
    [
        (RmsNorm(), (512, 3072), "mosaic"),
        (RmsNorm(), (16, 1024), "mosaic"),
        (RmsNorm(), (64, 3072), "xla"),
        (Softmax(), (256, 16384), "mosaic"),
    ],
    ids=["many", "whole loads", "few", "wide"],
)
@measured
def test_rows_have_a_guess_without_triton(asked, monkeypatch, kernel, shape, implementation):
    """Mosaic's where it was faster than XLA's."""
    monkeypatch.setenv("EJKERNEL_OPS_TRITON", "off")
    assert asked(kernel, rows(*shape)).implementation == implementation


@pytest.mark.parametrize("capability", ["8.0", "10.0"])
@pytest.mark.parametrize("kernel", [RmsNorm(), LayerNorm(), Softmax()], ids=lambda kernel: kernel.op_id)
def test_another_generation_keeps_its_guess(asked, kernel, capability):
    """One row to a block of Triton's, as long as nothing else was measured there."""
    for shape, warps in (((64, 8192), 16), ((8192, 5120), 8)):
        cfg = asked(kernel, rows(*shape), capability=capability)
        assert (cfg.implementation, cfg.rows, cfg.num_warps) == ("triton", 1, warps)


@pytest.mark.parametrize(("count", "implementation"), [(8192, "mosaic"), (64, "triton")])
@measured
def test_a_residual_norm_is_mosaics_where_a_norm_is(asked, count, implementation):
    """Rows from memory; few rows have a block of Triton's as before."""
    found = asked(ResidualNorm(), rows(count, 4096), rows(count, 4096), ((4096,), jnp.bfloat16))
    assert found.implementation == implementation
