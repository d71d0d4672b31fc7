"""Do two candidates compute the same thing?"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.timing.check import compare


def values(dtype, shape=(64, 64), seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def scaled(array, factor):
    return (array.astype(np.float64) * factor).astype(array.dtype)


FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64"])
def test_equal_outputs_are_right(dtype):
    """The same values have no error and no reason."""
    assert compare(values(dtype), values(dtype)) == (0.0, "")


# By how much an output of each dtype may be off, and by how much it may not: rounding against a real difference.
@pytest.mark.parametrize(
    ("dtype", "allowed", "wrong"),
    [("float64", 1e-12, 1e-6), ("float32", 1e-5, 1e-2), ("float16", 2e-3, 0.1), ("bfloat16", 1e-2, 0.3)],
)
def test_the_limit_depends_on_the_dtype(dtype, allowed, wrong):
    """Fewer mantissa bits allow more, and each dtype has its limit."""
    array = values(dtype)

    assert compare(scaled(array, 1 + allowed), array)[1] == ""
    assert compare(scaled(array, 1 + wrong), array)[1] != ""


def test_eight_bit_floats_are_compared_too():
    """One to three mantissa bits: a rounding is noise, another sign is not."""
    array = values("float8_e4m3fn")

    assert compare(scaled(array, 1.06), array)[1] == ""
    assert compare(scaled(array, -1), array)[1] != ""


def test_sums_in_another_order_agree():
    """What differs by rounding alone is right."""
    x = values("float32", (256, 256))
    ours = np.cumsum(x, axis=0, dtype=np.float32)[-1]
    theirs = x[::-1].sum(0, dtype=np.float32)

    assert (ours != theirs).any()
    assert compare(ours, theirs)[1] == ""


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_wrong_tile_is_found(dtype):
    """A zeroed 8x8 tile of 512x512 hides in a mean and not in the worst element."""
    want = values(dtype, (512, 512))
    got = want.copy()
    got[64:72, 128:136] = 0

    assert compare(got, want)[1] != ""


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_wrong_row_is_found(dtype):
    """A row that holds another row's values is wrong."""
    want = values(dtype, (512, 64))
    got = want.copy()
    got[7] = want[8]

    assert compare(got, want)[1] != ""


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_in_place_of_a_number_is_wrong(bad):
    """NaN and infinity never pass for numbers, and the other way round."""
    want = values("float32")
    got = want.copy()
    got[3, 4] = bad

    assert compare(got, want)[1] != ""
    assert compare(want, got)[1] != ""


def test_the_same_non_finite_values_are_right():
    """A mask of infinities that both have is part of the answer."""
    want = values("float32")
    want[0] = -math.inf
    want[1] = math.nan

    assert compare(want.copy(), want)[1] == ""


def test_another_infinity_is_wrong():
    """Minus infinity is not infinity."""
    assert compare(np.float32([math.inf, 1]), np.float32([-math.inf, 1]))[1] != ""


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)),
        (np.ones(3, np.float32), np.ones(3, np.float16)),
        (np.ones(3, np.int32), np.ones(3, np.float32)),
        ((np.ones(3),), np.ones(3)),
        ({"a": np.ones(3)}, {"b": np.ones(3)}),
        ((np.ones(3), np.ones(3)), (np.ones(3),)),
    ],
    ids=["shape", "float dtype", "kind", "tuple", "name", "count"],
)
def test_another_form_is_wrong(got, want):
    """Shape, dtype and structure belong to the answer."""
    assert compare(got, want)[1] != ""


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "bool"])
def test_integers_must_be_equal(dtype):
    """One integer that differs is wrong."""
    want = np.ones(100, dtype)
    got = want.copy()
    got[5] = 0

    assert compare(want.copy(), want)[1] == ""
    assert compare(got, want)[1] != ""


def test_zeros_must_be_zeros():
    """Where all should be zero there is no scale to be relative to."""
    zeros = np.zeros(8, np.float32)

    assert compare(zeros.copy(), zeros)[1] == ""
    assert compare(zeros + np.float32(1e-3), zeros)[1] != ""


def test_every_output_is_looked_at():
    """The reason says which of several outputs is wrong."""
    want = {"first": values("float32"), "second": [values("float32", seed=1)]}
    got = {"first": want["first"], "second": [want["second"][0] * 2]}

    assert "second" in compare(got, want)[1]


def test_a_tolerance_replaces_the_limit():
    """A kernel may allow more, or less, than its dtype."""
    want = values("float32")

    assert compare(scaled(want, 1.05), want, 0.1)[1] == ""
    assert compare(scaled(want, 1 + 1e-5), want, 1e-7)[1] != ""


def test_a_tolerance_of_zero_allows_no_error():
    """It is a limit like any other, not the lack of one."""
    want = values("float32")

    assert compare(want, want, 0)[1] == ""
    assert compare(scaled(want, 1 + 1e-5), want, 0)[1] != ""


def test_empty_outputs_are_equal():
    """Nothing differs from nothing."""
    assert compare(np.ones((0, 3), np.float32), np.ones((0, 3), np.float32)) == (0.0, "")


def test_keys_are_compared_by_their_data():
    """PRNG keys are equal or not."""
    assert compare(jax.random.key(1), jax.random.key(1))[1] == ""
    assert compare(jax.random.key(1), jax.random.key(2))[1] != ""


def test_the_largest_error_is_relative_to_the_references_size():
    """The figure is the worst element over the reference's root mean square."""
    want = np.full(100, 10.0, np.float32)
    got = want.copy()
    got[0] = 20.0

    assert compare(got, want)[0] == pytest.approx(1.0)


@pytest.mark.parametrize("got", [1.0, "text"])
def test_a_python_value_in_place_of_an_array_is_wrong(got):
    """A candidate that returns something else gets a reason; the comparison itself does not fail."""
    assert compare(got, np.float32(1.0))[1] != ""


def test_python_values_are_compared_as_they_are():
    """Outputs that are no arrays must be equal."""
    assert compare(3, 3)[1] == ""
    assert compare(3, 4)[1] != ""


def test_huge_values_are_compared():
    """Numbers whose squares do not fit still show a difference."""
    want = np.array([1e200, 1e200])

    assert compare(want.copy(), want)[1] == ""
    assert compare(want * 2, want)[1] != ""
