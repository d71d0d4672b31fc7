"""What is timed: programs, their names, their equality, and forward and backward as one."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.timing import program
from ejkernel.ops.timing.inputs import flatten_call
from ejkernel.ops.timing.program import Cotangents, first_line, forward_and_backward, stage

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


# Cotangents of a tuning.


@pytest.fixture
def drawn(monkeypatch):
    """The shapes of every draw of cotangents."""
    seen = []
    real = program.draw

    def draw(leaves, seed):
        seen.append([leaf.shape for leaf in leaves])
        return real(leaves, seed)

    monkeypatch.setattr(program, "draw", draw)
    return seen


def sharing(cotangents, *fns):
    """The gradients of candidates that share their cotangents."""
    call = flatten_call((X,), {})
    both = [stage(fn, call, call.leaves, "forward+backward", cotangents=cotangents) for fn in fns]
    assert {one.objective for one in both} == {"forward+backward"}
    return [one.build().call(X)[1][0] for one in both]


def test_cotangents_are_drawn_once_for_candidates_of_equal_outputs(drawn):
    """The gradients are those of one cotangent."""
    one, two, three = sharing(Cotangents(0), lambda x: x * 1, lambda x: x + x, lambda x: x * 3)

    assert drawn == [[(4,)]]
    np.testing.assert_allclose(two, 2 * one, rtol=1e-6)
    np.testing.assert_allclose(three, 3 * one, rtol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[:2],
        lambda x: x.astype(jnp.float16),
        lambda x: (x, x),
        lambda x: (x,),
        lambda x: {"a": x},
        lambda x: x.sum(),
    ],
    ids=["shape", "dtype", "two", "tuple", "dict", "scalar"],
)
def test_cotangents_are_drawn_anew_for_other_outputs(other, drawn):
    """A candidate with outputs of another shape, dtype or structure is traced all the same; so is the next one."""
    one, changed, again = sharing(Cotangents(0), lambda x: x * 1, other, lambda x: x * 1)

    assert len(drawn) == 3
    assert changed.shape == (4,)
    np.testing.assert_array_equal(one, again)


def test_integers_among_outputs_have_no_cotangents(drawn):
    """They are passed over, for every candidate."""
    one, other = sharing(Cotangents(0), lambda x: (x, x.astype(int)), lambda x: (x, x.astype(int) + 1))

    assert drawn == [[(4,)]]
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("order", [1, -1])
def test_an_output_may_be_an_integer_for_one_candidate_and_a_float_for_the_next(order):
    """Each has the gradient of its own floats."""
    fns = [lambda x: (x * 2, x.sum()), lambda x: (x * 2, x.sum().astype(int))]
    found = dict(zip(fns[::order], sharing(Cotangents(0), *fns[::order]), strict=True))

    assert len(np.unique(np.round(found[fns[0]] - found[fns[1]], 4))) == 1


def test_a_seed_gives_its_cotangents():
    """Shared or not, so that a worker checks what this process checks."""
    (shared,) = sharing(Cotangents(7), lambda x: x * 1)
    alone = staged(lambda x: x * 1, objective="forward+backward", seed=7).build().call(X)[1][0]
    (other,) = sharing(Cotangents(8), lambda x: x * 1)

    np.testing.assert_array_equal(shared, alone)
    assert not np.array_equal(shared, other)


@pytest.mark.parametrize("first", [True, False])
def test_what_has_no_gradient_says_so_among_candidates_that_have_one(first):
    """Before and after one whose cotangents are known."""
    call, cotangents = flatten_call((X,), {}), Cotangents(0)
    order = (loops, jnp.sin) if first else (jnp.sin, loops)
    found = {fn: stage(fn, call, call.leaves, "forward+backward", cotangents=cotangents) for fn in order}

    assert "cannot be differentiated" in found[loops].notes
    assert (found[loops].objective, found[jnp.sin].objective) == ("forward", "forward+backward")


def test_what_fails_is_raised_among_candidates_that_do_not():
    """A mistake in a candidate is not taken for outputs of another shape."""

    def broken(x):
        raise ValueError("by design")

    with pytest.raises(ValueError, match="by design"):
        sharing(Cotangents(0), lambda x: x * 1, broken)


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


class Compiling:
    """A lowered program whose compiler knows every option but some."""

    def __init__(self, text="", unknown=()):
        self.text, self.unknown, self.asked = text, unknown, []

    def as_text(self):
        return self.text

    def compile(self, compiler_options=None):
        self.asked.append(compiler_options)
        for name in self.unknown:
            if name in (compiler_options or ()):
                raise jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: No such compile option: '{name}'")
        return lambda x: x


def test_what_runs_once_is_not_compiled_for_speed():
    """The compiler need not time its own ways: of products, and of reductions and transposes."""
    lowered = Compiling()

    assert staged(lambda x: x * 2).compile(lowered, for_speed=False).call(3) == 3
    assert lowered.asked == [
        {
            "xla_gpu_experimental_enable_fusion_autotuner": False,
            "xla_gpu_autotune_level": 0,
            "xla_gpu_enable_triton_gemm": False,
        }
    ]


def test_an_option_that_a_compiler_does_not_know_is_left_out():
    """The others stay; without any it compiles as ever."""
    one, level = staged(lambda x: x * 2), "xla_gpu_autotune_level"
    lowered = Compiling(unknown=["xla_gpu_experimental_enable_fusion_autotuner"])
    one.compile(lowered, for_speed=False)
    assert lowered.asked[-1] == {level: 0, "xla_gpu_enable_triton_gemm": False}

    lowered = Compiling(unknown=list(program._UNTUNED))
    assert one.compile(lowered, for_speed=False).call(3) == 3
    assert lowered.asked[-1] is None


CALLS = ["mosaic_gpu_v2(", "__gpu$xla.gpu.triton(", "triton_kernel_call(", "__cudnn$fmhaSoftmax("]


@pytest.mark.parametrize("call", CALLS)
def test_small_parts_beside_a_kernel_are_not_timed_by_the_compiler(call):
    """A program of the compiler's own parts alone is compiled as in users' programs."""
    one, plain = staged(lambda x: x * 2), Compiling("%1 = stablehlo.custom_call @Sharding(%0)")
    beside = Compiling(f"%1 = stablehlo.custom_call @{call}%0)")
    one.compile(plain)
    one.compile(beside)

    assert plain.asked == [None]
    assert beside.asked == [{"xla_gpu_experimental_enable_fusion_autotuner": False}]


@pytest.mark.parametrize(
    ("device", "size", "beside_others", "options"),
    [
        pytest.param(("gpu", "PJRT C API cuda 13000"), 4096, True, {"xla_gpu_enable_triton_gemm": False}, id="large"),
        pytest.param(("gpu", "PJRT C API cuda 13000"), 4096, False, None, id="on-an-idle-machine"),
        pytest.param(("gpu", "PJRT C API cuda 13000"), 64, True, None, id="small"),
        pytest.param(("gpu", "PJRT C API rocm 60300"), 4096, True, None, id="without-cublas"),
        pytest.param(("cpu", "cpu"), 4096, True, None, id="no-gpu"),
    ],
)
def test_large_products_are_left_to_cublas_where_other_processes_compile(
    monkeypatch, device, size, beside_others, options
):
    """The compiler's own kernels take seconds to compile, and to choose by timing needs an idle machine."""
    platform, version = device
    made = SimpleNamespace(platform=platform, client=SimpleNamespace(platform_version=version))
    monkeypatch.setattr(program, "default_device", lambda: made)
    dot = "stablehlo.dot_general %0, %1, contracting_dims = [1] x [0] : (tensor<{0}x{0}xbf16>, tensor<{0}x{0}xbf16>)"
    lowered = Compiling(f"%2 = {dot.format(size)} -> tensor<{size}x{size}xbf16>")
    program.compiled_for_speed(lowered, beside_others=beside_others)
    assert lowered.asked == [options]


def test_a_program_of_its_own_is_compiled_as_its_user_compiles_it(monkeypatch):
    """It is compared with nothing: `Tuner.measure` and `benchmark` say what it takes there."""
    asked, compiling = [], jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, *args: asked.append(args) or compiling(self, *args))
    monkeypatch.setattr(program, "compiled_for_speed", lambda lowered: pytest.fail("compiled to be compared"))
    assert staged(lambda x: x * 2).build().call(X)[0] == 2
    assert asked == [()]


def test_a_compilation_that_fails_is_not_tried_again():
    """Only an option that the compiler does not know is left out."""

    class Lowered(Compiling):
        def compile(self, compiler_options=None):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: " + ("options" if compiler_options else "none"))

    with pytest.raises(jax.errors.JaxRuntimeError, match="options"):
        staged(lambda x: x * 2).compile(Lowered(), for_speed=False)


def test_the_options_that_spare_time_are_known_here():
    """What the compiler of this machine refuses would be compiled twice."""
    lowered, _ = staged(lambda x: x @ x.T, jnp.ones((4, 4))).lower()

    assert lowered.compile(compiler_options=program._UNTUNED)(jnp.ones((4, 4)))[0, 0] == 4
