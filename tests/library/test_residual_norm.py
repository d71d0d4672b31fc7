"""Residual add and norm: both results and gradients against float64, in every way.

Covers `library/triton/residual.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, lowered_for_a_gpu, normal, wide

from ejkernel.library import ResidualNorm, ResidualNormConfig, residual_norm
from ejkernel.ops import check

WAYS = [
    ResidualNormConfig("xla"),
    ResidualNormConfig("lanes", lanes=8),
    ResidualNormConfig("recompute"),
    ResidualNormConfig("triton", rows=2, num_warps=1),
]


def exact(x, residual, weight, bias, centred):
    """The norm in float64 of the sum as the dtype has it."""
    off = x + residual
    off = off - off.mean(-1, keepdims=True) if centred else off
    return off / np.sqrt((off**2).mean(-1, keepdims=True) + 1e-6) * weight + bias


def exact_gradients(summed, weight, d_normed, d_summed, centred):
    """Of the sum, the weight and the bias, in float64."""
    off = summed - summed.mean(-1, keepdims=True) if centred else summed
    over = 1 / np.sqrt((off**2).mean(-1, keepdims=True) + 1e-6)
    normed, towards = off * over, d_normed * weight
    back = towards - normed * (towards * normed).mean(-1, keepdims=True)
    back = back - towards.mean(-1, keepdims=True) if centred else back
    return over * back + d_summed, (d_normed * normed).sum(0), d_normed.sum(0)


@pytest.mark.thinned
@pytest.mark.parametrize("cfg", WAYS, ids=lambda cfg: cfg.implementation)
@pytest.mark.parametrize(("kind", "dtype"), [("rms", "bfloat16"), ("layer", "float32")])
def test_values_and_gradients_are_right(cfg, kind, dtype):
    """Rows that blocks do not divide, with a bias."""
    x, residual, d_normed, d_summed = (normal(5, 72, dtype=dtype, seed=seed) for seed in range(4))
    weight, bias = normal(72, seed=5), normal(72, seed=6)

    def both(*arrays):
        return residual_norm(*arrays, kind=kind, cfg=cfg, executor=UNTUNED)

    (normed, summed), pull = jax.vjp(both, x, residual, weight, bias)
    np.testing.assert_array_equal(summed, x + residual)
    centred = kind == "layer"
    assert_near(normed, exact(wide(summed), 0, wide(weight), wide(bias), centred), dtype)
    d_x, d_residual, d_weight, d_bias = pull((d_normed, d_summed))
    right = exact_gradients(wide(summed), wide(weight), wide(d_normed), wide(d_summed), centred)
    for found, wanted in zip((d_x, d_weight, d_bias), right, strict=True):
        assert_near(found, wanted, dtype)
    np.testing.assert_array_equal(d_x, d_residual)


@pytest.mark.slow
def test_every_candidate_passes_the_check_of_a_tuning():
    """Two results and their gradients."""
    trials = check(ResidualNorm(), normal(8, 64), normal(8, 64, seed=1), normal(64, seed=2), kind="rms")
    assert [trial.status for trial in trials] == ["ok"] * len(trials)


def test_gradients_of_gradients_are_there():
    """The kernels' rule can be differentiated again."""
    arrays = normal(4, 32), normal(4, 32, seed=1), normal(32, seed=2)

    def twice(cfg):
        def value(x):
            normed, summed = residual_norm(x, *arrays[1:], cfg=cfg, executor=UNTUNED)
            return jnp.sum(jnp.sin(normed)) + jnp.sum(summed**2)

        return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(value)(x) ** 2)))(arrays[0])

    right = wide(twice(WAYS[0]))
    for cfg in WAYS[2:]:
        assert_near(twice(cfg), right, "float32", slack=5)


def test_the_kernel_and_its_gradient_are_lowered_for_a_gpu():
    """Triton takes both."""
    cfg = ResidualNormConfig("triton", rows=1, num_warps=4)
    kernel = ResidualNorm()

    def both(x, residual, weight, dy):
        out, pull = jax.vjp(lambda *a: kernel.run(*a, cfg=cfg), x, residual, weight)
        return out, pull((dy, dy))

    shape, vector = jax.ShapeDtypeStruct((8, 1000), jnp.bfloat16), jax.ShapeDtypeStruct((1000,), jnp.bfloat16)
    text = lowered_for_a_gpu(both, shape, shape, vector, shape)
    assert text.count("library_residual_norm") >= 2


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"residual": jnp.ones((2, 5))}, ValueError, "x and residual must have the same shape"),
        ({"residual": jnp.ones((2, 4), jnp.bfloat16)}, TypeError, "x is float32 and residual is bfloat16"),
        ({"weight": jnp.ones(5)}, ValueError, "weight has the shape"),
        ({"bias": jnp.ones(3)}, ValueError, "bias has the shape"),
        ({"kind": "batch"}, ValueError, "kind='batch' is no norm; use rms or layer"),
        ({"eps": -1.0}, ValueError, "eps=-1.0"),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    """Before anything is measured."""
    given = {"x": jnp.ones((2, 4)), "residual": jnp.ones((2, 4)), "weight": jnp.ones(4)} | change
    with pytest.raises(error, match=words):
        residual_norm(**given)
