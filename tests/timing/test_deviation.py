"""How far an array is from what is right: the same numbers by numpy and by a program on a device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.timing.deviation import Deviations, numbers_of, scales_of
from ejkernel.ops.timing.rounding import limits_of

LIMITS = limits_of(np.float32)
SHAPES = [(64, 64), (33, 50), (3, 17, 5), (1000,), (7,), (1, 31), (2, 2, 2, 40)]


def values(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def numbers(lib, got, want, limits=LIMITS):
    def find(got, want):
        scales, _ = scales_of(lib, want, None, limits)
        return numbers_of(lib, got, want, scales, limits)

    # One program for a device: its operations one by one would each be compiled.
    found = find(got, want) if lib is np else jax.jit(find)(got, want)
    return Deviations(*np.asarray(found).tolist())


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("shape", SHAPES)
def test_numpy_and_a_program_find_the_same(shape):
    """Every number, for whole segments and for short ones at the end of a row or of a column."""
    want = values(shape)
    got = (want * (1 + 2.0**-11 * values(shape, 1))).astype(np.float32)
    got.reshape(-1)[3] += np.float32(0.02)
    there = numbers(jnp, got, want)

    np.testing.assert_allclose(there, numbers(np, got, want), rtol=2e-4, atol=1e-6)


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize("shape", SHAPES)
def test_numpy_and_a_program_find_the_same_noise(shape):
    """The scales that a plain run raises, its common factor, and where it is wider."""
    want = values(shape)
    plain = (want * (1 + 2.0**-10 * values(shape, 1))).astype(np.float32)
    here, said = scales_of(np, want, plain, LIMITS)
    there, told = jax.jit(lambda want, plain: scales_of(jnp, want, plain, LIMITS))(want, plain)

    np.testing.assert_allclose(there.rows, here.rows, rtol=1e-4)
    np.testing.assert_allclose(there.columns, here.columns, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(told), np.asarray(said), rtol=1e-3, atol=1e-4)
    assert said.wider > 0


@pytest.mark.parametrize("n", [16, 17, 31, 40])
def test_a_short_segment_counts_its_own_values(n):
    """The scale of ones is that of one, in every segment."""
    scales, _ = scales_of(np, np.ones((n, n), np.float32), None, LIMITS)

    assert np.unique(scales.rows).size == np.unique(scales.columns).size == 1
    assert scales.power == pytest.approx(scales.rows[0, 0, 0])


def test_what_is_off_by_a_unit_everywhere_has_a_level_of_one():
    """The noise of all segments together, in units; and as many segments as there are."""
    want = values((64, 64))
    signs = np.random.default_rng(2).choice([-1.0, 1.0], want.shape)
    found = numbers(np, (want * (1 + 2.0**-11 * signs)).astype(np.float32), want)

    assert found.level == pytest.approx(1.0, rel=0.05)
    assert found.segments == 64 * 4
    assert found.unlike == found.rows == found.columns == 0


def test_a_common_factor_is_told_in_units():
    """Twice the unit on every value."""
    want = values((64, 64))

    assert numbers(np, (want * (1 + 2.0**-10)).astype(np.float32), want).bias == pytest.approx(2.0, rel=0.01)


def test_an_element_is_told_in_units_of_the_values_around_it():
    """Of the larger of its two segments."""
    want = np.ones((64, 64), np.float32)
    got = want.copy()
    got[20, 20] += np.float32(30 * 2.0**-11)

    assert numbers(np, got, want).element == pytest.approx(30, rel=0.01)


def test_elements_that_do_not_stand_out_are_not_told():
    """Under six units nothing is said."""
    want = np.ones((64, 64), np.float32)
    got = want.copy()
    got[20, 20] += np.float32(5 * 2.0**-11)

    assert numbers(np, got, want).element == 0


def test_a_long_sum_loses_nothing():
    """A million equal values in float32, one after the other."""
    want = np.full(1 << 20, 0.1, np.float32)
    scales, _ = scales_of(jnp, want, None, LIMITS)

    assert float(scales.power) == pytest.approx(float(scales.rows[0, 0, 0]), rel=1e-3)
