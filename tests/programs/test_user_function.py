"""A user's function as a program of arrays: what is traced, what comes out, and what stays the caller's."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Picking, Times, executor_with

from ejkernel.ops import AutotuneOptions, OpsError, autotune, freeze
from ejkernel.ops.programs.user_function import flatten_program, holds_arrays, of_arrays, trace, unbound

X = jnp.arange(1.0, 5.0)
QUIET = AutotuneOptions(progress=False)


@jax.tree_util.register_pytree_node_class
class Counter:
    """A pytree that its methods change, with a leaf that is no array."""

    def __init__(self, total, name="counter"):
        self.total = total
        self.name = name

    def tree_flatten(self):
        return (self.total, self.name), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    def add(self, x):
        self.total = self.total + x
        return self.name

    __call__ = add


class Opaque:
    """Holds arrays where JAX does not look."""

    def __init__(self, inside):
        self.inside = inside


def outputs(fn, *args, **kwargs):
    """What the program gives, as numbers."""
    call = flatten_program(fn, args, kwargs)
    return [np.asarray(leaf).tolist() for leaf in jax.jit(of_arrays(call))(*call.leaves)]


def test_what_is_returned_beside_arrays_is_left_out():
    """Functions, texts and numbers are no outputs of a program."""
    assert outputs(lambda x: {"a": (x, jnp.tanh), "b": "text", "c": 3, "d": x + 1}, jnp.zeros(2)) == [[0, 0], [1, 1]]


def test_what_is_assigned_is_an_output():
    """An update that is not returned is part of the program all the same; what did not change is none."""
    counter = Counter(jnp.zeros(2))
    assert outputs(lambda counter, x: counter.add(x), counter, jnp.ones(2)) == [[1, 1]]
    assert outputs(lambda counter, x: x.sum(), counter, jnp.ones(2)) == [2]
    assert counter.total.tolist() == [0, 0]


@pytest.mark.parametrize("call", ["object", "method", "partial", "partial of a method"])
def test_what_a_function_is_bound_to_is_an_argument(call):
    """Its arrays are traced, not folded into the program, and the caller's object stays as it was."""
    counter, x = Counter(jnp.zeros(2)), jnp.ones(2)
    fns = {
        "object": (counter, x),
        "method": (counter.add, x),
        "partial": (functools.partial(Counter.add, counter, x=x),),
        "partial of a method": (functools.partial(counter.add, x),),
    }
    assert outputs(*fns[call]) == [[1, 1]]
    assert len(flatten_program(*fns[call][:1], fns[call][1:], {}).leaves) == 2
    assert counter.total.tolist() == [0, 0]


def test_keywords_of_a_call_stand_before_those_of_a_partial():
    """As Python has it."""
    fn, args, kwargs = unbound(functools.partial(max, 1, key=abs, default=0), (2,), {"key": len})
    assert (fn, args, kwargs) == (max, (1, 2), {"key": len, "default": 0})


@dataclass(frozen=True)
class TracedElsewhere:
    """What a framework gives for a trace: JAX's own inside."""

    own: Any
    about: dict = field(default_factory=dict)


class Framework:
    """A jitted function of a framework, which alone knows how to trace it."""

    def __init__(self, fn, wrapped):
        self.fn, self.wrapped = jax.jit(fn), wrapped
        self.traces = 0

    def __call__(self, x):
        return self.fn(x)

    def trace(self, x):
        self.traces += 1
        return TracedElsewhere(self.fn.trace(x)) if self.wrapped else "none of JAX's"

    def lower(self, x):
        return self.trace(x)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_framework_traces_its_own_functions(wrapped):
    """What JAX made is taken out of its answer; where there is nothing of JAX in it, the function is traced here."""
    tuner = Picking()
    executor, kernel = executor_with(tuner), Times.fresh()()
    fn = Framework(lambda x: executor(kernel, x), wrapped)

    assert len(autotune(fn, X, tuning=QUIET).entries) == 1
    assert (fn.traces > 0, tuner.calls) == (True, 1)


def test_a_method_called_trace_is_not_taken_for_a_jitted_functions():
    """A matrix has a trace as well."""

    class Matrix:
        def __call__(self, x):
            return x * 2

        def trace(self, x):
            raise AssertionError("this trace is none of ours")

    assert trace(Matrix(), (X,), {}).jaxpr.out_avals[0].shape == (4,)


