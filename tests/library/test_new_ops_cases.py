"""The cases of operations that JAX has no fast way for: what is compared is no rounding, and what is right is wide."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import new_ops_cases


def sizes(tree):
    """The root mean square of each floating-point result."""
    return [float(jnp.sqrt(jnp.mean(leaf.astype(jnp.float32) ** 2))) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("operation", ["moe", "residual_norm"])
def test_every_gradient_of_a_case_is_more_than_rounding_and_is_known_in_float32(operation):
    """An error over a result that should be zero says nothing, nor does one beside results that are rounded already."""
    forward, gradient, *_ = new_ops_cases.OPERATIONS[operation](True)
    for case in (forward, gradient):
        right = jax.jit(case.exact)(*case.arrays)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(right))
        assert min(sizes(right)) > 1e-2
        for way in list(case.ways.values())[:2]:
            found = jax.jit(way)(*case.arrays)
            errors = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b, found, right)
            shares = [error / size for error, size in zip(sizes(errors), sizes(right), strict=True)]
            assert max(shares) < 4e-3
