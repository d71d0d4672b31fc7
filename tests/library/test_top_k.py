"""The largest of each row: values, indices and ties as JAX has them, in every way.

Covers `library/order.py`, `library/top_k_ways.py`, `library/triton/lists.py` and `library/triton/select.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, lowered_for_a_gpu, normal

from ejkernel.library import TopK, TopKConfig, top_k
from ejkernel.library.arguments import ArgumentError
from ejkernel.library.order import numbers_of, ordered
from ejkernel.ops import Invocation, check

WAYS = [
    TopKConfig("xla"),
    TopKConfig("parts", finish="sort"),
    TopKConfig("parts", 8, "count"),
    TopKConfig("parts", finish="count"),
    TopKConfig("bits", bits=4),
    TopKConfig("triton", rows=2, num_warps=1),
]
# Of rows of at most 512 elements.
LISTS = TopKConfig("triton_lists", rows=2, num_warps=1)


def found(x, k, cfg):
    """Values and indices by one way."""
    return jax.jit(lambda x: top_k(x, k, cfg=cfg, executor=UNTUNED))(x)


@pytest.mark.thinned
@pytest.mark.parametrize("cfg", WAYS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_ties_nan_and_signed_zeros_are_as_jax_has_them(cfg, dtype):
    """Few distinct values, so that most of a row is tied."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 9, (2, 3, 700)) / (1 if dtype == "uint8" else 4)
    x = jnp.asarray(values, dtype)
    if dtype != "uint8":
        x = x.at[0, 0, :6].set(jnp.array([jnp.nan, -jnp.nan, -0.0, 0.0, jnp.inf, -jnp.inf]).astype(dtype))
    right = jax.lax.top_k(x, 13)
    values, indices = found(x, 13, cfg)
    assert indices.dtype == jnp.int32
    np.testing.assert_array_equal(indices, right[1])
    np.testing.assert_array_equal(np.asarray(values).astype(float), np.asarray(right[0]).astype(float))


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize(("dtype", "width"), [("float32", 256), ("bfloat16", 40), ("int32", 40), ("uint8", 1)])
def test_lists_of_lanes_have_ties_nan_and_the_least_number_as_jax_has_them(dtype, width):
    """Rows that are shorter than their lists, or fill them, and a last program with a row too few."""
    k = min(width, 9)
    x = jnp.asarray(np.random.default_rng(width).integers(0, 9, (5, width)), dtype)
    if dtype in ("float32", "bfloat16"):
        some = jnp.array([jnp.nan, -jnp.nan, -0.0, 0.0, jnp.inf, -jnp.inf]).astype(dtype)[:width]
        x = x.at[0, : some.size].set(some)
    x = x.at[1].set(jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else -jnp.nan)
    right = jax.lax.top_k(x, k)
    values, indices = found(x, k, LISTS)
    np.testing.assert_array_equal(indices, right[1])
    np.testing.assert_array_equal(np.asarray(values).astype(float), np.asarray(right[0]).astype(float))


@pytest.mark.parametrize("cfg", WAYS, ids=str)
def test_a_block_that_does_not_divide_a_row_and_a_k_of_all_of_it(cfg):
    """The end of a row counts, and what fills its last block does not."""
    x = -jnp.abs(normal(2, 61)).at[:, 60].set(0.0)
    k = 61 if cfg.implementation == "bits" else 3
    np.testing.assert_array_equal(found(x, k, cfg)[1], jax.lax.top_k(x, k)[1])


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("width", [40, 3000])
def test_gradients_go_to_the_places_that_were_found(width):
    """Forward and reverse mode, for rows by comparison and by a scatter."""
    x, weights = normal(3, width), jnp.arange(1.0, 8.0)
    for cfg in (TopKConfig("parts", finish="count"), TopKConfig("xla")):

        def total(x, cfg=cfg):
            return jnp.sum(top_k(x, 7, cfg=cfg, executor=UNTUNED)[0] * weights)

        grad = jax.jit(jax.grad(total))(x)
        right = jax.jit(jax.grad(lambda x: jnp.sum(jax.lax.top_k(x, 7)[0] * weights)))(x)
        np.testing.assert_array_equal(grad, right)
        moved = jax.jit(lambda *a, total=total: jax.jvp(total, a[:1], a[1:])[1])(x, grad)
        np.testing.assert_allclose(moved, np.sum(grad * right), rtol=1e-6)


