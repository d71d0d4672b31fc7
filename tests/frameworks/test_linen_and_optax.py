"""Training steps of `flax.linen` models with `optax` updates: parameters outside, modules and states as arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import executor_with
from framework_checks import (
    NEEDS,
    WIDTH,
    Case,
    batch,
    check_autotune,
    check_confirmed,
    check_frozen,
    check_recorded,
    layer,
)

from ejkernel.library import attention, linear_cross_entropy, matmul, rms_norm
from ejkernel.ops import AutotuneOptions, ConfigCache, ConfigSelectorChain, Executor, Tuner, autotune, policy_override

linen = pytest.importorskip("flax.linen", reason=NEEDS)
train_state = pytest.importorskip("flax.training.train_state", reason=NEEDS)
optax = pytest.importorskip("optax", reason=NEEDS)


def network(executor):
    """A model with parameters of its own."""

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            scale = self.param("scale", linen.initializers.ones, (WIDTH,))
            w = self.param("w", linen.initializers.normal(), (WIDTH, WIDTH))
            return jnp.tanh(layer(executor, x, scale, w))

    return Net()


def initial():
    """Parameters; an executor of its own runs the kernels for them."""
    return network(executor_with()).init(jax.random.key(0), batch()[0])


def with_a_state(executor, optimizer=None, remat=False, **options):
    """A step over a `TrainState`, which holds the model's function and the optimizer beside its arrays."""
    net = linen.remat(type(network(executor)))() if remat else network(executor)
    tx = optimizer or optax.adam(0.01)

    @jax.jit(**options)
    def step(state, x, y):
        def loss(params):
            return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    def arguments():
        params = initial()["params"]
        return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=tx), *batch()

    return Case(step, arguments, executor)


def with_parts(executor):
    """A step that is not jitted itself, and is given the model and the optimizer."""
    net, optimizer = network(executor), optax.sgd(0.01, momentum=0.9)

    def step(net, optimizer, params, state, x, y):
        value, gradients = jax.value_and_grad(lambda params: jnp.mean((net.apply(params, x) - y) ** 2))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value, "done"

    def arguments():
        params = initial()
        return net, optimizer, params, optimizer.init(params), *batch()

    return Case(step, arguments, executor)


def chain():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.01, 100)))


STEPS = {
    "state": with_a_state,
    "donated state": lambda executor: with_a_state(executor, donate_argnums=0),
    "remat": lambda executor: with_a_state(executor, remat=True),
    "a chain with a schedule": lambda executor: with_a_state(executor, chain()),
    "accumulated": lambda executor: with_a_state(executor, optax.MultiSteps(optax.lion(0.01), 2)),
    "parts": with_parts,
}


def test_autotune_finds_the_calls_of_a_step():
    """A quick one of the tests below, for every run of the suite."""
    check_autotune(with_a_state)


@pytest.mark.engines
@pytest.mark.parametrize("step", STEPS)
def test_autotune_leaves_the_state_as_it_was(step):
    """Whatever holds the parameters."""
    check_autotune(STEPS[step])


@pytest.mark.engines
@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_run_before_and_after(step, monkeypatch):
    """A donated state is there afterwards."""
    check_confirmed(STEPS[step], monkeypatch)


@pytest.mark.engines
@pytest.mark.parametrize("step", STEPS)
def test_a_lock_answers_a_step(step, tmp_path):
    """Also one that was compiled before."""
    check_frozen(STEPS[step], tmp_path / "step.lock.json")


@pytest.mark.engines
@pytest.mark.parametrize("step", STEPS)
def test_a_recorded_step_is_tuned_from_its_file(step, tmp_path, monkeypatch):
    """Nothing of flax or optax is in the file."""
    path = tmp_path / "calls.json"
    check_recorded(STEPS[step], path, monkeypatch)
    assert "flax" not in path.read_text()


@pytest.mark.engines
def test_a_small_transformer_is_tuned_by_measuring_and_trains():
    """Every kernel that has a choice here is measured, and the tuned step lowers the loss."""
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(iters=1)))

    class Transformer(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            x = linen.Embed(32, WIDTH)(tokens[:, :-1])
            heads = (*x.shape[:2], 2, WIDTH // 2)
            y = rms_norm(x, self.param("scale", linen.initializers.ones, (WIDTH,)), executor=executor)
            q, k, v = (linen.Dense(WIDTH, use_bias=False)(y).reshape(heads) for _ in range(3))
            x = x + attention(q, k, v, causal=True, executor=executor).reshape(x.shape)
            x = x + matmul(x, self.param("up", linen.initializers.normal(), (WIDTH, WIDTH)), executor=executor)
            out = self.param("out", linen.initializers.normal(), (WIDTH, 32))
            return linear_cross_entropy(x, out, tokens[:, 1:], executor=executor)

    model, optimizer = Transformer(), optax.adam(0.01)
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 32)
    with policy_override(executor.chooser, allow_autotune=False):
        params = model.init(jax.random.key(0), tokens)
    state = optimizer.init(params)

    @jax.jit(donate_argnums=(0, 1))
    def step(params, state, tokens):
        value, gradients = jax.value_and_grad(model.apply)(params, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    result = autotune(step, params, state, tokens, tuning=AutotuneOptions(progress=False))

    assert {entry.op_id_v.partition("@")[0] for entry in result.entries} == {
        "library.rms_norm",
        "library.attention",
        "library.matmul",
        "library.linear_cross_entropy",
    }
    assert all(entry.is_measured or "one candidate" in entry.note for entry in result.entries), result.table()
    assert result.totals.calls >= 2
    losses = []
    for _ in range(5):
        params, state, value = step(params, state, tokens)
        losses.append(float(value))
    assert np.all(np.diff(losses) < 0)
