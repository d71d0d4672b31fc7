"""How far rounding may take an output, by dtype."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.timing.rounding import limits_of


@pytest.mark.parametrize(
    ("dtype", "unit", "step", "segment"),
    [
        ("float64", 2.0**-32, 2.0**-53, 4 * 2.0**-32),
        ("float32", 2.0**-11, 2.0**-24, 4 * 2.0**-11),
        ("float16", 2.0**-11, 2.0**-11, 4 * 2.0**-11),
        ("bfloat16", 2.0**-8, 2.0**-8, 4 * 2.0**-8),
        ("float8_e4m3fn", 2.0**-6, 2.0**-4, 3 * 2.0**-6 + 2.0**-4),
        ("float8_e5m2", 2.0**-6, 2.0**-3, 3 * 2.0**-6 + 2.0**-3),
        ("complex64", 2.0**-11, 2.0**-24, 4 * 2.0**-11),
    ],
)
def test_each_dtype_has_its_steps(dtype, unit, step, segment):
    """Between the operations, of the output itself, and of a segment."""
    found = limits_of(jnp.dtype(dtype))

    assert (found.unit, found.step, found.segment) == (unit, step, segment)


def test_the_coarsest_input_decides():
    """Integers and scales that are powers of two have no rounding."""
    inputs = [np.int32, jnp.bfloat16, np.float32, np.complex64, jnp.float8_e8m0fnu]

    assert limits_of(np.float32, inputs).unit == 2.0**-8
    assert limits_of(np.float32, [np.int32]).unit == 2.0**-11
    assert limits_of(np.float32, inputs).step == 2.0**-24


def test_small_values_count_from_the_smallest_that_devices_compute_with():
    """The smallest normal number of float32 and its like, the smallest of all for the others."""
    assert limits_of(np.float32).least == float(np.finfo(np.float32).tiny)
    assert limits_of(np.float16).least == float(np.finfo(np.float16).smallest_subnormal)


def test_a_tolerance_is_the_limit_of_a_segment():
    """And of the whole, and of a common factor: what the author of a kernel allows is not asked for twice."""
    found = limits_of(jnp.bfloat16, tolerance=0.1)

    assert found.segment == pytest.approx(0.1)
    assert found.whole * found.unit == pytest.approx(0.1)
    assert found.bias * found.unit == pytest.approx(0.1)


def test_without_a_tolerance_nothing_may_differ():
    """Not even what is too small for the dtype."""
    found = limits_of(np.float32, tolerance=0.0)

    assert found.least == 0
    assert 0 < found.segment < 2.0**-53
    assert found.step <= found.unit
