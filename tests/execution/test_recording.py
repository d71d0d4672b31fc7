"""Recording: the executor notes shapes, once per trace, where `EJKERNEL_OPS_RECORD` asks for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Counting, OwnCubic, Picking, Times, executor_with, mesh_of
from jax.sharding import PartitionSpec as P

import ejkernel.ops.registry
from ejkernel.ops import Invocation, autotune_recorded, device_fingerprint, get_invocations

X = jnp.arange(1.0, 5.0)


@pytest.fixture
def recording(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")


@pytest.fixture
def counted(monkeypatch):
    """How often something was recorded."""
    calls = []
    original = ejkernel.ops.registry.record_invocation

    def record(*args):
        calls.append(args[:3])
        return original(*args)

    monkeypatch.setattr(ejkernel.ops.registry, "record_invocation", record)
    return calls


def recorded():
    """Everything that was recorded for the default device."""
    return get_invocations(device_fingerprint())


@pytest.mark.parametrize("value", [None, "", "0", "off"])
def test_nothing_is_recorded_unless_asked(value, monkeypatch):
    """Without the variable, or with it off, the registry stays empty."""
    if value is not None:
        monkeypatch.setenv("EJKERNEL_OPS_RECORD", value)
    executor_with()(Times.fresh()(), X)
    assert recorded() == {}


def test_a_call_is_recorded_by_its_key(recording):
    """Device, versioned operation and call key, with kernel, arguments and keywords."""
    kernel = Times.fresh(version="4")()
    executor = executor_with(Picking())
    executor(kernel, X)
    [(device, op_id, call_key)] = executor.chooser.cache.keys()
    assert device == device_fingerprint()
    found, args, kwargs = recorded()[op_id][call_key]
    assert op_id == "times@v4"
    assert type(found) is type(kernel)
    assert kwargs == {}
    assert [(a.shape, a.dtype) for a in args] == [((4,), jnp.float32)]


CALLERS = {
    "eager": lambda call, x: call(x),
    "jitted": lambda call, x: jax.jit(call)(x),
    "lowered": lambda call, x: jax.jit(call).lower(x),
    "gradient": lambda call, x: jax.grad(lambda y: call(y).sum())(x),
    "eval_shape": lambda call, x: jax.eval_shape(call, x),
    "numpy": lambda call, x: call(np.asarray(x)),
    "unjitted": lambda call, x: _without_jit(call, x),
}


def _without_jit(call, x):
    with jax.disable_jit():
        return call(x)


@pytest.mark.parametrize("caller", CALLERS)
def test_shapes_are_recorded_and_never_arrays(caller, recording):
    """What is kept has no values, however the call was made."""
    executor, kernel = executor_with(), OwnCubic.fresh()()
    CALLERS[caller](lambda x: executor(kernel, x), X)
    [[(_, args, kwargs)]] = [list(calls.values()) for calls in recorded().values()]
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    assert leaves
    assert all(type(leaf) is jax.ShapeDtypeStruct for leaf in leaves)


def test_trees_and_static_values_are_recorded_as_they_are(recording):
    """Only arrays are replaced."""

    class Tree(Counting):
        op_id = "tree"

        def run(self, params, n, *, name, cfg):
            return params["w"][0] * n

    executor_with()(Tree(), {"w": [X]}, 3, name="a")
    [(_, args, kwargs)] = recorded()["tree@v0"].values()
    assert args[0]["w"][0] == jax.ShapeDtypeStruct((4,), jnp.float32)
    assert args[1] == 3
    assert kwargs == {"name": "a"}


def test_a_call_is_recorded_once_per_trace(recording, counted):
    """Warm calls record nothing."""
    executor, kernel = executor_with(), Times.fresh()()
    for _ in range(5):
        executor(kernel, X)
    assert len(counted) == 1
    step = jax.jit(lambda x: executor(kernel, x))
    for _ in range(5):
        step(X)
    assert len(counted) == 2


def test_what_is_recorded_has_its_key_again(recording):
    """An invocation made of the recorded shapes has the recorded call key."""
    executor_with()(Times.fresh()(), X)
    [(call_key, (kernel, args, kwargs))] = recorded()["times@v0"].items()
    assert Invocation(kernel.op_id, args, kwargs).call_key == call_key


def test_the_prepared_call_is_recorded(recording):
    """As the kernel's `run` sees it."""

    class Flat(Times.fresh()):
        op_id = "flat"

        def prepare(self, x):
            return (x.ravel(),), {}

    executor_with()(Flat(), jnp.ones((2, 3)))
    [(_, args, _)] = recorded()["flat@v0"].values()
    assert args[0].shape == (6,)


def test_recorded_calls_can_be_tuned(recording):
    """Plain, batched and sharded calls are tuned offline under their own keys, and eager calls then use the winners."""
    tuner = Picking()
    executor = executor_with(tuner, policy=None)
    executor.chooser.policy = type(executor.chooser.policy)(allow_autotune=False)
    kernel = Times.fresh()()
    sharded = {"method": "shard_map", "mesh": mesh_of(2), "in_specs": (P("i"),), "out_specs": P("i")}
    calls = [
        lambda: executor(kernel, X),
        lambda: jax.vmap(lambda x: executor(kernel, x))(X[None]),
        lambda: executor(kernel, X, **sharded),
    ]
    for call in calls:
        np.testing.assert_array_equal(np.ravel(call()), X * 2)
    result = autotune_recorded(executor.chooser)
    assert len(result.entries) == 3
    for call in calls:
        np.testing.assert_array_equal(np.ravel(call()), X * 5)


def test_the_variable_is_read_when_the_executor_is_made(monkeypatch):
    """An executor made before does not begin to record."""
    before = executor_with()
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    before(Times.fresh(op_id="before")(), X)
    executor_with()(Times.fresh(op_id="after")(), X)
    assert list(recorded()) == ["after@v0"]
