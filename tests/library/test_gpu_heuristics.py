"""What a GPU gets without tuning: measured on one kind, safe on every other.

Covers `library/extent.py` and `library/mosaic/measured_calls.py`.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_mosaic import hopper as on_hopper

from ejkernel.library import (
    Attention,
    AttentionConfig,
    LayerNorm,
    LayerNormConfig,
    LinearCrossEntropy,
    LinearCrossEntropyConfig,
    Matmul,
    MatmulConfig,
    QuantizedMatmul,
    RaggedDot,
    RaggedDotConfig,
    RmsNorm,
    RmsNormConfig,
    ScaledMatmul,
    Softmax,
    SoftmaxConfig,
    attention_jax,
)
from ejkernel.library.mosaic.measured_calls import is_measured
from ejkernel.ops import Invocation


@pytest.mark.parametrize("kernel", [Softmax(), LayerNorm(), RmsNorm()], ids=lambda k: k.op_id)
@pytest.mark.parametrize(
    ("kind", "shape", "implementation"),
    [
        ("NVIDIA H200", (64, 1024), "triton"),
        ("NVIDIA H200", (64, 1000), "triton"),
        ("NVIDIA H200", (8192, 64), "xla"),
        ("NVIDIA H200", (4, 40_000), "xla"),
        ("NVIDIA H200", (1 << 20, 2048), "xla"),
        ("NVIDIA H200", (0, 2048), "xla"),
        ("AMD Instinct MI300X", (64, 1024), "xla"),
    ],
    ids=["even", "odd", "short rows", "too wide", "too large", "empty", "another maker"],
)
def test_rows_have_blocks_of_their_own_where_that_was_measured(monkeypatch, kernel, kind, shape, implementation):
    """Elsewhere, and where a row does not fit, XLA's own."""
    found = SimpleNamespace(device_kind=kind)
    monkeypatch.setattr("ejkernel.library.triton.rows.device_of", lambda inv: found)
    inv = Invocation("x", (jax.ShapeDtypeStruct(shape, jnp.bfloat16),), {})

    assert kernel.heuristic_cfg_gpu(inv).implementation == implementation


measured = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic kernels were measured with JAX 0.11")


@pytest.fixture
def hopper(monkeypatch):
    """Calls are asked for on an H200."""
    found = SimpleNamespace(device_kind="NVIDIA H200", platform="gpu", compute_capability="9.0")
    monkeypatch.setattr("ejkernel.library.triton.rows.device_of", lambda inv: found)
    monkeypatch.setattr("ejkernel.library.mosaic.served.device_of", lambda inv: found)


@pytest.mark.parametrize(
    ("kernel", "shape", "cfg"),
    [
        (RmsNorm(), (4096, 4096), RmsNormConfig("mosaic", num_warps=4)),
        (LayerNorm(), (32768, 1024), LayerNormConfig("mosaic", num_warps=4, streams=True)),
        (Softmax(), (8192, 2048), SoftmaxConfig("mosaic", num_warps=4)),
        (Softmax(), (4096, 32000), SoftmaxConfig("mosaic", num_warps=4, each=16, shared=True)),
        (Softmax(), (2048, 50257), SoftmaxConfig("mosaic", num_warps=4, each=16, shared=True)),
        (Softmax(), (512, 128256), SoftmaxConfig("mosaic", num_warps=4, each=16)),
    ],
    ids=lambda value: str(getattr(value, "op_id", value)),
)
@measured
def test_rows_are_mosaics_where_that_was_the_fastest(hopper, kernel, shape, cfg):
    """On a Hopper GPU; the guess is one of the candidates."""
    inv = Invocation("x", (jax.ShapeDtypeStruct(shape, jnp.bfloat16),), {})
    assert kernel.heuristic_cfg_gpu(inv) == cfg
    assert cfg in [*kernel.candidate_cfgs_gpu(inv)]


@pytest.mark.parametrize(
    ("rows", "scales", "implementation"),
    [(64, (8192,), "mosaic_ahead"), (1, (8192,), "scaled"), (64, (64, 8192), "dequantize")],
)
@measured
def test_weights_of_few_bits_are_mosaics_for_a_batch_of_decoding(hopper, rows, scales, implementation):
    """What was measured; one row and scales of groups were not."""
    shapes = [((rows, 8192), jnp.bfloat16), ((8192, 8192), jnp.int8), (scales, jnp.float32)]
    inv = Invocation("x", tuple(jax.ShapeDtypeStruct(*one) for one in shapes), {})
    assert QuantizedMatmul().heuristic_cfg_gpu(inv).implementation == implementation


