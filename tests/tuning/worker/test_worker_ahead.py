"""Programs of the next tuning are compiled while this one is measured."""

from __future__ import annotations

import math
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.timing.inputs import flatten_call
from ejkernel.ops.timing.program import Staged, stage
from ejkernel.ops.tuning.worker.ahead import AheadCompiler
from ejkernel.ops.tuning.worker.export import export
from ejkernel.ops.tuning.worker.main import ImportingBuilder, _loaded

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


@pytest.fixture
def importing(ahead):
    """A builder of two programs, one with a product."""
    programs = {n: exported(lambda x, n=n: [x @ x.T if n else x + 1], X) for n in range(2)}
    about = {"outputs": 1, "objective": "forward"}
    known = {n: (data, {"number": n, "products": bool(n), **about}) for n, data in programs.items()}
    return ImportingBuilder(known, ahead, one_by_one=False)


def test_programs_behind_the_first_are_neither_traced_nor_lowered_before_they_are_compiled(importing):
    """One after the other that takes seconds; what was compiled ahead needs none of it."""
    assert importing.ready_made(0, "first", math.inf) is None
    traced = importing.traced(Staged("first", "forward", "", None, lambda executable: executable), 0)
    second = importing.ready_made(1, "second", math.inf)
    lowered, text = importing.lower(second)
    assert (traced.traced, second.traced, lowered, text) == (None, None, second, "1")
    assert not importing.times_products(traced, None)
    assert importing.times_products(second, lowered)
    for for_speed in (False, True):
        made = importing.build(second, lowered, for_speed=for_speed)
        assert made.for_speed is for_speed
        assert (made.call(X, "a cotangent")[0] == X @ X.T).all()


def test_a_program_that_was_compiled_ahead_is_taken(importing, ahead, monkeypatch):
    """It is compiled once."""
    data = importing.programs[0][0]
    ahead.give(data)
    ahead._coming[data].result()
    monkeypatch.setattr(AheadCompiler, "compiled", lambda self, data, **how: pytest.fail("compiled once more"))
    importing.traced(Staged("first", "forward", "", None, lambda executable: executable), 0)
    staged = importing.ready_made(0, "again", math.inf)
    assert (importing.build(staged, staged).call(X)[0] == X + 1).all()


@pytest.mark.skipif(not hasattr(os, "setpriority"), reason="threads have no priority here")
def test_the_tuning_at_work_goes_before_programs_that_are_compiled_ahead(ahead):
    """Their threads have a lower priority than this one."""
    other = ahead._pool.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    assert other == min(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + 5, 19)


@pytest.mark.parametrize(("fn", "products"), [(lambda x: x @ x.T, True), (lambda x: x + 1, False)])
def test_an_exported_program_says_whether_its_compiler_runs_products(fn, products):
    """The process that gets it need not lower it to know."""
    staged = stage(fn, flatten_call((X,), {}), [X], "forward")
    assert export(staged, "cpu", ()).products is products
