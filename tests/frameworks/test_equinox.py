"""Training steps of `equinox`: modules are pytrees with functions and strings among their leaves."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from fakes_execution import Picking, executor_with
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
    layer,
)

from ejkernel.ops import autotune

eqx = pytest.importorskip("equinox", reason=NEEDS)
optax = pytest.importorskip("optax", reason=NEEDS)


def network(executor):
    """A module with weights, a function that is a leaf, and a static name."""

    class Net(eqx.Module):
        w: jax.Array
        scale: jax.Array
        activation: Callable
        name: str = eqx.field(static=True)

        def __call__(self, x):
            return self.activation(layer(executor, x, self.scale, self.w))

        @eqx.filter_jit
        def jitted(self, x):
            return self(x)

    return Net(jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)), jnp.ones(WIDTH), jnp.tanh, "net")


def training(executor, **options):
    """A step that returns the new module, its function among the outputs."""
    optimizer = optax.adam(0.01)

    @eqx.filter_jit(**options)
    def step(data, net, state):
        x, y = data
        loss, gradients = eqx.filter_value_and_grad(lambda net: jnp.mean((net(x) - y) ** 2))(net)
        updates, state = optimizer.update(gradients, state, eqx.filter(net, eqx.is_inexact_array))
        return loss, eqx.apply_updates(net, updates), state

    def arguments():
        net = network(executor)
        return batch(), net, optimizer.init(eqx.filter(net, eqx.is_inexact_array))

    return Case(step, arguments, executor)


STEPS = {"filter_jit": training, "donated": lambda executor: training(executor, donate="all-except-first")}


def test_autotune_finds_the_calls_of_a_step():
    """A quick one of the tests below, for every run of the suite."""
    check_autotune(training)


@pytest.mark.engines
@pytest.mark.parametrize("step", STEPS)
def test_autotune_leaves_the_modules_as_they_were(step):
    """Donated ones, too."""
    check_autotune(STEPS[step])


@pytest.mark.engines
@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_run_before_and_after(step, monkeypatch):
    """What it donates is there afterwards."""
    check_confirmed(STEPS[step], monkeypatch)


@pytest.mark.engines
@pytest.mark.parametrize("call", ["module", "jitted module", "jitted method", "shapes"])
def test_what_is_called_may_be_bound_to_its_module(call):
    """A module is a function, and may be one of shapes alone."""
    tuner = Picking()
    net = network(executor_with(tuner))
    shapes = eqx.filter_eval_shape(lambda: network(executor_with(tuner)))
    fn = {"module": net, "jitted module": eqx.filter_jit(net), "jitted method": net.jitted, "shapes": shapes}[call]

    result = autotune(fn, batch()[0], tuning=QUIET)

    assert len(result.entries) == tuner.calls == 2
    net.jitted(batch()[0])
    assert call == "shapes" or tuner.calls == 2


@pytest.mark.engines
@pytest.mark.parametrize("step", STEPS)
def test_a_lock_answers_a_step(step, tmp_path):
    """Also one that was compiled before."""
    check_frozen(STEPS[step], tmp_path / "step.lock.json")


@pytest.mark.engines
@pytest.mark.parametrize("step", STEPS)
def test_a_recorded_step_is_tuned_from_its_file(step, tmp_path, monkeypatch):
    """Nothing of equinox is in the file."""
    path = tmp_path / "calls.json"
    check_recorded(STEPS[step], path, monkeypatch)
    assert "equinox" not in path.read_text()