def test_static_arguments_of_a_jitted_function_may_be_numpy_scalars():
    """Only `jax.jit` itself knows that they are static."""
    fn = jax.jit(lambda x, n: x[:n], static_argnums=1)
    assert trace(fn, (X, np.int64(2)), {}).jaxpr.out_avals[0].shape == (2,)


@pytest.mark.parametrize(
    ("value", "holds"),
    [
        (Opaque(X), True),
        (Opaque({"a": [Opaque((1, X))]}), True),
        (Opaque({"a": [Opaque((1, "x"))]}), False),
        (lambda: X, False),
        ("text", False),
    ],
    ids=["attribute", "deep", "none", "closure", "text"],
)
def test_arrays_are_seen_in_objects_that_are_no_pytrees(value, holds):
    """Attributes are looked through; functions hold what they like."""
    assert holds_arrays(value) is holds


def test_an_object_that_contains_itself_is_looked_through_once():
    """A parent and its child know each other."""
    parent, child = Opaque(None), Opaque(None)
    parent.inside, child.inside = child, parent
    assert not holds_arrays(parent)


def changing(executor, kernel):
    """A step that keeps what it computes in its argument."""

    def step(state, x):
        state.inside = executor(kernel, x)
        return state.inside.sum()

    return step


def test_a_program_with_hidden_arrays_is_not_run():
    """The confirmation says which argument it was, and the object is as it was."""
    state = Opaque(X)
    step = jax.jit(changing(executor_with(Picking()), Times.fresh()()), static_argnums=0)

    result = autotune(step, state, X, tuning=AutotuneOptions(progress=False, confirm=True))

    assert result.entries[0].is_measured
    assert "the Opaque that it is given holds arrays and is no pytree" in str(result.confirmation)


def test_a_program_that_cannot_be_traced_from_outside_is_not_run():
    """It is tuned all the same, since `jax.jit` itself traced it."""
    executor, kernel = executor_with(Picking()), Times.fresh()()
    step = jax.jit(lambda x, n: executor(kernel, x[:n]), static_argnums=1)

    result = autotune(step, X, np.int64(2), tuning=AutotuneOptions(progress=False, confirm=True))

    assert result.entries[0].is_measured
    assert "the program cannot be traced" in result.confirmation.note


def test_a_program_whose_arguments_contain_themselves_is_not_run():
    """A framework's own jit may know what to do with them."""
    counter = Counter(jnp.zeros(2))
    counter.total = [counter]
    executor, kernel = executor_with(Picking()), Times.fresh()()

    class Jitted(Framework):
        def trace(self, counter, x):
            return self.fn.trace(x)

    result = autotune(
        Jitted(lambda x: executor(kernel, x), wrapped=True),
        counter,
        X,
        tuning=AutotuneOptions(progress=False, confirm=True),
    )
    assert "contains itself" in result.confirmation.note


@pytest.mark.parametrize("inside", [lambda counter: [counter], lambda counter: counter])
def test_an_argument_that_contains_itself_is_an_error(inside):
    """Where the function has no jit of its own that could take it apart."""
    counter = Counter(None)
    counter.total = inside(counter)
    with pytest.raises(OpsError, match="a Counter among the arguments contains itself"):
        autotune(lambda counter, x: x, counter, X, tuning=QUIET)


def test_one_object_in_two_places_does_not_contain_itself():
    """Tied weights are two leaves."""
    counter = Counter(jnp.zeros(2))
    assert len(flatten_program(max, ([counter, counter],), {}).leaves) == 2


def test_a_frozen_function_may_return_anything(tmp_path):
    """A lock needs the calls alone."""
    executor, kernel = executor_with(), Times.fresh()()
    assert len(freeze(tmp_path / "lock.json", lambda x: (executor(kernel, x), "done"), X).entries) == 1


@pytest.mark.parametrize("given", [lambda x: x * 2, functools.partial(jnp.add, 1.0), Counter(X)])
def test_a_function_without_kernel_calls_says_so(given, capsys):
    """In the result, and on the error stream as soon as it is known."""
    result = autotune(given, X, tuning=AutotuneOptions(confirm=True))

    assert result.entries == ()
    (note,) = result.notes
    assert "makes no kernel call that a selector answers; there is nothing to tune" in note
    assert note in result.table()
    assert note in capsys.readouterr().err.splitlines()
    assert result.confirmation.note == "no call was tuned"


def test_a_function_with_calls_has_no_such_note():
    """Nor has one whose calls are known."""
    executor, kernel = executor_with(Picking()), Times.fresh()()
    for _ in range(2):
        assert autotune(lambda x: executor(kernel, x), X, tuning=QUIET).notes == ()
