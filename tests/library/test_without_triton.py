"""The library without Pallas-Triton: by the setting, and on a JAX that has it no more.

Covers `library/mosaic/served.py` and `library/triton/served.py`.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from fakes import REPOSITORY

from ejkernel import library
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
    RmsNorm,
    RmsNormConfig,
    Softmax,
    SoftmaxConfig,
    softmax,
)
from ejkernel.ops import Invocation


def shapes(*given):
    """A call with arrays of these shapes, of bfloat16 unless told."""
    pairs = (shape if isinstance(shape[0], tuple) else (shape, jnp.bfloat16) for shape in given)
    return tuple(jax.ShapeDtypeStruct(*pair) for pair in pairs)


CALLS = [
    (Softmax(), shapes((4096, 4096)), {}, SoftmaxConfig("triton", rows=1, num_warps=4)),
    (RmsNorm(), shapes((4096, 4096)), {}, RmsNormConfig("triton", rows=1, num_warps=4)),
    (LayerNorm(), shapes((4096, 4096)), {}, None),
    (Matmul(), shapes((4096, 4096), (4096, 4096)), {}, MatmulConfig("triton", 64, 64, 64, 4, 2)),
    (
        RaggedDot(),
        shapes((4096, 512), (8, 512, 512), ((8,), jnp.int32)),
        {},
        RaggedDotConfig("triton", 64, 64, 32, 4, 2),
    ),
    (LinearCrossEntropy(), shapes((512, 64), (64, 8192), ((512,), jnp.int32)), {}, LinearCrossEntropyConfig("triton")),
    (Attention(), shapes(*[(1, 256, 2, 64)] * 3), {"scale": 0.1}, AttentionConfig("pallas", 128, 128)),
]


CALLS += [
    (library.TopK(), shapes((64, 1024)), {"k": 4}, library.TopKConfig("triton", rows=1, num_warps=4)),
    (library.ResidualNorm(), shapes((4096, 4096), (4096, 4096)), {}, None),
    (
        library.QuantizedMatmul(),
        shapes((64, 1024), ((1024, 1024), jnp.int8), ((1024,), jnp.float32)),
        {},
        library.QuantizedMatmulConfig("triton", 64, 64, 4, 3),
    ),
    (
        library.DecodeAttention(),
        shapes((8, 1, 8, 64), (64, 64, 2, 64), (64, 64, 2, 64), ((8,), jnp.int32), ((8, 8), jnp.int32)),
        {"scale": 0.1},
        library.DecodeAttentionConfig("triton", 1, 64, 4, 3),
    ),
]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Calls have an H200 for a device."""
    found = SimpleNamespace(device_kind="NVIDIA H200", platform="cuda", compute_capability="9.0")
    for module in ("triton.rows", "mosaic.served", "ragged_dot", "linear_cross_entropy", "attention"):
        place = sys.modules.get(f"ejkernel.library.{module}")
        if hasattr(place, "device_of"):
            monkeypatch.setattr(place, "device_of", lambda inv: found)


@pytest.mark.parametrize(("kernel", "args", "static", "cfg"), CALLS, ids=lambda value: getattr(value, "op_id", None))
def test_no_way_of_triton_takes_part(monkeypatch, on_a_gpu, kernel, args, static, cfg):
    """With the setting off: neither guessed nor measured, and a cfg by hand says which setting it was."""
    inv = Invocation(kernel.op_id, args, static)
    monkeypatch.setenv("EJKERNEL_OPS_TRITON", "off")
    offered = [one for one in kernel.candidate_cfgs_gpu(inv) if kernel.valid_cfg(inv, one) is True]
    guess = getattr(kernel, "heuristic_cfg_gpu", kernel.heuristic_cfg)(inv)
    names = {one.implementation for one in [*offered, guess]}
    assert names
    assert not names & {"triton", "triton_lists", "pallas"}
    if cfg is not None:
        assert kernel.valid_cfg(inv, cfg) == "EJKERNEL_OPS_TRITON=off leaves Pallas-Triton out"
        monkeypatch.setenv("EJKERNEL_OPS_TRITON", "on")
        assert kernel.valid_cfg(inv, cfg) is True


def test_a_cfg_by_hand_is_refused_with_a_sentence(monkeypatch):
    """Not with what an import says."""
    monkeypatch.setenv("EJKERNEL_OPS_TRITON", "off")
    with pytest.raises(ValueError, match="needs Pallas-Triton: EJKERNEL_OPS_TRITON=off"):
        softmax(jnp.ones((2, 256)), cfg=SoftmaxConfig("triton", rows=1, num_warps=1))


# Every operation with its gradient where JAX has no Triton backend, with warnings as errors.
PROGRAM = """
import sys, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp
import jax.experimental.pallas
if {gone}:
    sys.modules["jax.experimental.pallas.triton"] = None
import ejkernel.library as lib
from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Invocation
executor = Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False)))
x, w = jnp.ones((4, 128)), jnp.ones((128, 16))
q = jnp.ones((1, 8, 2, 16))
for fn in (
    lambda: lib.softmax(x, executor=executor),
    lambda: lib.rms_norm(x, x[0], executor=executor),
    lambda: lib.layer_norm(x, x[0], x[1], executor=executor),
    lambda: lib.matmul(x, w, executor=executor),
    lambda: lib.ragged_dot(x, w[None], jnp.array([4]), executor=executor),
    lambda: lib.linear_cross_entropy(x, w, jnp.array([1, 2, 3, 4]), executor=executor),
    lambda: lib.attention(q, q, q, executor=executor),
    lambda: lib.top_k(x, 3, executor=executor),
    lambda: lib.sample(jax.random.key(0), x, top_p=0.9, executor=executor),
    lambda: lib.residual_norm(x, x, x[0], executor=executor),
    lambda: lib.decode_attention(q[:, 0], q, q, None, jnp.array([5]), executor=executor),
    lambda: lib.gated_delta_rule(q, q, q, q[..., 0], q[..., 0], executor=executor),
    lambda: lib.quantized_matmul(x, *lib.quantize(w), executor=executor),
    lambda: lib.float8_matmul(x, w, executor=executor),
    lambda: lib.moe(x, x[:, :2], *[jnp.ones((2, 128, 8))] * 2, jnp.ones((2, 8, 128)), k=1, executor=executor),
):
    jax.block_until_ready(fn())
shape = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16)
kernel, inv = lib.Softmax(), Invocation("x", (shape,), {{}})
print(kernel.valid_cfg(inv, lib.SoftmaxConfig("triton", rows=1, num_warps=4)))
assert sys.modules.get("jax.experimental.pallas.triton") is None, "imported without need"
"""


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("gone", [False, True], ids=["left out", "gone"])
def test_the_library_runs_without_it(monkeypatch, gone):
    """In a process of its own: nothing imports it, nothing warns, and its ways say why they are left out."""
    if not gone:
        monkeypatch.setenv("EJKERNEL_OPS_TRITON", "off")
    command = [sys.executable, "-c", PROGRAM.format(gone=gone)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    reason = (
        f"jax {jax.__version__} has no Pallas-Triton" if gone else "EJKERNEL_OPS_TRITON=off leaves Pallas-Triton out"
    )
    assert done.stdout.strip() == reason
