"""Training steps with what JAX itself offers: checkpoint policies, donated arguments, shard_map, static arguments."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from fakes_execution import Picking, executor_with, mesh_of
from framework_checks import (
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
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from thinning import AT_LENGTH

from ejkernel.ops import AutotuneOptions, autotune, policy_override

POLICIES = jax.checkpoint_policies


def weights():
    return {"w": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)), "scale": jnp.ones(WIDTH)}


def checkpointed(executor, policy):
    """Two layers in a scan, whose values the policy keeps or computes again."""

    @jax.jit
    def step(params, x, y):
        @functools.partial(jax.checkpoint, policy=policy)
        def one(h, _):
            return checkpoint_name(jnp.tanh(layer(executor, h, params["scale"], params["w"])), "hidden"), None

        def loss(p):
            nonlocal params
            params = p
            return jnp.mean((jax.lax.scan(one, x, None, length=2)[0] - y) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    return Case(step, lambda: (weights(), *batch()), executor)


def plain(executor, **options):
    """One layer and gradient descent."""

    @functools.partial(jax.jit, **options)
    def step(params, x, y, rate=0.1):
        def loss(params):
            return jnp.mean((jnp.tanh(layer(executor, x, params["scale"], params["w"])) - y) ** 2)

        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params))

    return step


def donating(executor):
    return Case(plain(executor, donate_argnums=0), lambda: (weights(), *batch()), executor)


def with_static_arguments(executor):
    return Case(plain(executor, static_argnums=3), lambda: (weights(), *batch(), 0.2), executor)


def bound(executor):
    """Its batch is bound beforehand, its weights are donated."""
    x, y = batch()
    return Case(functools.partial(plain(executor, donate_argnums=0), x=x, y=y), lambda: (weights(),), executor)


def sharded(executor):
    """Data parallel over four devices: each has some rows, and gradients are averaged."""
    mesh = mesh_of(4)

    @jax.jit(donate_argnums=0)
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("i"), P("i")), out_specs=P())
    def step(params, x, y):
        def loss(params):
            mine = jnp.mean((jnp.tanh(layer(executor, x, params["scale"], params["w"])) - y) ** 2)
            return jax.lax.pmean(mine, "i")

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    def arguments():
        everywhere, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("i"))
        return jax.device_put(weights(), everywhere), *jax.device_put(batch(16), by_rows)

    return Case(step, arguments, executor)


STEPS = {
    "nothing saved": lambda executor: checkpointed(executor, POLICIES.nothing_saveable),
    "dots saved": lambda executor: checkpointed(executor, POLICIES.dots_saveable),
    "names saved": lambda executor: checkpointed(executor, POLICIES.save_only_these_names("hidden")),
    "donated": donating,
    "static": with_static_arguments,
    "bound": bound,
    "shard_map": sharded,
}
# One of each kind: the others differ in how their calls are found.
FEW = ["names saved", "donated", "shard_map"]


# Of the three policies, one by default: what is kept is up to JAX.
@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=AT_LENGTH if step in ("nothing saved", "dots saved") else ()) for step in STEPS]
)
def test_autotune_leaves_the_arguments_as_they_were(step):
    """Donated ones, too."""
    check_autotune(STEPS[step])


@pytest.mark.parametrize("step", FEW)
def test_a_step_is_run_before_and_after(step, monkeypatch):
    """Donated arguments are there afterwards."""
    check_confirmed(STEPS[step], monkeypatch)


@pytest.mark.parametrize("step", FEW)
def test_a_lock_answers_a_step(step, tmp_path):
    """Also one that was compiled before."""
    check_frozen(STEPS[step], tmp_path / "step.lock.json")


@pytest.mark.parametrize("step", FEW)
def test_a_recorded_step_is_tuned_from_its_file(step, tmp_path, monkeypatch):
    """Its mesh is in the file where it has one."""
    check_recorded(STEPS[step], tmp_path / "calls.json", monkeypatch)


def test_arguments_that_were_donated_before_are_not_run():
    """Their shapes are enough to tune; the confirmation says why the step was not run."""
    case = donating(executor_with(Picking()))
    args = case.arguments()
    with policy_override(case.executor.chooser, allow_autotune=False):
        case.fn(*args)

    result = autotune(case.fn, *args, tuning=AutotuneOptions(progress=False, confirm=True))

    assert [entry.is_measured for entry in result.entries] == [True, True]
    assert result.confirmation.rounds == 0
    assert "an argument was donated" in result.confirmation.note


def test_a_step_of_shapes_is_tuned():
    """A program can be tuned before there are weights."""
    tuner = Picking()
    case = donating(executor_with(tuner))
    shapes = jax.eval_shape(case.arguments)
    assert len(autotune(case.fn, *shapes, tuning=QUIET).entries) == tuner.calls == 2
