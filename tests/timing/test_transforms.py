"""Transformations around a call while it is measured: the batch of a vmap, the mesh of a shard_map."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import OwnCubic, Picking, Times, close, executor_with
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Tuner
from ejkernel.ops.timing import transforms

CPU = "cpu"


# The batch of a vmap.


def test_a_function_without_a_batch_stays_itself():
    """Nothing is wrapped around it."""
    assert transforms.in_batch(jnp.sin, None) is jnp.sin


def test_a_function_runs_over_the_whole_batch():
    """It is written for one example, and takes the arrays of all; an argument without an axis is every example's."""
    batch = [(5, (1, None))]
    args = (jnp.arange(15.0).reshape(3, 5), jnp.ones(3))
    made = transforms.in_batch(lambda x, bias: x + bias, batch)(*args)
    np.testing.assert_array_equal(made, args[0].T + 1)


def test_the_arguments_of_a_batch_are_known_by_their_shapes():
    """The batch's axis is where the vmap has it."""
    example = jax.ShapeDtypeStruct((3,), jnp.float32)
    args, kwargs = transforms.whole_batch((example,), {"bias": example}, [(5, (1, None))])
    assert (args[0].shape, kwargs["bias"].shape) == ((3, 5), (3,))


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_the_whole_batch_is_measured(around):
    """The tuner gets arrays of the batched shape, and is asked once for eager and jitted calls together."""
    tuner = Picking()
    executor, kernel = executor_with(tuner), Times.fresh()()
    call = around(jax.vmap(jax.vmap(lambda x: executor(kernel, x), in_axes=1)))
    x = jnp.arange(2.0 * 3 * 5).reshape(2, 3, 5)
    close(call(x), jnp.swapaxes(x, 1, 2) * 5)
    jax.jit(call)(x)
    assert tuner.shapes == [[(2, 3, 5)]]


def test_a_real_tuning_of_a_batch():
    """Candidates of a batched call run over the whole batch and agree."""
    events = []
    selector = ConfigSelectorChain(
        ConfigCache(), tuner=Tuner(0, 1), on_event=lambda event, **data: events.append((event, data))
    )
    executor, kernel = Executor(selector), OwnCubic.fresh()()
    x = jnp.ones((4, 3))
    close(jax.vmap(lambda y: executor(kernel, y))(x), x * 1.5)
    [finished] = [data for event, data in events if event == "autotune_finish"]
    assert all(trial.status == "ok" for trial in finished["record"].trials)


# The mesh of a shard_map.


def in_shard_map(fn, count=2):
    """What a function returns to a test while the program of a shard is traced."""
    seen = []
    mesh = jax.make_mesh((count,), ("i",), axis_types=(AxisType.Auto,))
    jax.shard_map(lambda x: seen.append(fn()) or x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(jnp.ones(4))
    return seen[0]


def test_only_a_shard_map_has_manual_axes():
    """By their sizes; outside there are none, and no mesh to run in."""
    assert in_shard_map(transforms.manual_axes) == {"i": 2}
    assert transforms.manual_axes() == {}
    assert transforms.local_mesh(CPU) is None


def test_a_mesh_lies_on_this_process_s_devices():
    """With fewer devices than shards there is none."""
    assert in_shard_map(lambda: transforms.local_mesh(CPU)).shape == {"i": 2}
    assert transforms.on_local_devices({"i": len(jax.local_devices()) + 1}, CPU) is None


def test_every_shard_runs_the_function_on_arrays_of_local_shapes():
    """A collective finds its axis, and the result is one shard's."""
    mesh = transforms.on_local_devices({"i": 2}, CPU)
    made = transforms.per_shard(lambda x: jax.lax.psum(x, "i"), mesh)(jnp.arange(3.0))
    np.testing.assert_array_equal(made, [0.0, 2.0, 4.0])
    assert transforms.per_shard(jnp.sin, None) is jnp.sin


def call_of(*args, **more):
    """As much of an invocation as its placing asks for."""
    return SimpleNamespace(**{"args": args, "kwargs": {}, "method": None, "mesh": None, "in_specs": None, **more})


@pytest.mark.parametrize(
    ("in_specs", "specs"),
    [(P("i"), [P("i"), P("i")]), ((P("i"), P()), [P("i"), P()])],
    ids=["one for all", "one for each"],
)
def test_arrays_are_placed_as_the_specs_of_a_sharded_call_say(in_specs, specs):
    """No run pays for moving them."""
    mesh = transforms.on_local_devices({"i": 2}, CPU)
    call = call_of(jnp.ones(4), jnp.ones(2), method="shard_map", mesh=mesh, in_specs=in_specs)
    placed = transforms.placing(call, None, None)(call.args)
    assert [x.sharding for x in placed] == [NamedSharding(mesh, spec) for spec in specs]


def test_arrays_of_a_local_mesh_are_whole_on_every_device():
    """Each shard has its own copy."""
    mesh = transforms.on_local_devices({"i": 2}, CPU)
    (placed,) = transforms.placing(call_of(jnp.ones(4)), mesh, None)([jnp.ones(4)])
    assert placed.sharding == NamedSharding(mesh, P())


def test_an_explicit_mesh_is_read_off_the_types_of_arrays():
    """And its arrays are placed as their types say."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    shape = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, P("i")))
    assert transforms.explicit_mesh([shape]) is not None
    assert transforms.explicit_mesh([jax.ShapeDtypeStruct((4,), jnp.float32)]) is None
    (placed,) = transforms.placing(call_of(shape), None, mesh)([jnp.ones(4)])
    assert placed.sharding == NamedSharding(mesh, P("i"))


def test_arrays_of_a_plain_call_stay_where_they_are():
    """There is nothing to put them on."""
    x = jnp.ones(4)
    assert transforms.placing(call_of(x), None, None)([x])[0] is x
