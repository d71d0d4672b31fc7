"""Products and attention without tuning: which way, by waves over the multiprocessors and by what is read."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest
from fakes_mosaic import asked, gpu, needs_mosaic

from ejkernel.library import (
    Attention,
    AttentionConfig,
    LayerNorm,
    LinearCrossEntropy,
    LinearCrossEntropyConfig,
    Matmul,
    MatmulConfig,
    RaggedDot,
    RaggedDotConfig,
)
from ejkernel.library.moe_experts import MoeExperts
from ejkernel.ops import Invocation
from ejkernel.ops.core import device

__all__ = ["asked"]

measured = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="these rules were measured with JAX 0.11")


def factors(rows, depth, columns, dtype=jnp.bfloat16):
    """The arguments of a product."""
    return ((rows, depth), dtype), ((depth, columns), dtype)


def groups(rows, depth, count, columns, dtype=jnp.bfloat16):
    """The arguments of a product with groups."""
    return ((rows, depth), dtype), ((count, depth, columns), dtype), ((count,), jnp.int32)


def heads(batch, length, count, width):
    """Queries, keys and values."""
    return (((batch, length, count, width), jnp.bfloat16),) * 3


@pytest.mark.parametrize(
    ("sizes", "cfg"),
    [
        ((8, 2048, 8192), MatmulConfig("triton", 16, 64, 128, 2, 4)),
        ((8, 2048, 4096), MatmulConfig("xla")),
        ((8, 2048, 32000), MatmulConfig("xla")),
        ((17, 2048, 8192), MatmulConfig("xla")),
        ((1, 1024, 1024), MatmulConfig("triton", 16, 32, 256, 4, 4)),
        ((1, 2048, 1024), MatmulConfig("xla")),
        ((128, 1024, 2048), MatmulConfig("triton", 64, 64, 64, 8, 4)),
        ((512, 2048, 4096), MatmulConfig("mosaic", 128, 128, 64, None, 5)),
        ((512, 2048, 8192), MatmulConfig("mosaic", 128, 256, 64, None, 3)),
        ((512, 2048, 6144), MatmulConfig("xla")),
        ((4096, 4096, 4096), MatmulConfig("xla")),
    ],
    ids=str,
)
@measured
def test_products_are_tiled_where_their_tiles_are_one_good_wave(asked, sizes, cfg):
    """Few rows that read a matrix by most multiprocessors, small matrices, and one wave that is nearly full."""
    assert asked(Matmul(), *factors(*sizes)) == cfg


@measured
def test_products_that_were_not_measured_are_xla_s(asked):
    """Float32, a vmap that XLA may join to one product, and an activation of many rows."""
    few = factors(8, 2048, 8192)
    assert asked(Matmul(), *factors(8, 2048, 8192, jnp.float32)) == MatmulConfig("xla")
    assert asked(Matmul(), *few, batch=((64, (0, None)),)) == MatmulConfig("xla")
    assert asked(Matmul(), *factors(512, 2048, 4096), activation="silu") == MatmulConfig("narrow")
    assert asked(Matmul(), *few, activation="silu").implementation == "triton"


@pytest.mark.parametrize(("rows", "kernels"), [(8, 0), (64, 1)])
def test_few_rows_with_an_activation_keep_their_product_for_the_gradient(rows, kernels):
    """Where a gradient is taken, tiles of few rows are not used: they would compute the product twice."""
    a, b = jnp.ones((rows, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    cfg = MatmulConfig("triton", 16, 32, 32, 4, 2)

    def forward(a, b):
        return Matmul().fwd_with_residuals_gpu(a, b, activation="silu", cfg=cfg)[0]

    assert str(jax.make_jaxpr(forward)(a, b)).count("pallas_call") == kernels


def test_the_gradient_of_tiles_has_narrow_factors():
    """Without an activation: float32 in one factor would be a product of float32."""
    a, b = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)

    def pulled(a, b, dy):
        kernel, cfg = Matmul(), MatmulConfig("triton", 16, 32, 32, 4, 2)
        return kernel.vjp_gpu(kernel.fwd_with_residuals_gpu(a, b, cfg=cfg)[1], None, dy, a, b, cfg=cfg)

    program = jax.make_jaxpr(pulled)(a, b, jnp.ones((32, 64), jnp.bfloat16))
    products = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert len(products) >= 2
    assert {str(x.aval.dtype) for eqn in products for x in eqn.invars} == {"bfloat16"}


@pytest.mark.parametrize(
    ("sizes", "cfg"),
    [
        ((256, 768, 8, 768), RaggedDotConfig("triton", 64, 128, 64, 4, 3)),
        ((512, 1536, 8, 3072), RaggedDotConfig("triton", 64, 128, 64, 4, 3)),
        ((2048, 2048, 64, 768), RaggedDotConfig("mosaic", 128, 256, 64, None, 4)),
        ((1024, 2048, 8, 1024), RaggedDotConfig("mosaic_rolling", 128, 256, 64, None, 4)),
        ((8192, 2048, 8, 1024), RaggedDotConfig("mosaic_rolling", 128, 256, 64, None, 4)),
        ((8192, 2048, 8, 320), RaggedDotConfig("mosaic", 128, 128, 64, None, 5)),
        ((32768, 2048, 128, 768), RaggedDotConfig("mosaic_rolling", 128, 256, 64, None, 4)),
        ((8192, 4096, 8, 14336), RaggedDotConfig("mosaic_rolling", 128, 256, 64, None, 3)),
        ((32, 768, 8, 768), RaggedDotConfig("xla")),
        ((1024, 1000, 8, 1000), RaggedDotConfig("triton", 128, 128, 64, 4, 3)),
    ],
    ids=[
        *(
            "reads",
            "reads at most",
            "reads for many groups",
            "both",
            "multiplies",
            "odd columns",
            "many groups",
            "wide",
        ),
        *("fewer rows than a block", "sizes that no block divides"),
    ],
)
@measured
def test_groups_go_by_their_rows_on_average(asked, sizes, cfg):
    """Triton's low tiles where few groups read matrices, the library's beyond, XLA's for few rows, else Triton's."""
    assert asked(RaggedDot(), *groups(*sizes)) == cfg


@pytest.mark.parametrize(("rows", "implementation"), [(1, "xla"), (128, "xla"), (129, "triton"), (8192, "triton")])
def test_groups_on_another_generation_keep_their_guess(asked, rows, implementation):
    """Where reading the matrices takes the time, a row more for every group costs nothing."""
    assert asked(RaggedDot(), *groups(rows, 512, 8, 256), capability="8.0").implementation == implementation


@pytest.mark.parametrize(
    ("tokens", "words", "padded", "stacked"),
    [(4096, 32000, None, True), (8192, 50257, 128, True), (8192, 131072, None, False), (16384, 50257, 128, False)],
    ids=["few", "odd", "many", "many and odd"],
)
@measured
def test_cross_entropy_pads_odd_words_and_keeps_derivatives_that_are_not_large(asked, tokens, words, padded, stacked):
    """Up to a GiB of them, where widths are such that exponentials cannot be."""
    shapes = ((tokens, 800), jnp.bfloat16), ((800, words), jnp.bfloat16), ((tokens,), jnp.int32)
    found = asked(LinearCrossEntropy(), *shapes)
    assert (found.implementation, found.padded, found.stacked) == ("triton", padded, stacked)


def tokens_by_words(tokens, depth, words):
    """Hidden states, a weight and labels."""
    return ((tokens, depth), jnp.bfloat16), ((depth, words), jnp.bfloat16), ((tokens,), jnp.int32)


@pytest.mark.parametrize(
    ("sizes", "is_kept"),
    [
        ((8192, 512, 32000), True),
        ((8192, 448, 32000), False),
        ((128, 768, 1 << 20), True),
        ((120, 768, 5 << 18), False),
        ((8192, 768, 12800), False),
    ],
    ids=["deep", "shallow", "a tile of tokens", "less than a tile", "small"],
)
@measured
def test_exponentials_are_kept_without_tuning_where_tiles_are_full_and_products_deep(asked, sizes, is_kept):
    """By depth, tokens and bytes; they are a candidate in any case."""
    assert (asked(LinearCrossEntropy(), *tokens_by_words(*sizes)).implementation == "mosaic_kept") == is_kept
    inv = Invocation("x", tuple(jax.ShapeDtypeStruct(*one) for one in tokens_by_words(*sizes)), {})
    assert LinearCrossEntropyConfig("mosaic_kept") in LinearCrossEntropy().candidate_cfgs_gpu(inv)


@pytest.mark.parametrize(
    ("kernel", "shapes", "most", "fewer"),
    [
        (LinearCrossEntropy(), tokens_by_words(8192, 768, 32000), "mosaic_kept", "triton"),
        (RaggedDot(), groups(8192, 2048, 8, 1024), "mosaic_rolling", "mosaic"),
        (
            MoeExperts(),
            (*groups(8192, 512, 8, 768)[:2], *groups(8192, 512, 8, 768)[1:2], *groups(8192, 768, 8, 512)[1:]),
            "mosaic_gated",
            "mosaic",
        ),
    ],
    ids=lambda value: getattr(value, "op_id", None),
)
@measured
def test_blocks_that_stay_are_a_guess_where_all_run_at_once(asked, kernel, shapes, most, fewer):
    """On fewer multiprocessors the guess is the one without them, and a tuning compares both."""
    assert asked(kernel, *shapes).implementation == most
    assert asked(kernel, *shapes, cores=114).implementation == fewer
    inv = Invocation("x", tuple(jax.ShapeDtypeStruct(*one) for one in shapes), {})
    assert most in {cfg.implementation for cfg in kernel.candidate_cfgs_gpu(inv)}


@measured
def test_attention_s_blocks_do_not_stay_where_some_would_follow_the_others(asked, with_cudnn):
    """On fewer multiprocessors than there are blocks."""
    found = [asked(Attention(), *heads(2, 512, 32, 128), scale=0.1, causal=True, cores=n) for n in (132, 114)]
    assert [cfg.persistent for cfg in found] == [True, False]


@measured
def test_a_call_that_is_given_a_mesh_has_no_guess_by_the_sizes_of_all_its_parts():
    """Of 32772 rows four devices have 8193 each, which are no whole steps."""
    token = device._target.set(gpu("9.0"))
    try:
        x = jax.ShapeDtypeStruct((32772, 1024), jnp.bfloat16)
        whole, divided = (Invocation("x", (x,), {}, method=method) for method in (None, "shard_map"))
        assert LayerNorm().heuristic_cfg_gpu(whole).streams
        assert not LayerNorm().heuristic_cfg_gpu(divided).streams
    finally:
        device._target.reset(token)


@measured
def test_products_have_a_guess_without_triton(asked, monkeypatch):
    """Mosaic's: many rows of a group, and the logits of a cross entropy."""
    monkeypatch.setenv("EJKERNEL_OPS_TRITON", "off")
    assert asked(RaggedDot(), *groups(8192, 2048, 8, 1024)).implementation == "mosaic_rolling"
    assert asked(RaggedDot(), *groups(512, 2048, 8, 1024)).implementation == "mosaic"
    words = ((64, 256), jnp.bfloat16), ((256, 32000), jnp.bfloat16), ((64,), jnp.int32)
    assert asked(LinearCrossEntropy(), *words).implementation == "mosaic"
    assert asked(Matmul(), *factors(8, 2048, 8192)) == MatmulConfig("xla")


