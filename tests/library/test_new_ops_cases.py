"""The cases of operations that JAX has no fast way for: what is compared is no rounding, and what is right is wide."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED
from thinning import AT_LENGTH

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import new_ops_cases
from library_cases import collected, make
from library_programs import both_passes, cotangent

# Of the same operations on a CPU, as `library_cpu.py` measures them.
ON_CPU = [case for name in (*new_ops_cases.OPERATIONS, "moe_dispatch") for case in collected("cpu", [name])]


def sizes(tree):
    """The root mean square of each floating-point result."""
    return [float(np.sqrt(np.mean(np.square(np.asarray(leaf, np.float32))))) for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
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
            errors = jax.tree.map(lambda a, b: np.asarray(a, np.float32) - np.asarray(b), found, right)
            shares = [error / size for error, size in zip(sizes(errors), sizes(right), strict=True)]
            assert max(shares) < 4e-3


def test_every_operation_has_cases_for_a_cpu_alone():
    """One at least; `new_ops_gpu.py` has those for a GPU, and the other benchmarks of a GPU leave them out."""
    names = {case.op for case in ON_CPU}
    assert names == {*new_ops_cases.OPERATIONS, "moe_dispatch"}
    assert not any(collected(platform, [name]) for platform in ("gpu", "check") for name in names)


def once_each():
    """At first the first case of each operation."""
    first = {case.op: case.name for case in reversed(ON_CPU)}
    for case in ON_CPU:
        marks = () if case.name == first[case.op] else AT_LENGTH
        yield pytest.param(case, id=f"{case.op} {case.name}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(once_each()))
def test_a_case_for_a_cpu_computes_the_values_that_it_is_compared_with(case):
    """Indices and words are the same, numbers are so but for rounding; with their gradients where these are timed."""
    arrays, static = make(case)
    ways = [functools.partial(fn, **static) for fn in (case.plain, case.ours(UNTUNED))]
    given = arrays
    if case.backward:
        given = (*arrays, cotangent(ways[0], arrays))
        ways = [both_passes(way, arrays) for way in ways]
    right, found = (jax.jit(way)(*given) for way in ways)

    assert jax.tree.structure(found) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if not jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_array_equal(one, other)
            continue
        size = sizes(other)[0]
        assert size > 1e-2
        # Of what plain JAX rounds, too: scaled weights, and sums of bfloat16.
        assert sizes(np.asarray(one, np.float32) - np.asarray(other, np.float32))[0] < 1e-2 * size
