"""Running sums and searches of counts, and the order that counts give.

Covers `library/counting.py` and `library/permutation.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.library.counting import ended_before, running_sums
from ejkernel.library.permutation import by_counting, by_sorting


@pytest.fixture(params=["as on a GPU", "as on a CPU"])
def platform(request, monkeypatch):
    """Both forms, by the processor."""

    def chosen(*arrays, cpu, default):
        return (cpu if request.param == "as on a CPU" else default)(*arrays)

    monkeypatch.setattr("jax.lax.platform_dependent", chosen)
    return request.param


@pytest.mark.parametrize("shape", [(1,), (7,), (300,), (40, 5)])
def test_sums_are_those_of_numpy(platform, shape):
    """Along the first axis, in the dtype of the counts."""
    counts = np.random.default_rng(0).integers(0, 5, shape).astype("int32")
    found = running_sums(jnp.asarray(counts))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.cumsum(counts, axis=0))


def test_searches_are_those_of_numpy(platform):
    """Before the first end, between equal ones, and behind the last."""
    ends = np.array([0, 0, 3, 3, 4, 9], "int32")
    numbers = np.arange(-2, 12, dtype="int32")
    found = ended_before(jnp.asarray(ends), jnp.asarray(numbers))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.searchsorted(ends, numbers, side="right"))


@pytest.mark.parametrize(("total", "count"), [(700, 7), (1, 1), (256, 3), (300, 2), (0, 2)])
def test_counting_gives_the_order_of_a_stable_sort(platform, total, count):
    """Within blocks and over them."""
    groups = jnp.asarray(np.random.default_rng(total).integers(0, count, total).astype(jnp.int32))
    counted, by_key = jax.jit(lambda groups: (by_counting(groups, count), by_sorting(groups, count)))(groups)
    for found, wanted in zip(counted, by_key, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_very_many_are_not_compared_with_each_other():
    """The pairs would take more memory than the counts by far."""
    found = jax.make_jaxpr(running_sums)(jax.ShapeDtypeStruct((8192, 64), jnp.int32))
    assert max(aval.size for aval in (eqn.outvars[0].aval for eqn in found.eqns)) == 8192 * 64


@pytest.mark.parametrize("which", ["sums", "search"])
def test_a_gpu_has_no_loop_for_few(which):
    """Each step of a loop is a launch of its own there; a processor takes JAX's own."""
    fn = running_sums if which == "sums" else lambda ends: ended_before(ends, jnp.arange(300, dtype=jnp.int32))
    traced = jax.jit(fn).trace(jax.ShapeDtypeStruct((64,), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "while" not in text
    assert "scan" not in text
    assert "stablehlo.reduce" in text
