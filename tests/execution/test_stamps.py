"""Labels that the executor writes into programs, by `EJKERNEL_OPS_STAMP` and `stamp=`."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Asked, OwnCubic, Picking, Times, close, executor_with, key_for
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import Executor, find_labels_in_lowered

pytestmark = pytest.mark.usefixtures("own_text")

X = jnp.arange(1.0, 5.0)


def lowered_and_compiled(function, *args):
    """Both forms of a program."""
    lowered = jax.jit(function).lower(*args)
    return lowered, lowered.compile()


def labels(function, *args):
    """The labels in both forms of a program, which must agree."""
    lowered, compiled = lowered_and_compiled(function, *args)
    found = find_labels_in_lowered(lowered)
    assert find_labels_in_lowered(compiled) == found
    return found


def test_the_default_label_is_the_hash(monkeypatch):
    """`prefix#op:vN:call_key`, in lowered and compiled text."""
    kernel = Times.fresh(version="3")()
    executor = executor_with()
    expected = f"ejkernel_ops#times:v3:{key_for(kernel, X)[2]}"
    assert labels(lambda x: executor(kernel, x), X) == [expected]
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "hash")
    assert labels(lambda x: executor_with()(kernel, x), X) == [expected]


def test_the_label_has_the_executor_s_prefix():
    """`stamp_prefix` is what stands before the `#`."""
    kernel = Times.fresh()()
    executor = Executor(Asked(2), stamp_prefix="mine")
    [label] = labels(lambda x: executor(kernel, x), X)
    assert label.startswith("mine#times:v0:")
    assert find_labels_in_lowered(jax.jit(lambda x: executor(kernel, x)).lower(X), "ejkernel_ops") == []


def test_json_labels(monkeypatch):
    """A JSON object with the operation, its version, the call key and the cfg."""
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "json")
    kernel, executor = Times.fresh(version="a/b@c")(), executor_with()
    [label] = labels(lambda x: executor(kernel, x), X)
    prefix, _, text = label.partition("#")
    payload = json.loads(text)
    assert prefix == "ejkernel_ops"
    assert (payload["op"], payload["version"], payload["call_key"]) == ("times", "a/b@c", key_for(kernel, X)[2])


def test_no_labels(monkeypatch):
    """`none` writes nothing."""
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "none")
    executor, kernel = executor_with(), Times.fresh()()
    assert labels(lambda x: executor(kernel, x), X) == []


@pytest.mark.parametrize("style", ["hash", "json"])
def test_stamp_false_writes_nothing(style, monkeypatch):
    """For one call, whatever the variable says; the call's key does not change."""
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", style)
    tuner, kernel = Picking(), Times.fresh()()
    executor = executor_with(tuner)
    assert labels(lambda x: executor(kernel, x, stamp=False), X) == []
    assert len(labels(lambda x: executor(kernel, x, stamp=True), X)) == 1
    assert tuner.calls == 1


@pytest.mark.parametrize("value", ["hush", "1", "yes"])
def test_an_unknown_style_is_an_error(value, monkeypatch):
    """It names the variable, the value and the choices."""
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", value)
    with pytest.raises(ValueError, match=rf"(?s)EJKERNEL_OPS_STAMP.*{value}.*hash.*json.*none"):
        Executor(Asked())(Times.fresh()(), X)


@pytest.mark.parametrize("style", ["hash", "json", "none"])
def test_labels_change_no_result(style, monkeypatch):
    """Values and gradients are the same under every style."""
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", style)
    executor, kernel = executor_with(), OwnCubic.fresh()()
    close(executor(kernel, X), X * X * X * 0.5 + X)
    close(jax.grad(lambda x: executor(kernel, x).sum())(X), 1.5 * X * X + 1)


AROUND = {
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, row: (c, f(row)), 0.0, x[None])[1],
    "checkpoint": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    "jit": jax.jit,
}


@pytest.mark.parametrize("style", ["hash", "json"])
@pytest.mark.parametrize("around", AROUND)
def test_labels_are_found_under_transformations(around, style, monkeypatch):
    """JAX wraps names of its own around them; the label is found whole, forward and backward."""
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", style)
    executor, kernel = executor_with(Picking()), OwnCubic.fresh()()
    [label] = labels(AROUND[around](lambda x: executor(kernel, x)), X)
    [(_, _, call_key)] = executor.chooser.cache.keys()
    assert call_key in label


def test_the_label_s_key_is_the_cache_s_key_for_sharded_arrays():
    """What was tuned for arrays on several devices is found by its label."""
    executor, kernel = executor_with(Picking()), Times.fresh()()
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(X, NamedSharding(mesh, P("i")))
    executor(kernel, x)
    [(_, _, call_key)] = executor.chooser.cache.keys()
    [label] = labels(lambda y: executor(kernel, y), x)
    assert label.endswith(call_key)


def test_two_calls_have_two_labels():
    """Each call of a program is labelled by its own key; equal calls share one."""
    executor, kernel = executor_with(), Times.fresh()()
    found = labels(lambda x: (executor(kernel, x), executor(kernel, x[:2]), executor(kernel, x + 1)), X)
    assert len(found) == 2


def test_a_key_builder_s_string_is_in_the_label():
    """As it returned it."""
    kernel = Times.fresh(key_builder=lambda inv: "rows-4")()
    executor = executor_with()
    assert labels(lambda x: executor(kernel, x), X) == ["ejkernel_ops#times:v0:rows-4"]


def test_a_compiled_function_is_labelled():
    """`executor.compile` writes the label too."""
    kernel = Times.fresh()()
    compiled = executor_with().compile(kernel, X)
    assert find_labels_in_lowered(compiled.lower(X)) == [f"ejkernel_ops#times:v0:{key_for(kernel, X)[2]}"]
    np.testing.assert_array_equal(compiled(X), X * 2)


def test_the_label_is_in_a_profile(tmp_path):
    """A trace of the running program names the call."""
    kernel, executor = Times.fresh()(), executor_with()
    program = jax.jit(lambda x: executor(kernel, x))
    program(X)
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(program(X))

    expected = f"ejkernel_ops#times:v{kernel.version}:{key_for(kernel, X)[2]}".encode()
    assert any(expected in path.read_bytes() for path in tmp_path.rglob("*.xplane.pb"))
