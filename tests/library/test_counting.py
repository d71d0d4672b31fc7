"""Running sums and searches of counts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.library import counting
from ejkernel.library.counting import ended_before, running_sums


@pytest.mark.parametrize("few", [1 << 23, 0], ids=["all with all", "by JAX"])
@pytest.mark.parametrize("shape", [(1,), (7,), (300,), (40, 5)])
def test_sums_are_those_of_numpy(monkeypatch, shape, few):
    """Along the first axis, in the dtype of the counts."""
    monkeypatch.setattr(counting, "_FEW_PAIRS", few)
    counts = np.random.default_rng(0).integers(0, 5, shape).astype("int32")
    found = running_sums(jnp.asarray(counts))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.cumsum(counts, axis=0))


@pytest.mark.parametrize("few", [1 << 23, 0], ids=["all with all", "by JAX"])
def test_searches_are_those_of_numpy(monkeypatch, few):
    """Before the first end, between equal ones, and behind the last."""
    monkeypatch.setattr(counting, "_FEW_PAIRS", few)
    ends = np.array([0, 0, 3, 3, 4, 9], "int32")
    numbers = np.arange(-2, 12, dtype="int32")
    found = ended_before(jnp.asarray(ends), jnp.asarray(numbers))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.searchsorted(ends, numbers, side="right"))
