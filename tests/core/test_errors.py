"""The errors of the package: one tree, where each is also the built-in that callers expect."""

from __future__ import annotations

import inspect
import pickle

import pytest

from ejkernel.ops.core import errors

OWN = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
BUILT_IN = (TypeError, ValueError, RuntimeError, OSError, ImportError)


def test_every_class_is_an_error_of_the_tree():
    """`except OpsError` catches all that the package finds wrong."""
    assert len(OWN) > 20
    assert [kind for kind in OWN if not issubclass(kind, errors.OpsError)] == []


@pytest.mark.parametrize("kind", [kind for kind in OWN if kind is not errors.OpsError])
def test_an_error_is_one_built_in(kind):
    """A caller that knows nothing of the package catches what Python would raise."""
    assert len([base for base in BUILT_IN if issubclass(kind, base)]) == 1
    with pytest.raises(BUILT_IN, match="what, and what to do"):
        raise kind("what, and what to do")


@pytest.mark.parametrize("kind", OWN)
def test_an_error_crosses_to_another_process(kind):
    """It is the same there, with its message."""
    there = pickle.loads(pickle.dumps(kind("what, and what to do")))
    assert (type(there), str(there)) == (kind, "what, and what to do")


def test_a_failed_tuning_has_its_reasons_and_its_record():
    """One that ran out of time is one of these."""
    error = errors.OutOfTimeError("no time", ["slow", "slower"], record="record")
    assert (error.reasons, error.record) == (("slow", "slower"), "record")
    assert isinstance(error, errors.TuningError)
    assert (errors.TuningError("none").reasons, errors.TuningError("none").record) == ((), None)
