"""The benchmarks' cases: every one fits its kernel and the plain computation that it is compared with."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import pytest
from fakes_library import UNTUNED

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import library_gpu
from library_cases import collected, make, operations
from library_programs import HEURISTIC, TUNED, Study


def forms(array):
    """The shape and dtype as one leaf of a tree."""
    return f"{array.dtype.name} {array.shape}"


CASES = [case for platform in ("gpu", "cpu", "check") for case in collected(platform)]


@pytest.mark.parametrize("operation", operations("gpu"))
def test_an_operation_has_enough_cases(operation):
    """At least five for a GPU, small and large, two for a CPU, and some to check every candidate with."""
    counts = {platform: len(collected(platform, [operation])) for platform in ("gpu", "cpu", "check")}
    assert counts["gpu"] >= 5
    assert counts["cpu"] >= 2
    assert counts["check"] >= 2


@pytest.mark.one_leg
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.name} {case.platform}")
def test_a_case_computes_what_it_is_compared_with(case):
    """Ours, the plain way and every ready-made one give the same shape and dtype; known without any array."""
    kept = []

    def arrays_of():
        arrays, static = make(case)
        kept.append(static)
        return arrays

    arrays = jax.eval_shape(arrays_of)
    expected = jax.eval_shape(lambda *given: case.ours(UNTUNED)(*given, **kept[0]), *arrays)
    for name, other in {"plain": case.plain, **case.ready}.items():
        # cuDNN and Pallas look for a GPU as soon as they are traced.
        if name in ("cudnn", "pallas") and jax.default_backend() != "gpu":
            continue
        found = jax.eval_shape(lambda *given, other=other: other(*given, **kept[0]), *arrays)
        assert jax.tree.structure(found) == jax.tree.structure(expected), name
        assert jax.tree.map(forms, found) == jax.tree.map(forms, expected), name
    assert case.flops or case.bytes


def test_equal_programs_are_timed_once(monkeypatch):
    """What two of them differed by would be noise, and could break a limit."""
    ways = {"plain": lambda x: x * 2, "other": lambda x: x + x, HEURISTIC: lambda x: x + x, TUNED: lambda x: x * 2}
    found = Study(ways, (jax.numpy.ones(4),), None, None, seconds=1.0, first_run=0.5)
    monkeypatch.setattr(library_gpu, "study", lambda case, seconds: found)
    timed = []

    def raced(programs, args, tag, rounds):
        timed.append(len(programs))
        return {number: 1e-6 * (number + 1) for number in programs}

    monkeypatch.setattr(library_gpu, "raced", raced)
    row = library_gpu.compare(CASES[0], 0, 1.0)

    assert timed == [2, 2]
    assert row["us"] == pytest.approx({"plain": 1.0, "other": 2.0, HEURISTIC: 2.0, TUNED: 1.0})
    assert (row["tuned_over_ready"], row["heuristic_over_ready"]) == (1.0, 2.0)
    assert library_gpu.is_broken(row)
