"""Experts: rows to their groups and back, the whole layer, and gradients without scatters that add.

Covers `library/moe_dispatch.py`.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, normal, pull, wide

from ejkernel.library import (
    MoeCombine,
    MoeCombineConfig,
    MoeConfig,
    MoeDispatch,
    MoeDispatchConfig,
    moe,
    moe_combine,
    moe_dispatch,
)
from ejkernel.ops import Invocation, check

ORDERS = [MoeDispatchConfig(way) for way in ("sort", "count")]
SUMS = [MoeCombineConfig(way) for way in ("unrolled", "reduce", "scatter")]


def plain(x, logits, gate, up, down, k=3):
    """Every expert for every token, of which k are used."""
    values, chosen = jax.lax.top_k(logits, k)
    inner = jax.nn.silu(jnp.einsum("td,edf->tef", x, gate)) * jnp.einsum("td,edf->tef", x, up)
    out = jnp.take_along_axis(jnp.einsum("tef,efd->ted", inner, down), chosen[..., None], axis=1)
    return jnp.sum(out * jax.nn.softmax(values, -1)[..., None], axis=1)


@pytest.fixture
def layer():
    """Tokens, router and experts."""
    shapes = ((37, 16), (37, 8), (8, 16, 24), (8, 16, 24), (8, 24, 16))
    return [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize(("order", "sums"), [*zip(ORDERS, SUMS, strict=False), (ORDERS[1], SUMS[2])])
def test_the_layer_and_its_gradients_are_those_of_plain_jax(layer, order, sums):
    """Whatever way rows go and come back."""
    cfg, dy = MoeConfig(dispatch=order, combine=sums), normal(37, 16, seed=9)

    def ours(*arrays):
        return moe(*arrays, k=3, cfg=cfg, executor=UNTUNED)

    def both(fn):
        return jax.jit(lambda *a: [(made := jax.vjp(fn, *a))[0], *made[1](dy)])(*layer)

    with jax.default_matmul_precision("highest"):
        wanted = both(plain)
    for one, other in zip(both(ours), wanted, strict=True):
        assert_near(one, wide(other), "float32")


def test_shards_of_tokens_have_the_gradients_of_the_whole(layer):
    """Those of experts, which all shards share, are added up; JAX checks how values vary."""
    x, logits, *experts = layer
    args, dy = (x[:36], logits[:36], *experts), normal(36, 16, seed=9)
    mesh = jax.make_mesh((2,), ("tokens",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, shared = jax.sharding.PartitionSpec("tokens"), jax.sharding.PartitionSpec()

    def ours(*arrays):
        return moe(*arrays, k=3, executor=UNTUNED)

    sharded = jax.shard_map(ours, mesh=mesh, in_specs=(spec, spec, shared, shared, shared), out_specs=spec)
    for one, other in zip(pull(sharded, args, dy), pull(ours, args, dy), strict=True):
        assert_near(one, wide(other), "float32")


@pytest.mark.parametrize("order", ORDERS, ids=lambda cfg: cfg.implementation)
def test_gradients_in_bfloat16_are_within_rounding_of_those_in_float64(order):
    """Of rows there and of other rows back: each is added up in float32 and rounded once."""
    x, logits, made = normal(64, 32, dtype="bfloat16"), normal(64, 8, seed=1), normal(192, 32, dtype="bfloat16", seed=2)
    d_rows, d_out = normal(192, 32, dtype="bfloat16", seed=3), normal(64, 32, dtype="bfloat16", seed=4)

    def there_and_back(x, logits, made):
        sent = moe_dispatch(x, logits, k=3, cfg=order, executor=UNTUNED)
        return sent.rows, moe_combine(made, sent.weights, sent.places, executor=UNTUNED)

    found = jax.jit(lambda *a: jax.vjp(there_and_back, *a)[1]((d_rows, d_out)))(x, logits, made)
    values, chosen = (np.asarray(a) for a in jax.lax.top_k(logits, 3))
    weights = np.exp(wide(values)) / np.exp(wide(values)).sum(1, keepdims=True)
    places = np.argsort(np.argsort(chosen.ravel(), kind="stable")).reshape(64, 3)
    each = np.einsum("tkd,td->tk", wide(made)[places], wide(d_out))
    towards = np.zeros((64, 8))
    np.put_along_axis(towards, chosen, weights * (each - (weights * each).sum(1, keepdims=True)), axis=1)
    back = np.zeros((192, 32))
    back[places] = weights[:, :, None] * wide(d_out)[:, None]
    assert_near(found[0], wide(d_rows)[places].sum(1), "bfloat16", slack=0.25)
    assert_near(found[1], towards, "float32")
    assert_near(found[2], back, "bfloat16", slack=0.25)


def test_the_layer_takes_leading_axes_and_jit(layer):
    """Tokens of a batch, under a trace."""
    x, logits, *experts = layer
    batched = [a[:36].reshape(3, 12, -1) for a in (x, logits)]
    found = jax.jit(lambda *a: moe(*a, k=2, executor=UNTUNED))(*batched, *experts)
    assert_near(found.reshape(36, -1), wide(plain(x[:36], logits[:36], *experts, k=2)), "float32")


def test_no_gradient_adds_by_a_scatter(layer):
    """The only scatters write integers, each to a place of its own."""
    dy = normal(37, 16, seed=9)
    pulled = jax.jit(lambda *a: jax.vjp(lambda *b: moe(*b, k=3, executor=UNTUNED), *a)[1](dy))
    scatters = re.findall(r'"stablehlo.scatter".*', pulled.lower(*layer).as_text())
    assert scatters
    assert all("unique_indices = true" in line for line in scatters)


def test_rows_are_in_order_of_their_experts(layer):
    """And each token's places hold its row."""
    x, logits = layer[:2]
    sent = moe_dispatch(x, logits, k=2, executor=UNTUNED)
    chosen = jax.lax.top_k(logits, 2)[1]
    np.testing.assert_array_equal(sent.group_sizes, np.bincount(np.ravel(chosen), minlength=8))
    np.testing.assert_array_equal(sent.rows[sent.places], np.broadcast_to(x[:, None], (37, 2, 16)))
    group = np.repeat(np.arange(8), np.asarray(sent.group_sizes))
    np.testing.assert_array_equal(group[np.asarray(sent.places)], chosen)


