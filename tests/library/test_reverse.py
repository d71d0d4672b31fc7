"""Gradients as they are on a GPU: reverse mode alone, whatever was tuned.

Covers `library/varying.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, normal, pull

from ejkernel.library import LayerNorm, LayerNormConfig, Matmul, MatmulConfig, RmsNorm, RmsNormConfig
from ejkernel.library.reverse import ReverseOnGpu, recomputed

P = jax.sharding.PartitionSpec


class AsOnGpu:
    """Gives a kernel on a CPU the gradient that it has on a GPU."""

    fwd_with_residuals = ReverseOnGpu.fwd_with_residuals_gpu
    vjp = ReverseOnGpu.vjp_gpu

    def __init_subclass__(cls):
        # Else the plain level would not be asked: a CPU's own is more specific.
        cls.run = cls.run_cpu


class Rms(AsOnGpu, RmsNorm):
    """rms_norm as on a GPU."""

    def run_cpu(self, *args, cfg, **kwargs):
        return RmsNorm.run(self, *args, cfg=cfg, interpret=True, **kwargs)


class Layer(AsOnGpu, LayerNorm):
    """layer_norm as on a GPU."""

    def run_cpu(self, *args, cfg, **kwargs):
        return LayerNorm.run(self, *args, cfg=cfg, interpret=True, **kwargs)


class Product(AsOnGpu, Matmul):
    """matmul as on a GPU."""

    def run_cpu(self, *args, cfg, **kwargs):
        return Matmul.run(self, *args, cfg=cfg, interpret=True, **kwargs)


CASES = {
    "rms_norm xla": (Rms(), RmsNormConfig("xla"), ((4, 6, 32), (32,))),
    "rms_norm recompute": (Rms(), RmsNormConfig("recompute"), ((4, 6, 32), (32,))),
    "rms_norm triton": (Rms(), RmsNormConfig("triton", rows=4, num_warps=2), ((4, 6, 32), (32,))),
    "layer_norm triton": (Layer(), LayerNormConfig("triton", rows=4, num_warps=2), ((4, 6, 32), (32,), (32,))),
    "matmul xla": (Product(), MatmulConfig("xla"), ((4, 6, 16), (16, 8), (8,))),
}


@pytest.mark.parametrize(("kernel", "cfg", "shapes"), CASES.values(), ids=CASES)
def test_gradients_are_those_of_the_plain_way(kernel, cfg, shapes):
    """Eagerly, jitted, mapped, scanned and sharded over the batch."""
    args = tuple(normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    plain = type(kernel).__mro__[2]()
    kind = type(cfg)("xla")
    dy = jnp.ones_like(jax.eval_shape(lambda *a: plain.run(*a, cfg=kind), *args))
    expected = pull(lambda *a: plain.run(*a, cfg=kind), args, dy)

    def apply(*args):
        return UNTUNED(kernel, *args, cfg=cfg)

    def mapped(*args):
        return jax.vmap(lambda x: apply(x, *args[1:]))(args[0])

    def scanned(*args):
        return jax.lax.scan(lambda c, x: (c, apply(x, *args[1:])), 0, args[0])[1]

    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P("batch"), *(P() for _ in args[1:])), "out_specs": P("batch")}
    # JAX's interpreter of Pallas kernels cannot check how its values vary.
    sharded = jax.shard_map(apply, mesh=mesh, check_vma=cfg.implementation != "triton", **specs)
    for fn in (apply, mapped, scanned, sharded):
        for one, other in zip(pull(fn, args, dy), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_forward_mode_says_that_there_is_none():
    """A TypeError names the kernel, for the plain implementation too: it does not depend on what was tuned."""
    x = normal(3, 8)
    with pytest.raises(TypeError, match=r"library.rms_norm"):
        jax.jvp(lambda x: UNTUNED(Rms(), x, cfg=RmsNormConfig("xla")), (x,), (x,))


def test_an_argument_that_is_not_given_has_no_gradient():
    """layer_norm with a bias alone."""
    x, bias = normal(3, 8), normal(8, seed=1)
    gradient = jax.grad(lambda b: UNTUNED(Layer(), x, None, b, cfg=LayerNormConfig("xla")).sum())(bias)
    np.testing.assert_allclose(gradient, np.full(8, 3.0))


def test_a_recomputed_gradient_keeps_the_arguments_alone():
    """Between the passes nothing is held but what went in."""
    fn = recomputed(lambda x: jnp.sin(x) * 2, lambda x: jnp.sin(x) * 2)
    _, back = jax.vjp(fn, normal(4))
    assert [leaf.shape for leaf in jax.tree_util.tree_leaves(back)] == [(4,)]
