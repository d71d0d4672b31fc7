"""Finding the kernel calls inside a function: by tracing alone, under every transformation; nothing is left behind.

Covers `programs/found_call.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Counting, Cubic, OwnCubic, Picking, Times, executor_with, mesh_of, selector_with
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import Executor, Tuner, autotune, forward_autotune_only, policy_override
from ejkernel.ops.programs.find import find

X = jnp.arange(1.0, 5.0)


def shapes(found):
    """The shapes of the calls that were found."""
    return sorted(call.inv.args[0].shape for call in found.calls)


def looped(call, x):
    return jax.lax.fori_loop(0, 3, lambda i, y: call(y), x)


def sharded(call, x):
    return jax.shard_map(call, mesh=mesh_of(2), in_specs=P("i"), out_specs=P("i"))(x)


PROGRAMS = {
    "plain": lambda call, x: call(x),
    "jit": lambda call, x: jax.jit(call)(x),
    "grad": lambda call, x: jax.grad(lambda y: call(y).sum())(x),
    "grad of jit": lambda call, x: jax.grad(jax.jit(lambda y: call(y).sum()))(x),
    "vmap": lambda call, x: jax.vmap(call)(x[None]),
    "grad of vmap": lambda call, x: jax.grad(lambda y: jax.vmap(call)(y[None]).sum())(x),
    "scan": lambda call, x: jax.lax.scan(lambda c, _: (call(c), None), x, None, length=3),
    "loop": looped,
    "while": lambda call, x: jax.lax.while_loop(lambda y: y.sum() < 99, call, x),
    "cond": lambda call, x: jax.lax.cond(x.sum() > 0, call, lambda y: y, x),
    "checkpoint": lambda call, x: jax.grad(lambda y: jax.checkpoint(call)(y).sum())(x),
    "shard_map": sharded,
    "pmap": lambda call, x: jax.pmap(call)(x.reshape(2, 2)),
    "nested": lambda call, x: jax.vmap(lambda y: jax.lax.scan(lambda c, _: (jax.jit(call)(c), None), y, None, 2))(
        x[None]
    ),
    "grad of shard_map": lambda call, x: jax.grad(lambda y: sharded(call, y).sum())(x),
}


@pytest.mark.thinned
@pytest.mark.parametrize("kind", [Times, OwnCubic])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_call_is_found_under_a_transformation_with_the_key_that_it_has_when_it_runs(program, kind):
    """What is tuned beforehand is what the program asks for: running it afterwards tunes nothing."""
    tuner = Picking()
    executor, kernel = executor_with(tuner), kind.fresh()()

    def fn(x):
        return PROGRAMS[program](lambda y: executor(kernel, y), x)

    result = autotune(fn, X)
    assert len(result.entries) == tuner.calls == 1
    assert executor.chooser.cache.size() == 1
    jax.block_until_ready(jax.jit(fn)(X))
    assert tuner.calls == 1
    assert kernel.log[-1] == 5


@pytest.mark.parametrize("around", ["precision", "explicit"])
def test_what_is_around_a_call_is_part_of_it(around):
    """A matmul precision and an explicit mesh are put back when the call is tuned."""
    tuner = Picking()
    executor, kernel = executor_with(tuner), Times.fresh()()
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(X, NamedSharding(mesh, P("i"))) if around == "explicit" else X

    def fn(x):
        if around == "precision":
            with jax.default_matmul_precision("highest"):
                return executor(kernel, x)
        return executor(kernel, x)

    autotune(fn, x)
    jax.block_until_ready(jax.jit(fn)(x))
    assert tuner.calls == 1


@pytest.mark.parametrize("asked", ["forward", "forward+backward"])
def test_the_policy_around_a_call_is_put_back(asked):
    """A call is tuned for what the blocks around it ask."""
    executor, kernel = executor_with(Picking()), Cubic.fresh()()

    def fn(x):
        with policy_override(executor.chooser, validate_backward=True):
            if asked == "forward+backward":
                return executor(kernel, x)
            with forward_autotune_only():
                return executor(kernel, x)

    (entry,) = autotune(fn, X).entries
    assert entry.record.objective == asked


def test_a_kernel_that_talks_to_other_shards_is_measured_among_them():
    """The axes of the shard_map are there when its candidates run."""

    class Summing(Counting.fresh()):
        op_id = "summing"

        def run(self, x, *, cfg):
            return jax.lax.psum(x * 1.0, "i") + 0.0 * cfg

    selector = selector_with(Tuner(iters=1))
    (entry,) = autotune(lambda x: sharded(lambda y: Executor(selector)(Summing(), y), x), X).entries
    assert [trial.status for trial in entry.record.trials] == ["ok", "ok", "ok"]


def test_nothing_runs_while_calls_are_looked_for():
    """The program is traced: what it would do to the world does not happen."""
    ran = []

    class Loud(Times.fresh()):
        op_id = "loud"

        def run(self, x, *, cfg):
            return x + jax.pure_callback(lambda: ran.append(cfg) or np.float32(0), jax.ShapeDtypeStruct((), np.float32))

    executor = executor_with(Picking())
    found = find(lambda x: executor(Loud(), executor(Loud(), X) + x), (X,), {})
    assert len(found.calls) == 1
    assert ran == []


def test_a_function_that_was_traced_before_is_looked_through_all_the_same():
    """JAX has its program already; the calls are found anyway, each time."""
    executor, kernel = executor_with(), Times.fresh()()
    step = jax.jit(lambda x: executor(kernel, x))
    step(X)
    assert shapes(find(step, (X,), {})) == [(4,)]
    assert shapes(find(step, (X,), {})) == [(4,)]
    assert shapes(find(lambda x: step(x), (X,), {})) == [(4,)]


def test_looking_leaves_no_program_behind():
    """A function that is first called after it was looked through chooses then, and not before."""
    executor, kernel = executor_with(Picking()), Times.fresh()()
    step = jax.jit(lambda x: executor(kernel, x))
    find(step, (X,), {})
    np.testing.assert_array_equal(step(X), X * 5)
    np.testing.assert_array_equal(executor(kernel, X), X * 5)


def test_a_program_that_was_compiled_before_stays_as_it_is():
    """Looking makes no function outside trace again."""
    executor, kernel = executor_with(), Times.fresh()()
    step = jax.jit(lambda x: executor(kernel, x))
    step(X)
    find(step, (X,), {})
    seen = len(kernel.log)
    step(X)
    assert len(kernel.log) == seen


def test_equal_calls_are_one_and_are_counted():
    """Runs add up: over the steps of a scan, over functions that are called twice, over loops in Python."""
    executor, kernel = executor_with(), Times.fresh()()

    @jax.jit
    def inner(x):
        return executor(kernel, x)

    def fn(x):
        for _ in range(2):
            x = executor(kernel, x)
        x, _ = jax.lax.scan(lambda c, _: (executor(kernel, c), None), x, None, length=7)
        return inner(inner(x))

    (call,) = find(fn, (X,), {}).calls
    assert call.count == 2 + 7 + 2


def test_the_backward_pass_is_not_a_second_run():
    """A call and its gradient count once, in a scan and outside."""
    executor, kernel = executor_with(), Times.fresh()()

    def fn(x):
        y, _ = jax.lax.scan(lambda c, _: (executor(kernel, c), None), x, None, length=3)
        return executor(kernel, y).sum()

    (call,) = find(jax.grad(fn), (X,), {}).calls
    assert call.count == 4


def test_static_arguments_stay_static():
    """Of a plain function everything that is no array is constant; a jitted one knows by itself."""
    executor, kernel = executor_with(), Times.fresh()()

    def fn(x, *, times, name):
        assert name == "a"
        for _ in range(times):
            x = executor(kernel, x)
        return x

    for program in (fn, jax.jit(fn, static_argnames=("times", "name"))):
        (call,) = find(program, (X,), {"times": 3, "name": "a"}).calls
        assert call.count == 3


def test_shapes_will_do_for_arrays():
    """A program too large for this machine can be looked through."""
    executor, kernel = executor_with(), Times.fresh()()
    big = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
    assert shapes(find(lambda x: executor(kernel, x), (big,), {})) == [(1 << 20, 1 << 20)]


def test_arrays_with_values_keep_them():
    """A constant index array inside the program can be measured with, a traced one cannot."""
    tuner = Picking()
    executor = executor_with(tuner)

    class Gather(Counting.fresh()):
        op_id = "gather"

        def run(self, x, i, *, cfg):
            return x[i]

    i = jnp.array([2, 1])
    autotune(lambda x: x[:2] + executor(Gather(), X, i), X)
    assert tuner.integers == [[[2, 1]]]
    (entry,) = autotune(lambda x, i: executor(Gather(), x, i[None]), X, i).entries
    assert tuner.calls == 1
    assert "integer arrays" in entry.note


def test_a_function_that_looks_at_values_is_named():
    """What cannot be traced cannot be looked through; the error says what to give instead."""
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        find(lambda x: float(x.sum()), (X,), {})
    assert any("the part that you jit" in note for note in caught.value.__notes__)
