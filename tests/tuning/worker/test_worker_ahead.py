"""Programs of the next tuning are compiled while this one is measured."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.tuning.worker.ahead import AheadCompiler
from ejkernel.ops.tuning.worker.main import _loaded

X = jnp.arange(6.0).reshape(2, 3)


def exported(fn, *args):
    """A program as bytes."""
    return bytes(jax.export.export(jax.jit(fn))(*args).serialize())


@pytest.fixture
def ahead():
    """One that has begun."""
    made = AheadCompiler(_loaded)
    made.begin()
    return made


def test_a_program_is_compiled_and_taken_once(ahead):
    """It computes what was exported."""
    data = exported(lambda x, y: [x + y], X, X)
    ahead.give(data)
    found = ahead.take(data, for_speed=True)

    assert found.arguments == 2
    np.testing.assert_array_equal(found.executable(X, X)[0], 2 * X)
    assert ahead.take(data, for_speed=True) is None


def test_a_program_with_products_is_compiled_quickly_and_serves_no_other_purpose(ahead):
    """For speed the compiler would run it on the device."""
    data = exported(lambda x: [x @ x.T], X)
    for wanted, is_there in ((False, True), (True, False)):
        ahead.give(data)
        assert (ahead.take(data, for_speed=wanted) is not None) == is_there


def test_nothing_is_compiled_before_the_worker_has_begun():
    """It has no device and no settings yet."""
    ahead = AheadCompiler(_loaded)
    data = exported(lambda x: [x], X)
    ahead.give(data)
    assert ahead.take(data, for_speed=True) is None


def test_what_cannot_be_compiled_is_left_to_its_tuning(ahead):
    """That says why."""
    ahead.give(b"no program")
    assert ahead.take(b"no program", for_speed=True) is None


def test_what_was_not_begun_is_not_waited_for():
    """The tuning compiles it itself."""
    held = threading.Event()

    def load(data):
        held.wait()
        return _loaded(data)

    ahead = AheadCompiler(load)
    ahead.begin()
    programs = [exported(lambda x, n=n: [x * n], X) for n in range(64)]
    for data in programs:
        ahead.give(data)
    assert ahead.take(programs[-1], for_speed=True) is None
    held.set()
    assert ahead.take(programs[0], for_speed=True) is not None


def test_what_no_tuning_has_taken_is_let_go_in_the_end(ahead):
    """Programs that are given while one is measured are of the next three."""
    data = exported(lambda x: [x], X)
    ahead.give(data)
    for _ in range(4):
        ahead.forget()
        assert data in ahead._coming
    ahead.forget()
    assert data not in ahead._coming
    assert not ahead._given
