"""Values are checked on every call, also by a program that is there; an array that was checked is not read again."""

from __future__ import annotations

import gc

import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, normal

from ejkernel.library import (
    append_to_pages,
    attention,
    decode_attention,
    gated_delta_rule,
    linear_attention,
    linear_cross_entropy,
    matmul,
    moe_combine,
    ragged_dot,
    rms_norm,
    sample,
    values,
)
from ejkernel.library.arguments import ArgumentError, ArgumentTypeError

Q, X, W, STACK = normal(1, 8, 2, 4), normal(8, 8), normal(8), normal(2, 8, 8)
LABELS, SIZES, LENGTHS = jnp.arange(8), jnp.array([3, 5]), jnp.array([5])
RAW = jnp.zeros(2, jnp.uint32)
PAGES, TABLE, ONE, PLACES = normal(4, 4, 2, 4), jnp.array([[2, 0]]), normal(1, 2, 4), jnp.arange(8).reshape(4, 2)
CALLS = {
    "labels": (lambda given: linear_cross_entropy(X, X, given, executor=UNTUNED), LABELS, LABELS + 1),
    "sizes": (lambda given: ragged_dot(X, STACK, given, executor=UNTUNED), SIZES, SIZES + 1),
    "key_value_lengths": (
        lambda given: attention(Q, Q, Q, key_value_lengths=given, executor=UNTUNED),
        LENGTHS,
        -LENGTHS,
    ),
    "pages": (lambda given: decode_attention(ONE, PAGES, PAGES, given, LENGTHS, executor=UNTUNED), TABLE, TABLE + 2),
    "lengths of pages": (
        lambda given: decode_attention(ONE, PAGES, PAGES, TABLE, given, executor=UNTUNED),
        LENGTHS,
        LENGTHS + 4,
    ),
    "lengths without pages": (
        lambda given: decode_attention(ONE, Q, Q, None, given, executor=UNTUNED),
        LENGTHS,
        LENGTHS + 4,
    ),
    "room of pages": (
        lambda given: append_to_pages(PAGES, PAGES, ONE, ONE, TABLE, given),
        LENGTHS,
        LENGTHS + 3,
    ),
    "lengths of gates": (
        lambda given: gated_delta_rule(Q, Q, Q, Q[..., 0], Q[..., 0], lengths=given, executor=UNTUNED),
        LENGTHS,
        LENGTHS + 4,
    ),
    "lengths of a state": (
        lambda given: linear_attention(Q, Q, Q, lengths=given, executor=UNTUNED),
        LENGTHS,
        -LENGTHS,
    ),
    "places": (lambda given: moe_combine(X, X[:4, :2], given, executor=UNTUNED), PLACES, PLACES + 1),
    "places twice": (lambda given: moe_combine(X, X[:4, :2], given, executor=UNTUNED), PLACES, PLACES // 2),
    "temperature": (
        lambda given: sample(RAW, X, temperature=given, executor=UNTUNED),
        jnp.ones(8),
        -jnp.ones(8),
    ),
    "share": (
        lambda given: sample(RAW, X, top_p=given, min_p=given, executor=UNTUNED),
        jnp.ones(8) / 2,
        jnp.full(8, jnp.nan),
    ),
    "query lengths": (lambda given: attention(Q, Q, Q, query_lengths=given, executor=UNTUNED), LENGTHS, LENGTHS + 4),
}


@pytest.fixture(params=CALLS)
def case(request):
    """A call that was made twice, the array that it takes, and one that it refuses."""
    call, good, bad = CALLS[request.param]
    call(good)
    call(good)
    return call, good, bad


def test_a_bad_value_is_refused_by_a_warm_call(case):
    """The program that is there is not run with values that do not fit, whatever fitted before."""
    call, good, bad = case
    for _ in range(2):
        with pytest.raises(ArgumentError):
            call(bad)
        call(good)


@pytest.mark.one_leg(but_first=True)
def test_an_array_of_numpy_is_read_every_time(case):
    """It can be changed in place, so what was found before says nothing."""
    call, good, bad = case
    mutable = np.array(good)
    call(mutable)
    mutable[...] = bad

    with pytest.raises(ArgumentError):
        call(mutable)


def test_an_array_that_was_checked_is_not_read_again(case, monkeypatch):
    """Reading an array waits for the device that computes it: once is enough."""
    call, good, _ = case
    call(good)
    monkeypatch.setattr(values.np, "asarray", lambda *_: pytest.fail("was read again"))

    call(good)


def test_a_check_for_one_bound_says_nothing_about_another():
    """The same labels that fit eight words are refused for seven."""
    linear_cross_entropy(X, X, LABELS, executor=UNTUNED)
    linear_cross_entropy(X, X[:, :7], jnp.zeros(8, jnp.int32), executor=UNTUNED)

    with pytest.raises(ArgumentError, match="from 0 to 6"):
        linear_cross_entropy(X, X[:, :7], LABELS, executor=UNTUNED)


def test_a_check_by_one_function_says_nothing_about_another():
    """Sizes up to the rows may add up to more than them."""
    both = jnp.array([8, 8])
    pair = normal(2, 8, 2, 4)
    for _ in range(2):
        attention(pair, pair, pair, key_value_lengths=both, executor=UNTUNED)
    ragged_dot(X, STACK, SIZES, executor=UNTUNED)

    with pytest.raises(ArgumentError, match="add up to 16"):
        ragged_dot(X, STACK, both, executor=UNTUNED)


def test_what_was_checked_is_forgotten_with_its_array():
    """Checked arrays are not kept alive, and leave nothing behind."""
    known = len(values._checked)
    for number in range(3):
        labels = jnp.full(8, number)
        for _ in range(2):
            linear_cross_entropy(X, X, labels, executor=UNTUNED)
    del labels
    gc.collect()

    assert len(values._checked) <= known


def test_a_warm_function_still_checks_shapes_dtypes_and_options():
    """What was never seen before is checked, after calls that were right."""
    for _ in range(2):
        rms_norm(X, W, executor=UNTUNED)
        matmul(X, X, executor=UNTUNED)

    with pytest.raises(ArgumentError, match="one value for each of the last axis"):
        rms_norm(X, normal(7), executor=UNTUNED)
    with pytest.raises(ArgumentTypeError, match="int32"):
        rms_norm(X.astype(jnp.int32), W, executor=UNTUNED)
    with pytest.raises(ArgumentError, match="eps="):
        rms_norm(X, W, eps=-1.0, executor=UNTUNED)
    with pytest.raises(ArgumentError, match="summed over"):
        matmul(X, X[:7], executor=UNTUNED)
    with pytest.raises(TypeError, match="unexpected keyword"):
        rms_norm(X, W, epsilon=1e-6, executor=UNTUNED)


def test_one_spelling_serves_shapes_that_need_other_static_values():
    """Attention's scale follows the width of the heads: the same call with other heads has its own."""
    wide = normal(1, 8, 2, 16)
    for q in (Q, wide, Q, wide):
        scale = q.shape[-1] ** -0.5
        got, explicit = (attention(q, q, q, executor=UNTUNED, **how) for how in ({}, {"scale": scale}))
        np.testing.assert_allclose(got, explicit, rtol=1e-5, atol=1e-6)


def test_an_empty_call_after_full_ones_gives_zeros():
    """Arrays without elements reach no kernel, whatever was compiled before."""
    for _ in range(2):
        ragged_dot(X, STACK, SIZES, executor=UNTUNED)

    assert ragged_dot(X[:, :0], STACK[:, :0], SIZES, executor=UNTUNED).tolist() == np.zeros((8, 8)).tolist()
