"""What is timed: programs, their names, their equality, and forward and backward as one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.timing import program
from ejkernel.ops.timing.inputs import flatten_call
from ejkernel.ops.timing.program import first_line, forward_and_backward, stage

X = jnp.arange(1.0, 5.0)


def staged(fn, *args, objective="forward", name="measured", seed=0, **kwargs):
    call = flatten_call(args or (X,), kwargs)
    return stage(fn, call, call.leaves, objective, name=name, seed=seed)


def text_of(fn, *args, **settings):
    return staged(fn, *args, **settings).lower()[1]


def test_a_program_computes_what_the_function_does():
    """It takes the arrays of the call; constants are in it."""
    program = staged(lambda x, scale, *, add: x * scale + add, X, 3, add=np.float32(1)).build()

    np.testing.assert_allclose(program.call(X, np.float32(1)), X * 3 + 1)
    assert (program.objective, program.notes) == ("forward", "")


def test_a_program_has_its_name():
    """A profiler's trace tells programs apart by it."""
    program = staged(lambda x: x * 2, name="ejk_1").build()

    assert program.executable.runtime_executable().hlo_modules()[0].name == "jit_ejk_1"


def test_names_do_not_make_programs_differ():
    """Equal computations have equal texts, whatever they are called."""
    assert text_of(lambda x: x * 2, name="ejk_1") == text_of(lambda x: x * 2, name="ejk_12")


@pytest.mark.parametrize("other", [lambda x: x * 3, lambda x: x + x, lambda x: (x * 2).astype(jnp.float16)])
def test_other_computations_have_other_texts(other):
    """A constant, an operation or a dtype tells them apart."""
    assert text_of(lambda x: x * 2) != text_of(other)


@pytest.mark.parametrize("size", [4, 4096])
def test_arrays_that_are_closed_over_belong_to_the_text(size):
    """Two programs that differ in such an array alone are two, also where it is large."""
    one, other = (np.random.default_rng(seed).standard_normal(size).astype(np.float32) for seed in (0, 1))
    x = jnp.ones(size)

    assert text_of(lambda x: x * one, x) != text_of(lambda x: x * other, x)
    assert text_of(lambda x: x * jnp.asarray(one), x) != text_of(lambda x: x * jnp.asarray(other), x)


def test_programs_that_call_back_are_equal_to_none():
    """Which function is called does not stand in the text."""

    def calling(value):
        return lambda x: x * jax.pure_callback(lambda: np.float32(value), jax.ShapeDtypeStruct((), np.float32))

    assert text_of(calling(1), name="ejk_1") != text_of(calling(2), name="ejk_2")


def test_equal_gradients_are_equal_programs():
    """Cotangents are arguments, not constants: the text has no random numbers."""
    one, other = (text_of(lambda x: x * 2, objective="forward+backward", name=name) for name in ("ejk_1", "ejk_2"))

    assert one == other


# Forward and backward.


def test_output_and_gradients_come_together():
    """The output is the function's own; each float argument has its gradient, for a random cotangent."""
    program = staged(
        lambda x, i, y: x[i] * y, X, jnp.array([1, 2]), jnp.float32(3), objective="forward+backward"
    ).build()
    out, gradients = program.call(X, jnp.array([1, 2]), jnp.float32(3))

    np.testing.assert_allclose(out, X[1:3] * 3)
    assert [g.shape for g in gradients] == [(4,), ()]
    assert program.objective == "forward+backward"


def test_the_gradient_is_the_one_of_the_cotangents():
    """Checked against JAX's own, with integers among arguments and outputs."""

    def run(x, i):
        return jnp.sin(x) * 2, i + 1

    cotangent = jnp.array([1.0, -2.0, 0.5, 3.0])
    out, (gradient,) = jax.jit(forward_and_backward(run, [0]))((X, jnp.arange(2)), (cotangent, 0))

    np.testing.assert_allclose(gradient, 2 * jnp.cos(X) * cotangent, rtol=1e-6)
    np.testing.assert_array_equal(out[1], [1, 2])


def test_cotangents_are_random_and_reproducible():
    """Never ones, which let the compiler drop work; one seed gives one gradient."""

    def gradient(seed):
        program = staged(lambda x: x * 1.0, objective="forward+backward", seed=seed).build()
        return np.asarray(program.call(X)[1][0])

    assert len(np.unique(gradient(0))) == 4
    np.testing.assert_array_equal(gradient(0), gradient(0))
    assert not np.array_equal(gradient(0), gradient(1))


def loops(x):
    return jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2, x)


@pytest.mark.parametrize(
    ("fn", "argument"), [(loops, X), (lambda x: x + 1, jnp.arange(4))], ids=["no reverse mode", "integers alone"]
)
def test_what_has_no_gradient_is_staged_forward(fn, argument):
    """The notes say what and why."""
    found = staged(fn, argument, objective="forward+backward")

    assert found.objective == "forward"
    assert "cannot be differentiated" in found.notes


# What cannot be jitted, and what fails.


def test_what_looks_at_values_runs_as_it_is():
    """There is no compiled program, and the notes say so."""
    program = staged(lambda x: x * 2 if x.sum() > 0 else x).build()

    np.testing.assert_allclose(program.call(X), X * 2)
    assert program.executable is None
    assert "cannot be jitted" in program.notes


@pytest.mark.parametrize("objective", ["forward", "forward+backward"])
@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, NotImplementedError])
def test_errors_of_the_function_are_raised(error, objective):
    """What fails for its own reasons is neither run without jit nor taken for a missing gradient."""

    def broken(x):
        raise error("by design")

    with pytest.raises(error, match="by design"):
        staged(broken, objective=objective)


def test_an_error_is_one_line():
    """Its type and the first line of what it says."""
    assert first_line(ValueError("first\nsecond")) == "ValueError: first"
    assert first_line(ValueError()) == "ValueError: "


def test_what_runs_once_is_not_compiled_for_speed(monkeypatch):
    """The compiler need not time its own ways; where it does not know the option, it compiles as ever."""
    asked = []

    class Lowered:
        def compile(self, compiler_options=None):
            asked.append(compiler_options)
            if compiler_options and len(asked) == 1:
                raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option")
            return lambda x: x

    one = staged(lambda x: x * 2)
    assert one.compile(Lowered(), for_speed=False).call(3) == 3
    assert one.compile(Lowered(), for_speed=False).call(3) == 3
    assert one.compile(Lowered()).call(3) == 3
    quick = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    assert asked == [quick, None, quick, None]


def test_a_compilation_that_fails_is_not_tried_again():
    """Only an option that the compiler does not know is left out."""

    class Lowered:
        def compile(self, compiler_options=None):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: " + ("options" if compiler_options else "none"))

    with pytest.raises(jax.errors.JaxRuntimeError, match="options"):
        staged(lambda x: x * 2).compile(Lowered(), for_speed=False)


def test_the_options_that_spare_time_are_known_here():
    """What the compiler of this machine refuses would be compiled twice."""
    lowered, _ = staged(lambda x: x @ x.T, jnp.ones((4, 4))).lower()

    assert lowered.compile(compiler_options=program._UNTUNED)(jnp.ones((4, 4)))[0, 0] == 4