@needs_mosaic
def test_a_vmap_of_jaxs_kernel_for_groups_is_a_loop():
    """It has no rule of its own, and a vmap outside of a jit is not known when it is guessed."""
    cfg = RaggedDotConfig("mosaic_jax", 64, 128, 64, None, 4)
    shapes = [jax.ShapeDtypeStruct((3, *shape), dtype) for shape, dtype in groups(128, 128, 4, 128)]
    mapped = jax.jit(jax.vmap(lambda *arrays: RaggedDot().run(*arrays, cfg=cfg)))
    text = mapped.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "stablehlo.while" in text


@pytest.fixture
def with_cudnn(monkeypatch):
    """JAX has nothing against cuDNN."""
    monkeypatch.setattr(sys.modules[Attention.__module__], "jax_refuses_cudnn", lambda *args, **kwargs: "")


def tiled(block_q, block_k, persistent=False):
    """Mosaic's forward pass and cuDNN's gradient."""
    how = {"num_stages": 2, "backward": "cudnn", "persistent": persistent}
    return AttentionConfig("mosaic", block_q, block_k, **how)


@pytest.mark.parametrize(
    ("sizes", "cfg"),
    [
        ((2, 512, 32, 128), tiled(128, 128, persistent=True)),
        ((2, 16384, 8, 128), tiled(128, 128)),
        ((4, 2048, 16, 64), tiled(192, 128)),
        ((8, 1024, 12, 64), tiled(128, 128, persistent=True)),
        ((1, 1024, 16, 64), tiled(128, 128)),
        ((2, 4096, 8, 256), tiled(128, 64)),
        ((1, 250, 16, 64), AttentionConfig("cudnn")),
        ((1, 512, 16, 80), AttentionConfig("cudnn")),
    ],
    ids=["stays", "sections", "narrow heads", "a rest", "one wave", "wide heads", "odd length", "odd heads"],
)
@measured
def test_attention_is_mosaics_where_it_serves(asked, with_cudnn, sizes, cfg):
    """With blocks by the width of heads; blocks of threads stay where they have as much to do as each other."""
    assert asked(Attention(), *heads(*sizes), scale=0.1, causal=True) == cfg


def test_attention_on_another_generation_is_cudnns(asked, with_cudnn):
    """Mosaic's kernel needs a Hopper GPU."""
    cfg = asked(Attention(), *heads(1, 256, 16, 64), scale=0.1, capability="8.0")
    assert cfg == AttentionConfig("cudnn")