def test_weights_are_of_the_chosen_or_of_all(layer):
    """Normalised they add up to one; else they are the softmax over all experts."""
    x, logits = layer[:2]
    np.testing.assert_allclose(moe_dispatch(x, logits, k=3, executor=UNTUNED).weights.sum(1), 1, rtol=1e-6)
    loose = moe_dispatch(x, logits, k=3, normalize=False, executor=UNTUNED).weights
    np.testing.assert_allclose(loose, jax.lax.top_k(jax.nn.softmax(logits), 3)[0], rtol=1e-5)


@pytest.mark.slow
def test_every_candidate_passes_the_check_of_a_tuning():
    """Values and gradients of both kernels."""
    rng = np.random.default_rng(0)
    experts = jnp.asarray(rng.integers(0, 4, (20, 2)).astype(jnp.int32))
    places = jnp.asarray(rng.permutation(40).reshape(20, 2).astype(jnp.int32))
    trials = [*check(MoeDispatch(), normal(20, 8), experts, count=4)]
    trials += check(MoeCombine(), normal(40, 8), normal(20, 2, seed=1), places)
    assert [trial.status for trial in trials] == ["ok"] * 5


def test_places_to_measure_with_are_a_permutation():
    """Where a trace hides the real ones."""
    shapes = [((40, 8), jnp.float32), ((20, 2), jnp.float32), ((20, 2), jnp.int32)]
    inv = Invocation("x", tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), {})
    (_, _, places), _ = MoeCombine().example_inputs(inv, np.random.default_rng(0))
    assert sorted(places.ravel()) == list(range(40))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: moe_dispatch(jnp.ones((3, 2)), jnp.ones((4, 2)), k=1),
            "x and router_logits differ in tokens: 3 and 4",
        ),
        (lambda: moe_dispatch(jnp.ones((3, 2)), jnp.ones((3, 2)), k=3), "k=3 is not from 1 to the 2 experts"),
        (lambda: moe_combine(jnp.ones((4, 2)), jnp.ones((2, 2)), jnp.array([[0, 1], [2, 4]])), "before the 4 rows"),
        (lambda: moe_combine(jnp.ones((4, 2)), jnp.ones((2, 2)), jnp.array([[0, 1], [2, 2]])), "must differ"),
        (lambda: moe_combine(jnp.ones((4, 2)), jnp.ones((2, 1)), jnp.array([[0, 1], [2, 3]])), "the same shape"),
        (lambda: moe(jnp.ones((3, 2)), jnp.ones((3, 4)), *[jnp.ones((4, 2, 5))] * 3, k=1), "differ in inner: 5 and 2"),
        (lambda: moe(jnp.ones((3, 2)), jnp.ones((2, 4)), *[jnp.ones((4, 2, 5))] * 3, k=1), "before the last axis"),
    ],
)
def test_bad_arguments_are_named(call, words):
    """Before anything is measured."""
    with pytest.raises(ValueError, match=words):
        call()
