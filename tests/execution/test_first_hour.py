"""Errors of the first hour: each says what is wrong and what to write, before anything about tuning."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import AutotuneOptions, Kernel, OpsError, autotune, default_executor, explain, tunable

X = jnp.ones(8)


@tunable(times=[1, 2], version="1")
def scaled(x, y, *, times):
    """A product."""
    return x * y


class Scaled(Kernel[int, jax.Array]):
    """The same as a class."""

    op_id = "first_hour.scaled"

    def run(self, x, y, *, cfg):
        return x * y

    def heuristic_cfg(self, inv):
        return 1

    def candidate_cfgs(self, inv):
        return [1, 2]


def test_a_bare_tunable_says_what_to_write():
    """Without value lists there is nothing to choose from."""
    with pytest.raises(
        OpsError, match=r"@tunable needs to know what to choose from: write @tunable\(block=\[16, 32\]\)"
    ):

        @tunable
        def softmax(x, *, rows):
            return x


@pytest.mark.parametrize(
    "call", [scaled, lambda *args: default_executor()(Scaled(), *args)], ids=["function", "kernel"]
)
def test_a_missing_argument_is_pythons_own_error(call):
    """No word about candidates comes before it."""
    # Warnings are errors here: one about candidates would come first.
    warnings.simplefilter("error")
    with pytest.raises(TypeError, match=r"missing 1 required .*'y'"):
        call(X)


def test_a_call_that_fails_alike_with_every_candidate_is_no_fault_of_the_candidates():
    """The warning points to the call."""
    with pytest.warns(UserWarning, match="All of them fail alike: look at the call") as told, pytest.raises(TypeError):
        default_executor()(Scaled(), X, jnp.ones(9))
    assert "candidate_cfgs" not in str(told[0].message)


def test_an_option_of_the_tuning_among_the_arguments_is_named():
    """`seconds=3` belongs into the options, unless the function takes it."""
    with pytest.raises(OpsError, match=r"seconds=3 is no argument of .*tuning=AutotuneOptions\(seconds=3\)"):
        autotune(lambda x: scaled(x, x), X, seconds=3)
    quiet = AutotuneOptions(progress=False)
    taken = autotune(lambda x, seconds: scaled(x, x * seconds), X, seconds=3.0, tuning=quiet)
    assert len(taken.entries) == 1
    assert len(autotune(lambda x, **more: scaled(x, x), X, seconds=3.0, tuning=quiet).entries) == 1


@pytest.mark.parametrize("thing", [3, None, 2.5])
def test_what_is_no_program_says_what_one_is(thing):
    """Before anything is said of selectors."""
    with pytest.raises(OpsError, match=r"is no program; pass a function and its arguments, as in autotune\(step, x\)"):
        autotune(thing)


def test_a_function_without_kernel_calls_says_so():
    """And which functions make them."""
    (note,) = autotune(lambda x: x + 1, X, tuning=AutotuneOptions(progress=False)).notes
    assert "makes no kernel call that a selector answers; there is nothing to tune" in note
    assert "Functions of ejkernel.library and of @tunable make such calls" in note


def test_a_tunable_function_explains_and_chooses():
    """`f.explain(x)`, `explain(f, x)` and `f.choose(x)` ask the same executor."""
    assert str(scaled.explain(X, X)) == str(explain(scaled, X, X))
    assert scaled.explain(X, X).tier == "autotune"
    chosen = scaled.choose(X, X)
    assert scaled.explain(X, X).cfg == chosen
    assert scaled.explain(X, X, cfg={"times": 2}).tier == "override"
