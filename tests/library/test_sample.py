"""Draws from logits: the distribution is exact, and every way draws the same words.

Covers `library/sample_ways.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, normal

from ejkernel.library import Sample, SampleConfig, sample
from ejkernel.library.arguments import ArgumentError
from ejkernel.library.sample_ways import by_bits, by_recomputing, weights_of
from ejkernel.ops import Invocation

KEY = jax.random.key(3)
FILTERS = {
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 5},
    "all": {"top_k": 20, "top_p": 0.5, "min_p": 0.05, "temperature": 0.7},
}


def allowed(logits, *, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """The probabilities that are left of one row, in float64."""
    scaled = np.asarray(logits, np.float64) / temperature
    shares = np.exp(scaled - scaled.max())
    kept = np.ones(shares.size, bool)
    if top_k is not None:
        kept &= shares >= np.sort(shares)[-top_k]
    if top_p is not None:
        order = np.argsort(-np.where(kept, shares, 0), kind="stable")
        sums = np.cumsum(np.where(kept, shares, 0)[order])
        last = int(np.argmax(sums >= top_p * sums[-1]))
        kept &= shares >= shares[order[last]]
    if min_p is not None:
        kept &= shares >= min_p * shares.max()
    left = np.where(kept, shares, 0)
    return left / left.sum()


@pytest.mark.parametrize("name", ["top_p", "all"])
def test_draws_have_the_distribution_that_the_filters_leave(name):
    """By the chi-square of 20,000 draws, and nothing else is ever drawn."""
    logits = normal(30) * 1.5
    right = allowed(logits, **FILTERS[name])
    rows = jnp.broadcast_to(logits, (20_000, 30))
    drawn = jax.jit(lambda rows: sample(KEY, rows, executor=UNTUNED, **FILTERS[name]))(rows)
    counts = np.bincount(drawn, minlength=30)
    assert not counts[right == 0].any()
    expected = 20_000 * right[right > 0]
    freedom = max(expected.size - 1, 1)
    surprise = float(np.sum((counts[right > 0] - expected) ** 2 / expected))
    # Over five standard deviations beyond the mean would be one in a million.
    assert surprise < freedom + 5 * (2 * freedom) ** 0.5 + 5


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [("top_p", "bfloat16", 200), ("top_k", "float32", 200), ("all", "bfloat16", 200), ("top_p", "float32", 3072)],
)
def test_every_way_draws_the_same_words(name, dtype, words):
    """For the same key; bfloat16 has many ties, and long rows are added up in parts."""
    logits = normal(16, words, dtype=dtype) * 2
    ways = [SampleConfig("sort"), SampleConfig("bits", 1), SampleConfig("bits", 4)]
    ways += [SampleConfig("recompute", 2)] if name == "top_p" else []
    ways += [SampleConfig("parts")] if "top_k" in FILTERS[name] else []
    found = [sample(KEY, logits, cfg=cfg, executor=UNTUNED, **FILTERS[name]) for cfg in ways]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("bfloat16", 2),
        *(pytest.param("float32", bits, marks=pytest.mark.slow) for bits in (1, 2, 3)),
        *(pytest.param(dtype, 3, marks=pytest.mark.slow) for dtype in ("bfloat16", "float16")),
    ],
)
def test_a_threshold_found_from_the_logits_alone_is_that_of_keys_and_weights(dtype, bits):
    """In every number of bits a pass, also in rows of one value, of huge values and of no numbers."""
    logits = jnp.concatenate(
        [normal(4, 2048, dtype=dtype) * 3, jnp.full((1, 2048), -2, dtype), jnp.zeros((3, 2048), dtype)]
    )
    logits = logits.at[6, 7].set(jnp.inf).at[7, 9].set(jnp.nan).at[5, :100].set(jnp.finfo(dtype).min)
    shares, degrees = jnp.linspace(0, 1, 8), jnp.linspace(0.5, 1.5, 8)

    @jax.jit
    def both(logits, k=None):
        weights = weights_of(logits, degrees)
        return by_bits(logits, weights, k, shares, 1), by_recomputing(logits, degrees, k, shares, bits)

    np.testing.assert_array_equal(*both(logits))
    np.testing.assert_array_equal(*jax.jit(lambda logits: both(logits, 600))(logits))


def test_a_gpu_races_ways_that_read_the_logits_alone():
    """Where there is a threshold to find."""
    shapes = [((), KEY.dtype), ((64, 128256), jnp.float32), ((64,), jnp.float32), ((64,), jnp.float32)]
    shapes = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    again = {SampleConfig("recompute", 2), SampleConfig("recompute", 3)}
    inv = Invocation("x", shapes, {"top_k": None})
    offered = list(Sample().candidate_cfgs_gpu(inv))
    assert again < set(offered)
    assert Sample().heuristic_cfg_gpu(inv) == SampleConfig("recompute", 2)
    assert not again & set(Sample().candidate_cfgs_gpu(Invocation("x", shapes[:3], {"top_k": None})))


def test_passes_of_bits_that_miss_some_are_refused():
    """Only those over keys that are kept: logits alone are met in passes of any width, the last one narrower."""
    inv = Invocation("x", (KEY, normal(2, 50), jnp.ones(2), jnp.full(2, 0.9)), {"top_k": None})
    words = "passes of 3 bits do not make up the 32 bits of "
    refused = Sample().valid_cfg(inv, SampleConfig("bits", 3))
    assert refused == words + "float32"
    for cfg in (SampleConfig("bits"), *(SampleConfig("bits", n) for n in (1, 2, 4)), SampleConfig("recompute", 3)):
        assert Sample().valid_cfg(inv, cfg) is True
    with pytest.raises(ArgumentError, match=words):
        sample(KEY, normal(2, 50), top_p=0.9, cfg=SampleConfig("bits", 3), executor=UNTUNED)


def test_no_temperature_and_no_share_take_the_most_likely_word():
    """Each row by its own numbers."""
    logits = normal(3, 4, 50)
    best = jnp.argmax(logits, -1)
    np.testing.assert_array_equal(sample(KEY, logits, temperature=0.0, executor=UNTUNED), best)
    cold = jnp.zeros((3, 4)).at[0].set(5.0)
    found = sample(KEY, logits, temperature=cold, top_p=0.0, executor=UNTUNED)
    np.testing.assert_array_equal(found, best)
    mixed = sample(KEY, logits, temperature=cold, executor=UNTUNED)
    np.testing.assert_array_equal(mixed[1:], best[1:])
    assert np.any(mixed[0] != best[0])


def test_without_filters_it_is_the_categorical_draw_of_jax():
    """The same noise for the same key."""
    logits = normal(8, 60)
    np.testing.assert_array_equal(sample(KEY, logits, executor=UNTUNED), jax.random.categorical(KEY, logits))


def test_a_key_for_each_row_makes_a_row_independent_of_the_others():
    """So a request draws the same in every batch."""
    logits, keys = normal(6, 40), jax.random.split(KEY, 6)
    every = sample(keys, logits, top_p=0.9, executor=UNTUNED)
    one = sample(keys[2:3], logits[2:3], top_p=0.9, executor=UNTUNED)
    assert every[2] == one[0]
    raw = jax.vmap(jax.random.key_data)(keys)
    np.testing.assert_array_equal(sample(raw, logits, top_p=0.9, executor=UNTUNED), every)


def test_inputs_to_measure_with_are_in_range():
    """Where a trace hides the real ones."""
    shapes = [((), KEY.dtype), ((4, 9), jnp.float32), ((4,), jnp.float32), ((4,), jnp.float32)]
    inv = Invocation("x", tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), {"top_k": None})
    (key, _, temperature, top_p), _ = Sample().example_inputs(inv, np.random.default_rng(0))
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert np.all(temperature > 0)
    assert np.all((top_p > 0) & (top_p < 1))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"top_p": 1.5}, ValueError, "top_p must be from 0 to 1, got 1.5"),
        ({"temperature": -1.0}, ValueError, "temperature must be from 0 to any finite float32"),
        ({"temperature": float("nan")}, ValueError, "temperature must be"),
        ({"min_p": jnp.ones(3)}, ValueError, r"min_p has the shape \(3,\)"),
        ({"top_p": "0.9"}, TypeError, "top_p must be a number"),
        ({"top_k": 0}, ValueError, "top_k=0 must be at least 1"),
        ({"key": jax.random.split(KEY, 3)}, ValueError, r"key has the shape \(3,\)"),
        ({"key": jnp.ones(2)}, TypeError, r"use jax.random.key\(seed\)"),
        ({"logits": jnp.ones((2, 0))}, ValueError, "there must be a word"),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    """Before anything is measured."""
    with pytest.raises(error, match=words):
        sample(**({"key": KEY, "logits": jnp.ones((2, 5))} | change))


def test_numbers_that_are_no_key_are_named():
    """Three words of 32 bits are the key of no generator."""
    with pytest.raises(TypeError, match=r"key is uint32 \(3,\), which is no key"):
        sample(jnp.arange(3, dtype=jnp.uint32), jnp.ones((2, 4)))


@pytest.mark.thinned
@pytest.mark.parametrize("temperature", [1.2e-38, 2e-38, 1e-31])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_the_coldest_temperatures_take_the_most_likely_word(temperature, filters):
    """A logit divided by one of them is infinite, and so are others."""
    logits = jnp.array([[7.0, 8.0, 9.0, 8.5], [-7.0, -8.0, -6.0, -9.0]])
    found = sample(jax.random.key(0), logits, temperature=temperature, executor=UNTUNED, **filters)
    np.testing.assert_array_equal(found, [2, 2])
