"""Gradients of gradients: what a call can do does not depend on how it is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import normal

from ejkernel.library import (
    LayerNormConfig,
    LinearCrossEntropyConfig,
    MatmulConfig,
    RaggedDotConfig,
    RmsNormConfig,
    SoftmaxConfig,
    layer_norm,
    linear_cross_entropy,
    matmul,
    ragged_dot,
    rms_norm,
    softmax,
)
from ejkernel.library.linear_cross_entropy import LinearCrossEntropy
from ejkernel.library.matmul import Matmul
from ejkernel.library.ragged_dot import RaggedDot
from ejkernel.library.rms_norm import RmsNorm
from ejkernel.library.softmax import Softmax

P = jax.sharding.PartitionSpec
BLOCK = {"rows": 2, "num_warps": 1}
LABELS = jnp.array([1, 2, 3, -100])
SIZES = jnp.array([3, 0, 4])

CASES = {
    "rms_norm": (rms_norm, ((4, 32), (32,)), RmsNormConfig, [RmsNormConfig("triton", **BLOCK)]),
    "rms_norm, wide": (rms_norm, ((2, 8200), (8200,)), RmsNormConfig, [RmsNormConfig("triton", rows=1, num_warps=4)]),
    "layer_norm": (layer_norm, ((4, 32), (32,), (32,)), LayerNormConfig, [LayerNormConfig("triton", **BLOCK)]),
    "softmax": (lambda x, cfg: softmax(x, cfg=cfg) * 9, ((4, 32),), SoftmaxConfig, [SoftmaxConfig("triton", **BLOCK)]),
    "matmul": (matmul, ((4, 32), (32, 16)), MatmulConfig, [MatmulConfig("triton", 16, 16, 16, 1, 1)]),
    "linear_cross_entropy": (
        lambda x, w, cfg: linear_cross_entropy(x, w, LABELS, label_smoothing=0.1, z_loss=0.01, cfg=cfg),
        ((4, 32), (32, 50)),
        LinearCrossEntropyConfig,
        [LinearCrossEntropyConfig(*way) for way in (("triton", 2), ("triton",), ("chunked_vocab", 16))],
    ),
    "ragged_dot": (
        lambda x, w, cfg: ragged_dot(x, w, SIZES, cfg=cfg),
        ((8, 16), (3, 16, 16)),
        lambda name: RaggedDotConfig("masked"),
        [RaggedDotConfig("xla"), RaggedDotConfig("tiled", 4), RaggedDotConfig("triton", 16, 16, 16, 1, 1)],
    ),
}


def twice(fn, args):
    """The gradient of the length of the gradient."""
    places = tuple(range(len(args)))

    def once(*args):
        first = jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), argnums=places)(*args)
        return sum(jnp.sum(part**2) for part in first)

    return jax.jit(jax.grad(once, argnums=places))(*args)


@pytest.mark.parametrize(("fn", "shapes", "kind", "cfgs"), CASES.values(), ids=CASES)
def test_every_way_has_the_gradients_of_its_gradients(fn, shapes, kind, cfgs):
    """As the plain one."""
    args = tuple(normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    expected = twice(lambda *a: fn(*a, cfg=kind("xla")), args)
    for cfg in cfgs:
        for one, other in zip(twice(lambda *a, cfg=cfg: fn(*a, cfg=cfg), args), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3 * float(jnp.max(jnp.abs(other))))


SHARED = {
    "rms_norm": (RmsNorm(), RmsNormConfig("triton", **BLOCK), (((4, 32), "float32"), ((32,), "float32"))),
    "softmax": (Softmax(), SoftmaxConfig("triton", **BLOCK), (((4, 32), "float32"),)),
    "matmul": (Matmul(), MatmulConfig("triton", 16, 16, 16, 1, 1), (((4, 32), "float32"), ((32, 16), "float32"))),
    "linear_cross_entropy": (
        LinearCrossEntropy(),
        LinearCrossEntropyConfig("triton", 2),
        (((4, 32), "float32"), ((32, 50), "float32"), ((4,), "int32")),
    ),
    "ragged_dot": (
        RaggedDot(),
        RaggedDotConfig("triton", 16, 16, 16, 1, 1),
        (((8, 16), "float32"), ((3, 16, 16), "float32"), ((3,), "int32")),
    ),
}


@pytest.mark.parametrize(("kernel", "cfg", "arrays"), SHARED.values(), ids=SHARED)
def test_pallas_kernels_run_where_no_shard_differs(kernel, cfg, arrays):
    """Inside shard_map with its checks on, as a GPU would trace it: on shapes, since a CPU cannot run it."""
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": tuple(P() for _ in arrays), "out_specs": P()}
    fn = jax.shard_map(lambda *args: kernel.run(*args, cfg=cfg), mesh=mesh, **specs)
    plain = jax.eval_shape(lambda *a: kernel.run(*a, cfg=cfg), *(jax.ShapeDtypeStruct(*array) for array in arrays))

    assert jax.eval_shape(fn, *(jax.ShapeDtypeStruct(*array) for array in arrays)).shape == plain.shape
