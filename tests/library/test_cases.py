"""The benchmarks' cases: every one fits the library's function and the plain computation that it is compared with."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import pytest
from fakes_library import UNTUNED

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
from library_cases import collected, function_of, operations

CASES = [(kind, case) for kind in ("GPU", "CPU", "CHECK") for case in collected(kind)]


@pytest.mark.parametrize("operation", operations())
def test_an_operation_has_enough_cases(operation):
    """At least five for a GPU, small and large, two for a CPU, and some whose sizes are odd."""
    counts = {kind: len(collected(kind, [operation])) for kind in ("GPU", "CPU", "CHECK")}
    assert counts["GPU"] >= 5
    assert counts["CPU"] >= 2
    assert counts["CHECK"] >= 2


@pytest.mark.parametrize(("kind", "case"), CASES, ids=lambda v: getattr(v, "name", v))
def test_a_case_computes_what_it_is_compared_with(kind, case):
    """Ours, the plain way and every ready-made one give the same shape and dtype; known without any array."""
    arrays = jax.eval_shape(case.make)

    def ours(*given):
        return function_of(case)(*given, executor=UNTUNED, **case.static)

    expected = jax.eval_shape(ours, *arrays)
    for name, other in {"plain": case.plain, **case.ready}.items():
        # cuDNN is looked for as soon as it is traced.
        if "cudnn" in name and jax.default_backend() != "gpu":
            continue
        found = jax.eval_shape(other, *arrays)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    assert case.flops or case.traffic
    assert not case.backward or case.both_flops or case.both_traffic