@pytest.mark.parametrize(
    ("sizes", "scales", "block"),
    [
        ((4096, 4096), ((1, 1), (1, 1)), 256),
        ((4096, 4096), ((4096, 56), (56, 32)), 192),
        ((64, 512), ((1, 1), (1, 1)), None),
    ],
    ids=["constant scales", "scales by block", "too few blocks"],
)
@measured
def test_float8_is_mosaics_where_it_fills_the_gpu(hopper, sizes, scales, block):
    """Scales by block need registers that the largest blocks do not have."""
    rows, columns = sizes
    shapes = [
        ((rows, 7168), jnp.float8_e4m3fn),
        ((7168, columns), jnp.float8_e4m3fn),
        *((one, jnp.float32) for one in scales),
    ]
    inv = Invocation("x", tuple(jax.ShapeDtypeStruct(*one) for one in shapes), {"dtype": "bfloat16"})
    cfg = ScaledMatmul().heuristic_cfg_gpu(inv)
    assert cfg.block_m == block
    assert cfg.implementation == ("float8" if block is None else "mosaic")
    assert cfg in [*ScaledMatmul().candidate_cfgs_gpu(inv)]


def test_an_older_jax_has_no_guess_that_was_not_measured_with_it(hopper, monkeypatch):
    """Rows are Triton's there, and float8 is XLA's."""
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 0))
    inv = Invocation("x", (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),), {})
    assert RmsNorm().heuristic_cfg_gpu(inv).implementation == "triton"
    shapes = [((4096, 4096), jnp.float8_e4m3fn)] * 2 + [((1, 1), jnp.float32)] * 2
    inv = Invocation("x", tuple(jax.ShapeDtypeStruct(*one) for one in shapes), {})
    assert ScaledMatmul().heuristic_cfg_gpu(inv).implementation == "float8"


@pytest.mark.parametrize("shape", [(8192, 512), (4096, 16384)])
def test_rows_that_were_not_measured_by_mosaic_are_tritons(hopper, shape):
    """Short ones, and those between what registers and shared memory suit."""
    for kernel in (Softmax(), LayerNorm(), RmsNorm()):
        inv = Invocation("x", (jax.ShapeDtypeStruct(shape, jnp.bfloat16),), {})
        assert kernel.heuristic_cfg_gpu(inv).implementation == "triton"


def test_many_rows_have_fewer_threads_each(monkeypatch):
    """Few rows must keep the device busy by themselves."""
    monkeypatch.setattr(
        "ejkernel.library.triton.rows.device_of", lambda inv: SimpleNamespace(device_kind="NVIDIA H200")
    )

    def warps(*shape):
        return Softmax().heuristic_cfg_gpu(Invocation("x", (jax.ShapeDtypeStruct(shape, jnp.bfloat16),), {})).num_warps

    assert (warps(128, 4096), warps(16384, 4096), warps(4, 8, 32, 4096)) == (8, 4, 4)


def tokens_and_words(tokens, words):
    """A call of linear_cross_entropy."""
    shapes = ((tokens, 64), jnp.bfloat16), ((64, words), jnp.bfloat16), ((tokens,), jnp.int32)
    return Invocation("x", tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), {})


def on_a(kind, monkeypatch):
    """Calls of linear_cross_entropy have this device."""
    found = SimpleNamespace(device_kind=kind, platform="cuda" if kind.startswith("NVIDIA") else "rocm")
    monkeypatch.setattr("ejkernel.library.triton.rows.device_of", lambda inv: found)
    monkeypatch.setattr(sys.modules[LinearCrossEntropy.__module__], "device_of", lambda inv: found)


def test_small_logits_are_computed_at_once_on_a_gpu(monkeypatch):
    """Up to the size that may be held; beyond it in chunks."""
    on_a("AMD Instinct MI300X", monkeypatch)

    def chosen(tokens, words):
        return LinearCrossEntropy().heuristic_cfg_gpu(tokens_and_words(tokens, words)).implementation

    assert (chosen(512, 32_000), chosen(8192, 32_000)) == ("xla", "chunked_tokens")


@pytest.mark.parametrize(
    ("tokens", "words", "chunk"),
    [
        (512, 32_000, None),
        (4096, 151_936, 2048),
        (8192, 131_072, 4096),
        (16384, 131_072, 2048),
        (8191, 32_000, 4096),
        (1, 32_000, None),
    ],
)
def test_logits_are_read_once_in_as_few_chunks_as_may_be(monkeypatch, tokens, words, chunk):
    """By the kernel on NVIDIA GPUs: all at once where small, else half of them up to 2 GiB, else up to 1."""
    on_a("NVIDIA H200", monkeypatch)
    kernel, inv = LinearCrossEntropy(), tokens_and_words(tokens, words)
    chosen = kernel.heuristic_cfg_gpu(inv)
    assert chosen == LinearCrossEntropyConfig("triton", chunk, block=2048, num_warps=8)
    assert kernel.valid_cfg(inv, chosen) is True


