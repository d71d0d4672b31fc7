"""A set of inputs, what is right for it, and candidates that are compared with it."""

from __future__ import annotations

import functools
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.timing import comparing
from ejkernel.ops.timing import program as programs
from ejkernel.ops.timing.program import CompiledProgram
from ejkernel.ops.tuning import check
from ejkernel.ops.tuning.check import CheckCase
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.runner import InProcessRunner

X = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)).astype(jnp.float32))


@pytest.fixture(autouse=True, params=[False, True], ids=["host", "device"])
def large(request, monkeypatch):
    """Where answers are compared changes nothing of what follows."""
    monkeypatch.setattr(comparing, "_CPU_ELEMENTS", 1 if request.param else 1 << 40)


def program(fn, objective="forward"):
    return CompiledProgram(fn, objective)


def run(case, fn, objective="forward"):
    """One candidate on one set of inputs; what is right is taken over."""
    begun = case.begin(program(fn, objective))
    found = case.end(begun)
    if not found.reason:
        case.adopt(begun)
    return found


def tuned(functions, *args, **job):
    """The runner of candidates that are compiled and checked."""
    job = TuningJob(functions.get, args, {}, list(functions), **job)
    made = InProcessRunner(job, seed=0, device=jax.devices()[0])
    made.candidates.enter(list(functions))
    made.compile(float("inf"))
    made.check()
    made.close()
    return made.candidates


def test_without_a_reference_the_first_answer_is_right():
    """Later ones are compared with it."""
    case = CheckCase([X])

    assert run(case, lambda x: x * 2).reason == ""
    assert run(case, lambda x: x + x).reason == ""
    assert run(case, lambda x: x * 3).finding.test == "factor"


def test_gradients_are_those_of_the_first_answer_whose_output_is_right():
    """A reference gives the output alone."""
    case = CheckCase([X], expected=(X * 2,))
    both = functools.partial(run, case, objective="forward+backward")

    assert both(lambda x: (x * 3, (x,))).reason.startswith("output: ")
    assert case.expected == (case.expected[0],)
    assert both(lambda x: (x * 2, (x,))).reason == ""
    assert both(lambda x: (x * 2, (x * 2,))).reason.startswith("gradient[0]: ")
    assert both(lambda x: (x * 2, (x + 0,))).reason == ""


def test_an_answer_that_is_wrong_on_another_set_says_nothing_of_gradients():
    """Its gradients on the first set are not what others are compared with."""
    good = {"first": lambda x: x, "right": lambda x: x}

    def bent(x, factor):
        @jax.custom_vjp
        def f(x):
            return jnp.where(x[0, 0] == X[0, 0], 1.0, 1.5) * x if factor != 1 else x

        f.defvjp(lambda x: (f(x), None), lambda _, g: (g * factor,))
        return f(x)

    functions = {"bent": lambda x: bent(x, 3.0), **{name: lambda x: bent(x, 1.0) for name in good}}
    found = tuned(functions, X, objective="forward+backward", reference=lambda x: x, fresh_floats=True)

    assert [found.trial(n).status for n in range(3)] == ["wrong", "ok", "ok"]


def test_the_noise_of_the_reference_as_it_was_written_widens_the_limits():
    """Of a product of which little is left, in bfloat16: right candidates are off by as much as it is."""

    def halves(x, y):
        return (x @ y) * 8 - (x @ y) * 8 * (1 - 2.0**-6)

    def other(x, y):
        return (x * 8) @ y - ((x @ y) * 8 * (1 - 2.0**-6))

    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 2
    functions = {"as it was written": halves, "in another order": other, "wrong": lambda x, y: (x @ y) * 3}
    found = tuned(functions, *shapes, reference=halves)

    assert [found.trial(n).status for n in range(3)] == ["ok", "ok", "wrong"]
    assert found.trial(1).check.widened > 0


def test_a_reference_that_does_something_else_in_float32_is_taken_as_it_was_written():
    """Random numbers of another dtype are other numbers: their difference is no noise, and a wrong tile is found."""

    def dropped(x):
        return x * jax.random.normal(jax.random.key(0), x.shape, x.dtype)

    def tile(x):
        return dropped(x).at[:16, :16].set(0)

    found = tuned({"right": dropped, "wrong": tile}, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), reference=dropped)

    assert [found.trial(n).status for n in range(2)] == ["ok", "wrong"]


def test_the_record_says_what_the_check_found():
    """Which test, how far of its limit; of a candidate that is right too."""
    found = tuned({"right": lambda x: x * 2, "near": lambda x: x * (2 + 2.0**-11), "wrong": lambda x: x * 2.5}, X)
    checks = [found.trial(n).check for n in range(3)]

    assert checks[1].test == "whole"
    assert checks[1].ratio == pytest.approx(0.5 / (2.2 * (1 + 1 / 16)), rel=0.05)
    assert (checks[2].test, checks[2].ratio > 1) == ("factor", True)


def test_freed_memory_is_spoilt_in_one_program(monkeypatch):
    """All arrays of an answer together; those without NaN are left alone."""
    made = []
    real = check.run_own_program
    monkeypatch.setattr(check, "run_own_program", lambda *given: (made.append(real(*given)), made[-1])[1])
    check._poison((X, (X[0], jnp.arange(3))))

    assert [[array.shape for array in one] for one in made] == [[(64, 64), (64,)]]
    assert all(array.is_deleted() for array in made[0])


def test_what_spoils_memory_is_nan():
    """Of every dtype that has it."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.complex64):
        [spoilt] = check._nans([jnp.ones((4, 4), dtype)])
        assert np.isnan(np.asarray(spoilt).astype(np.complex64)).all()


def test_programs_of_the_check_are_compiled_beside_the_candidates(monkeypatch):
    """When the first answer comes, nothing is left to compile."""
    monkeypatch.setattr(comparing, "_CPU_ELEMENTS", 1)
    monkeypatch.setattr(programs, "_own_programs", OrderedDict())
    here = {"compiling": 0}
    real = programs.compiled_quickly

    def note(lowered):
        here["compiling"] += 1
        return real(lowered)

    monkeypatch.setattr(programs, "compiled_quickly", note)
    functions = {"a": lambda x: x * 2, "b": lambda x: x + x}
    job = TuningJob(functions.get, (jnp.ones((33, 65)),), {}, list(functions), reference=lambda x: x * 2)
    made = InProcessRunner(job, seed=0, device=jax.devices()[0])
    made.candidates.enter(list(functions))
    made.compile(float("inf"))
    before = here["compiling"]
    made.check()
    made.close()

    assert before == here["compiling"]
    assert len(programs._own_programs) == 3
