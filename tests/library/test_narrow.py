"""Products of narrow numbers: their gradients stay wide, and wide numbers are taken apart without loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import normal

from ejkernel.library.narrow import exp_in, lifting, product_in, rounded, split

NARROW = ("bfloat16", "float16")


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_is_that_of_a_conversion(dtype):
    """Under jit as well, where XLA takes a conversion and one back away."""
    x = normal(1000) * 100
    np.testing.assert_array_equal(jax.jit(lambda x: rounded(x, dtype))(x), np.asarray(x.astype(dtype), np.float32))


@pytest.mark.parametrize("dtype", NARROW)
def test_a_product_rounds_its_factors_and_not_its_gradients(dtype):
    """The result is the narrow product's; what comes back is float32, of the factors as they were rounded."""
    a, b, dy = normal(5, 7), normal(7, 3, seed=1), normal(5, 3, seed=2)
    made, pull = jax.vjp(lambda a, b: product_in(dtype, "ij,jk->ik", a, b), a, b)
    near = [np.asarray(x.astype(dtype), np.float64) for x in (a, b)]
    np.testing.assert_allclose(made, near[0] @ near[1], rtol=1e-5, atol=1e-5)
    grads = pull(dy)
    np.testing.assert_allclose(grads[0], np.asarray(dy) @ near[1].T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads[1], near[0].T @ np.asarray(dy), rtol=1e-5, atol=1e-5)
    moved = jax.jvp(lambda a: product_in(dtype, "ij,jk->ik", a, b), (a,), (a,))[1]
    np.testing.assert_allclose(np.sum(moved * dy), np.sum(np.asarray(grads[0]) * a), rtol=1e-4)


@pytest.mark.parametrize("dtype", NARROW)
def test_an_exponential_is_a_narrow_number_and_its_own_derivative(dtype):
    """So are those far below the smallest that float16 has in full: it lifts all of them alike."""
    x = -jnp.linspace(0, 19, 200)
    made, moved = jax.jvp(lambda x: exp_in(dtype, x), (x,), (jnp.ones_like(x),))
    np.testing.assert_array_equal(made, moved)
    np.testing.assert_array_equal(made, np.asarray(made.astype(dtype), np.float32))
    np.testing.assert_allclose(made / made[0], np.exp(x), rtol=2 * float(jnp.finfo(dtype).eps))
    assert exp_in(dtype, jnp.array([-jnp.inf]))[0] == 0


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e5, 1e30])
def test_two_narrow_numbers_hold_a_wide_one(dtype, size):
    """To twice the dtype's bits, whatever its size."""
    x = normal(200) * size
    near, rest, lift = jax.jit(lambda x: split(x, dtype))(x)
    assert near.dtype == rest.dtype == dtype
    whole = (np.asarray(near, np.float64) + np.asarray(rest, np.float64)) / float(lift)
    np.testing.assert_allclose(whole, x, rtol=float(jnp.finfo(dtype).eps) ** 2, atol=1e-7 * size)


@pytest.mark.parametrize("largest", [1e-30, 0.3, 1.0, 65504.0, 1e30])
def test_the_largest_number_is_lifted_to_just_below_the_end(largest):
    """By a power of two, and not beyond."""
    lift = float(lifting(jnp.float32(largest)))
    assert 16384 <= largest * lift < 65504
    assert np.frexp(lift)[0] == 0.5


@pytest.mark.parametrize("largest", [0.0, np.nan, np.inf])
def test_what_has_no_size_is_left_as_it_is(largest):
    """Nothing, and what is no number."""
    assert lifting(jnp.float32(largest)) == 1