@pytest.mark.parametrize("cfg", [TopKConfig("xla"), TopKConfig("parts", finish="count")], ids=str)
def test_shards_have_the_derivatives_of_the_whole(cfg):
    """Both modes, and a gradient of a gradient, while JAX checks how values vary."""
    x, mesh = normal(4, 40), jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("rows")

    def values(x):
        return top_k(x, 3, cfg=cfg, executor=UNTUNED)[0] ** 3

    sharded = jax.shard_map(values, mesh=mesh, in_specs=spec, out_specs=spec)

    def derivatives(values, x):
        slope = jax.grad(lambda x: values(x).sum())
        return slope(x), jax.jvp(values, (x,), (x,))[1], jax.jvp(slope, (x,), (x,))[1]

    for one, other in zip(derivatives(sharded, x), derivatives(values, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_gradient_of_a_router_has_no_scatter():
    """A scatter that adds waits for itself on a GPU."""
    text = jax.jit(jax.grad(lambda x: top_k(x, 8, executor=UNTUNED)[0].sum())).lower(jnp.ones((4, 256))).as_text()
    assert "scatter" not in text


@pytest.mark.slow
def test_every_candidate_passes_the_check_of_a_tuning():
    """Values, indices and gradients."""
    trials = check(TopK(), normal(4, 600), k=5)
    assert [trial.status for trial in trials] == ["ok"] * len(trials)
    assert len(trials) >= 5


@pytest.mark.parametrize("way", ["triton", "triton_lists"])
def test_the_kernel_is_lowered_for_a_gpu(way):
    """Triton takes it."""
    cfg = TopKConfig(way, rows=4, num_warps=4)
    text = lowered_for_a_gpu(lambda x: TopK().run(x, k=8, cfg=cfg), jax.ShapeDtypeStruct((1024, 200), jnp.bfloat16))
    assert "library_top_k" in text


def test_the_heuristic_cfg_can_run():
    """On every platform, from a router to a vocabulary."""
    for rows, width, k in ((32, 131072, 50), (8192, 256, 8), (1, 5, 5), (2, 4096, 2048)):
        inv = Invocation("x", (jax.ShapeDtypeStruct((rows, width), jnp.float32),), {"k": k})
        for guess in (TopK().heuristic_cfg(inv), TopK().heuristic_cfg_gpu(inv)):
            assert TopK().valid_cfg(inv, guess) is True


@pytest.mark.parametrize(("dtype", "width"), [("float32", 32), ("bfloat16", 16), ("uint8", 8)])
def test_passes_of_bits_that_miss_some_are_refused(dtype, width):
    """They would find the k-th largest but for its last digits; the reason says how many bits there are."""
    x = jnp.arange(12).astype(dtype).reshape(1, 12)
    inv = Invocation("x", (x,), {"k": 3})
    words = f"passes of 3 bits do not make up the {width} bits of "
    refused = TopK().valid_cfg(inv, TopKConfig("bits", bits=3))
    assert refused == words + dtype
    assert all(TopK().valid_cfg(inv, TopKConfig("bits", bits=bits)) is True for bits in (None, 1, 2, 4, 8))
    assert all(TopK().valid_cfg(inv, TopKConfig("bits", bits=bits)) is not True for bits in (-1, 5, 64))
    with pytest.raises(ArgumentError, match=words):
        top_k(x, 3, cfg=TopKConfig("bits", bits=3), executor=UNTUNED)


def test_order_has_its_inverse():
    """Keys are the numbers, in another order of bits."""
    for dtype in ("float32", "bfloat16", "uint16", "int8"):
        x = jnp.asarray(np.random.default_rng(0).integers(-100 if dtype[0] != "u" else 0, 100, 50).astype(dtype))
        np.testing.assert_array_equal(numbers_of(ordered(x), dtype), x)
        np.testing.assert_array_equal(jnp.argsort(ordered(x), stable=True), jnp.argsort(x, stable=True))


@pytest.mark.parametrize(
    ("x", "k", "error", "words"),
    [
        (jnp.ones((2, 5)), 6, ValueError, "k=6 is not from 0 to the 5 elements"),
        (jnp.ones((2, 5)), -1, ValueError, "k=-1"),
        (jnp.ones((2, 5)), 1.5, TypeError, "k must be an integer"),
        (jnp.ones(()), 1, ValueError, "at least one dimension"),
        (jnp.ones(3, jnp.complex64), 1, TypeError, "x is complex64"),
        ([1.0, 2.0], 1, TypeError, "x must be an array"),
    ],
)
def test_bad_arguments_are_named(x, k, error, words):
    """Before anything is measured."""
    with pytest.raises(error, match=words):
        top_k(x, k)


def test_nothing_of_something_is_empty():
    """No elements, or none asked for."""
    for x, k in ((jnp.ones((3, 4)), 0), (jnp.ones((0, 4)), 2)):
        values, indices = top_k(x, k)
        assert values.shape == indices.shape == (x.shape[0], k)