@pytest.mark.parametrize(("tokens", "words"), [(2, 5), (512, 32_000), (1000, 50), (4096, 151_936), (8192, 1 << 20)])
def test_candidates_of_the_kernel_are_few_and_can_run(monkeypatch, tokens, words):
    """Each chunk once, three launches for the largest, and never all logits beyond what may be held."""
    on_a("NVIDIA H200", monkeypatch)
    kernel, inv = LinearCrossEntropy(), tokens_and_words(tokens, words)
    found = list(kernel.candidate_cfgs_gpu(inv))
    whole = [cfg for cfg in found if cfg.padded or cfg.stacked]
    by_kernel = [cfg for cfg in found if cfg.implementation == "triton" and cfg not in whole]
    others = [cfg for cfg in found if cfg.implementation not in ("triton", "mosaic")]
    assert others == list(kernel.candidate_cfgs(inv))
    assert all(kernel.valid_cfg(inv, cfg) is True for cfg in (*by_kernel, *whole))
    assert len(set(whole)) == len(whole) <= 4
    assert kernel.heuristic_cfg_gpu(inv) == by_kernel[0]
    assert len(set(by_kernel)) == len(by_kernel) == len({cfg.chunk for cfg in by_kernel}) + 2
    assert all(cfg.chunk is None or cfg.chunk < tokens for cfg in by_kernel)
    assert (None in {cfg.chunk for cfg in by_kernel}) == (tokens * words <= 1 << 24)


def test_where_cudnn_has_no_gradient_another_s_serves(monkeypatch):
    """The output is cuDNN's, here XLA's in its place, and the gradients are right."""
    module = sys.modules[Attention.__module__]
    plain, asked = attention_jax.by_jax, []

    def by_jax(*args, implementation, **kwargs):
        asked.append(implementation)
        return plain(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(attention_jax, "by_jax", by_jax)
    monkeypatch.setattr(module, "jax_refuses_cudnn", lambda *args, gradient, **kwargs: "odd" if gradient else "")
    given = [jnp.asarray(np.random.default_rng(n).standard_normal((1, 7, 2, 8), np.float32)) for n in range(3)]
    kernel, how = Attention(), {"scale": 0.5, "causal": True, "cfg": AttentionConfig("cudnn")}
    out, residuals = jax.jit(lambda *a: kernel.fwd_with_residuals_gpu(*a, **how))(*given)
    dy = jnp.asarray(np.ones_like(out))
    grads = jax.jit(lambda *a: kernel.vjp_gpu(*a, **how))(residuals, out, dy, *given)

    @jax.jit
    def xla(*given):
        made, pull = jax.vjp(lambda *a: jax.nn.dot_product_attention(*a, scale=0.5, is_causal=True), *given)
        return made, *pull(dy)

    wanted = xla(*given)
    assert asked == ["cudnn"]
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip((out, *grads), wanted, strict=True))


@pytest.mark.parametrize(
    ("kernel", "cfg", "shapes"),
    [
        (Matmul(), MatmulConfig("triton", 64, 64, 32, 4, 2), ((1 << 16, 64), (64, 1 << 15))),
        (RaggedDot(), RaggedDotConfig("triton", 64, 64, 32, 4, 2), ((64, 1 << 16), (8, 1 << 16, 1 << 12), (8,))),
        (LinearCrossEntropy(), LinearCrossEntropyConfig("triton", 1 << 14), ((1 << 15, 8), (8, 1 << 17), (1 << 15,))),
    ],
    ids=lambda value: getattr(value, "op_id", None),
)
def test_arrays_that_pallas_cannot_count_are_refused(monkeypatch, kernel, cfg, shapes):
    """A kernel whose offsets overflow would read elsewhere."""
    found = SimpleNamespace(device_kind="NVIDIA H200", platform="cuda")
    monkeypatch.setattr(sys.modules[type(kernel).__module__], "device_of", lambda inv: found, raising=False)
    arrays = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    assert "counts in 32 bits" in kernel.valid_cfg(Invocation("x", arrays, {}), cfg)


def test_a_vmap_counts_for_what_pallas_cannot_count():
    """The kernel gets all examples at once."""
    one = (jax.ShapeDtypeStruct((1 << 16, 1 << 12), jnp.bfloat16),)
    cfg = SoftmaxConfig("triton", rows=1, num_warps=4)

    assert Softmax().valid_cfg(Invocation("x", one, {}), cfg) is True
    assert "counts in 32 bits" in Softmax().valid_cfg(Invocation("x", one, {}, batch_axes=((2, (0,)), (4, (0,)))), cfg)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="these rules were measured with JAX 0.11")
@pytest.mark.parametrize(("devices", "by_hand", "is_one_s"), [(1, False, True), (2, False, False), (2, True, True)])
def test_a_traced_call_has_no_kernel_of_ours_where_xla_may_divide_it(monkeypatch, devices, by_hand, is_one_s):
    """XLA would gather its arrays; inside shard_map each device has its own part."""
    on_hopper(monkeypatch)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    found = []

    def asks(x):
        found.append(is_measured(Invocation("x", (x,), {}), x.size))
        return x

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("rows",))
    spec = jax.sharding.PartitionSpec("rows")
    fn = jax.shard_map(asks, mesh=mesh, in_specs=spec, out_specs=spec) if by_hand else asks
    jax.jit(fn).trace(jnp.ones((8, 128)))
    assert found == [is_one_s]


def test_an_array_on_several_devices_has_no_kernel_of_ours(monkeypatch):
    """Outside of a trace its sharding tells."""
    on_hopper(monkeypatch)
    mesh = jax.sharding.AbstractMesh((2,), ("rows",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    assert not is_measured(Invocation("x", (jax.ShapeDtypeStruct((8, 128), "bfloat16", sharding=place),), {}), 1024)
