"""Training steps of `flax.nnx`: modules are arguments, and the step changes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Asked, Counting, Picking, close, executor_with
from framework_checks import (
    NEEDS,
    QUIET,
    WIDTH,
    Case,
    batch,
    check_autotune,
    check_confirmed,
    check_frozen,
    check_recorded,
    confirmed,
    layer,
    numbers,
)

from ejkernel.ops import AutotuneOptions, Executor, autotune
from ejkernel.ops.programs.user_function import flatten_program, of_arrays

nnx = pytest.importorskip("flax.nnx", reason=NEEDS)
optax = pytest.importorskip("optax", reason=NEEDS)


def network(executor, **options):
    """A module with parameters, a counter, a random stream and an attribute that is no array."""

    class Net(nnx.Module, **options):
        def __init__(self, rngs):
            self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
            self.scale = nnx.Param(jnp.ones(WIDTH))
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.activation = jnp.tanh

        def __call__(self, x):
            self.calls[...] += 1
            return self.activation(self.dropout(layer(executor, x, self.scale[...], self.w[...])))

    return Net(nnx.Rngs(0))


def training(executor, module=None, **options):
    """A step that returns the loss alone: the module and the optimizer are changed in place."""

    @nnx.jit(**options)
    def step(net, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(lambda net: jnp.mean((net(x) - y) ** 2))(net)
        optimizer.update(net, gradients)
        return loss

    def arguments():
        net = network(executor, **(module or {}))
        return net, nnx.Optimizer(net, optax.adam(0.01), wrt=nnx.Param), *batch()

    return Case(step, arguments, executor, lambda args: jax.tree_util.tree_leaves(nnx.split(args)))


STEPS = {
    "jit": training,
    "donated": lambda executor: training(executor, donate_argnums=(0, 1)),
    "without graph updates": lambda executor: training(executor, graph_updates=False),
    "trees": lambda executor: training(executor, graph=False),
    "no pytree": lambda executor: training(executor, {"pytree": False}),
}
TREES = [name for name in STEPS if name != "no pytree"]


def test_autotune_finds_the_calls_of_a_step():
    """A quick one of the tests below, for every run of the suite."""
    check_autotune(training)


class Merged(Counting):
    """A module that comes in two parts, its graph and its arrays, applied to the argument."""

    op_id = "frameworks.merged"

    def run(self, graph, state, x, *, cfg):
        self.log.append(cfg)
        return nnx.merge(graph, state)(x)


class Scaled(nnx.Module):
    """A layer and a number that is part of the graph."""

    def __init__(self, factor):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.factor = factor

    def __call__(self, x):
        return self.layer(x) * self.factor


def test_a_graph_is_a_static_argument():
    """Equal graphs share a program and a key, another one has its own; eagerly and under jit."""
    asked, kernel, x = Asked(1), Merged.fresh()(), jnp.ones((2, WIDTH))
    executor = Executor(asked)
    for factor in (1.0, 1.0, 2.0, 1.0):
        graph, state = nnx.split(Scaled(factor))
        close(executor(kernel, graph, state, x), Scaled(factor)(x))
        close(jax.jit(executor, static_argnums=(0, 1))(kernel, graph, state, x), Scaled(factor)(x))
    assert len({question.call_key for question in asked.questions}) == 2


@pytest.mark.engines
@pytest.mark.parametrize("step", STEPS)
def test_autotune_leaves_the_modules_as_they_were(step):
    """Whatever way the step hands its modules to JAX."""
    check_autotune(STEPS[step])


@pytest.mark.engines
@pytest.mark.parametrize("step", TREES)
def test_a_step_is_run_before_and_after(step, monkeypatch):
    """The caller's modules have the same values afterwards."""
    check_confirmed(STEPS[step], monkeypatch)


@pytest.mark.engines
def test_a_module_that_is_no_pytree_is_not_run_and_not_harmed(monkeypatch):
    """Its arrays cannot be seen from outside; the confirmation says so, and the module still trains."""
    assert "holds arrays and is no pytree" in confirmed(STEPS["no pytree"], monkeypatch).note


@pytest.mark.engines
def test_a_module_that_contains_itself_is_tuned_and_not_run():
    """`nnx.jit` takes such a graph apart, and JAX cannot."""
    tuner = Picking()
    net = network(executor_with(tuner))
    net.children = nnx.Dict(parent=net)

    result = autotune(
        nnx.jit(lambda net, x: net(x)), net, batch()[0], tuning=AutotuneOptions(progress=False, confirm=True)
    )

    assert len(result.entries) == tuner.calls == 2
    assert "a Net among the arguments contains itself" in result.confirmation.note


@pytest.mark.engines
def test_what_is_run_before_and_after_has_the_update():
    """The new weights are outputs of that program: a compiler would else drop the backward pass."""
    case = training(executor_with(Picking()))
    args = case.arguments()
    call = flatten_program(case.fn, args, {})
    outputs = [numbers(leaf) for leaf in jax.jit(of_arrays(call))(*call.leaves)]
    old = np.asarray(args[0].w[...])

    case.fn(*args)

    new = np.asarray(args[0].w[...])
    assert not np.array_equal(new, old)
    assert any(out.shape == new.shape and np.allclose(out, new, rtol=1e-5, atol=1e-6) for out in outputs)


@pytest.mark.engines
@pytest.mark.parametrize("call", ["module", "method", "jitted method"])
def test_what_is_called_may_be_bound_to_its_module(call):
    """A module and its methods change the module, which is an argument then."""
    tuner = Picking()
    executor = executor_with(tuner)
    net = network(executor)
    type(net).jitted = nnx.jit(type(net).__call__)
    fn = {"module": net, "method": net.__call__, "jitted method": net.jitted}[call]

    result = autotune(fn, batch()[0], tuning=QUIET)

    assert len(result.entries) == tuner.calls == 2
    assert int(net.calls[...]) == 0
    fn(batch()[0])
    assert (tuner.calls, int(net.calls[...])) == (2, 1)


@pytest.mark.engines
@pytest.mark.parametrize("step", STEPS)
def test_a_lock_answers_a_step(step, tmp_path):
    """Also one that was compiled before."""
    check_frozen(STEPS[step], tmp_path / "step.lock.json")


@pytest.mark.engines
@pytest.mark.parametrize("step", STEPS)
def test_a_recorded_step_is_tuned_from_its_file(step, tmp_path, monkeypatch):
    """Nothing of flax is in the file."""
    path = tmp_path / "calls.json"
    check_recorded(STEPS[step], path, monkeypatch)
    assert "flax" not in path.read_text()
