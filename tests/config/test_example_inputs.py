"""A kernel's own inputs serve its tunings however a call is found, and one by one under vmap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Counting, Picking, executor_with, mesh_of, selector_with
from fakes_programs import QUIET, X
from jax.sharding import PartitionSpec as P
from recorded_kernels import Careful

from ejkernel.library import linear_cross_entropy
from ejkernel.ops import AutotuneOptions, Executor, Tuner, autotune

I = jnp.zeros(3, jnp.int32)  # noqa: E741 - an index


class Numbered(Counting):
    """Gives integers that are the number of the example, from 10 on."""

    op_id = "numbered"

    def __init__(self):
        super().__init__()
        self.made = []

    def run(self, x, i, *rest, cfg):
        return x * i.sum() * cfg

    def example_inputs(self, inv, rng):
        number = 10 + len(self.made)
        self.made.append(number)
        return inv.args[0], *(np.full(a.shape, number, a.dtype) for a in inv.args[1:])


def given(transformed, *args):
    """The integer arrays that a tuner gets for a call under a transformation, and the kernel that gave them."""
    tuner, kernel = Picking(), Numbered()
    executor = executor_with(tuner)
    jax.eval_shape(jax.jit(lambda *a: transformed(lambda *b: executor(kernel, *b))(*a)), *args)
    assert tuner.calls == 1
    return [np.asarray(values) for values in tuner.integers[0]], kernel


def numbers(array, axis):
    """The examples along an axis of an array, each of one value."""
    rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist()


# Under vmap.


@pytest.mark.parametrize("axis", [0, 1])
def test_a_batch_is_made_of_examples(axis):
    """One example after the other, along the axis of the batch."""
    i = jnp.zeros((4, 3) if axis == 0 else (3, 4), jnp.int32)
    (found,), kernel = given(lambda f: jax.vmap(f, (None, axis)), X, i)
    assert found.shape == i.shape
    assert numbers(found, axis) == kernel.made == [10, 11, 12, 13]


def test_an_array_that_the_batch_shares_is_one_example_s():
    """It has no axis for more."""
    (found,), kernel = given(lambda f: jax.vmap(f, (0, None)), jnp.ones((4, 4)), I)
    assert found.tolist() == [10, 10, 10]
    assert len(kernel.made) == 4


def test_arrays_of_one_example_stay_together():
    """Lengths go with the indices that they are of, on whatever axes."""
    i, j = jnp.zeros((5, 3), jnp.int32), jnp.zeros((2, 5), jnp.int32)
    found, _ = given(lambda f: jax.vmap(f, (None, 0, 1)), X, i, j)
    assert numbers(found[0], 0) == numbers(found[1], 1) == [10, 11, 12, 13, 14]


def test_a_large_batch_repeats_its_examples():
    """So many are asked for, no more."""
    (found,), kernel = given(lambda f: jax.vmap(f, (None, 0)), X, jnp.zeros((40, 3), jnp.int32))
    assert len(kernel.made) == 16
    assert numbers(found, 0) == [10 + k % 16 for k in range(40)]


def test_batches_of_batches_are_made_of_examples():
    """The inner vmap's examples lie together."""
    (found,), kernel = given(lambda f: jax.vmap(jax.vmap(f, (None, 0)), (None, 0)), X, jnp.zeros((2, 3, 5), jnp.int32))
    assert found.shape == (2, 3, 5)
    assert len(kernel.made) == 6
    assert [numbers(part, 0) for part in found] == [[10, 11, 12], [13, 14, 15]]


def test_axes_of_batches_of_batches_are_where_the_program_has_them():
    """The outer vmap's axis counts the inner one's."""
    (found,), _ = given(lambda f: jax.vmap(jax.vmap(f, (None, 1)), (None, 2)), X, jnp.zeros((5, 3, 2), jnp.int32))
    assert found.shape == (5, 3, 2)
    assert [numbers(found[:, :, k], 1) for k in range(2)] == [[10, 11, 12], [13, 14, 15]]


def test_a_batch_inside_a_shared_one_is_made_of_examples():
    """The outer vmap does not reach the integers."""
    (found,), _ = given(
        lambda f: jax.vmap(jax.vmap(f, (None, 0)), (0, None)), jnp.ones((2, 4)), jnp.zeros((3, 5), jnp.int32)
    )
    assert numbers(found, 0) == [10, 11, 12]


def test_batches_of_batches_repeat_their_examples():
    """Each level for itself."""
    (found,), kernel = given(lambda f: jax.vmap(jax.vmap(f, (None, 0)), (None, 0)), X, jnp.zeros((20, 2, 3), jnp.int32))
    assert len(kernel.made) == 16
    assert numbers(found[0], 0) == [10, 11]
    assert numbers(found[7], 0) == [24, 25]
    assert numbers(found[17], 0) == numbers(found[1], 0)


def test_what_an_example_leaves_open_is_drawn_for_the_whole_batch():
    """Floats are random, and differ from example to example."""
    seen = []

    class Looking(Picking):
        def autotune(self, make_fn, args, kwargs, candidates):
            seen.append(np.asarray(args[0]))
            return super().autotune(make_fn, args, kwargs, candidates)

    executor, kernel = executor_with(Looking()), Numbered()
    jax.jit(jax.vmap(lambda x, i: executor(kernel, x, i)))(jnp.zeros((4, 6)), jnp.zeros((4, 3), jnp.int32))
    (x,) = seen
    assert x.shape == (4, 6)
    assert len(np.unique(x)) == 24


def test_random_keys_of_examples_are_stacked():
    """A PRNG key is an array like others."""
    shapes = []

    class Keyed(Numbered):
        op_id = "keyed"

        def run(self, x, i, key, *, cfg):
            return x * i.sum() * jax.random.uniform(key)

        def example_inputs(self, inv, rng):
            return inv.args[0], np.full(inv.args[1].shape, 7, np.int32), jax.random.key(int(rng.integers(99)))

    class Looking(Picking):
        def autotune(self, make_fn, args, kwargs, candidates):
            shapes.append((args[2].shape, args[2].dtype))
            return super().autotune(make_fn, args[:2], kwargs, candidates)

    executor = executor_with(Looking())
    keys = jax.random.split(jax.random.key(0), 4)
    jax.jit(jax.vmap(lambda x, i, key: executor(Keyed(), x, i, key)))(
        jnp.zeros((4, 6)), jnp.zeros((4, 3), jnp.int32), keys
    )
    assert shapes == [((4,), keys.dtype)]


def test_a_batch_of_cross_entropies_is_tuned_on_labels_of_the_whole_vocabulary():
    """Not on 0 and 1, which would keep one row of the weights in the caches."""
    tuner = Picking()
    executor = executor_with(tuner)

    def loss(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels, executor=executor)

    hidden, weight = jnp.ones((4, 64, 8)), jnp.ones((8, 32))
    jax.jit(jax.vmap(loss, (0, None, 0)))(hidden, weight, jnp.zeros((4, 64), jnp.int32))
    ((labels,),) = tuner.integers
    assert np.shape(labels) == (4, 64)
    assert set(np.unique(labels)) == set(range(32))


def test_a_batch_of_cross_entropies_is_tuned_by_the_tuner_of_the_package():
    """Every candidate runs, checked against the reference."""
    selector = selector_with(Tuner(iters=1))
    executor = Executor(selector)

    def loss(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels, executor=executor)

    shapes = [
        jax.ShapeDtypeStruct(s, d) for s, d in (((2, 16, 8), "float32"), ((8, 32), "float32"), ((2, 16), "int32"))
    ]
    (entry,) = autotune(jax.vmap(loss, (0, None, 0)), *shapes, tuning=QUIET).entries
    assert entry.is_measured
    assert {trial.status for trial in entry.record.trials} <= {"ok", "invalid"}


# However a call is found. The candidates of `Careful` agree on its own integers alone.


def scanned(call, x, i):
    return jax.lax.scan(lambda c, _: (call(c, i), None), x, None, length=2)[0]


def sharded(call, x, i):
    return jax.shard_map(call, mesh=mesh_of(2), in_specs=(P("i"), P()), out_specs=P("i"))(x, i)


def by_shard_map(call, x, i):
    specs = {"mesh": mesh_of(2), "in_specs": (P("i"), P()), "out_specs": P("i")}
    return call(x, i, method="shard_map", **specs)


WAYS = {
    "plain": lambda call, x, i: call(x, i),
    "jit": lambda call, x, i: jax.jit(call)(x, i),
    "scan": scanned,
    "grad": lambda call, x, i: jax.grad(lambda y: call(y, i).sum())(x),
    "vmap": lambda call, x, i: jax.vmap(call, (0, None))(x[None], i),
    "vmap of integers": lambda call, x, i: jax.vmap(call, (None, 0))(x, jnp.stack([i] * 2)),
    "shard_map": sharded,
    "method=shard_map": by_shard_map,
}


def statuses(result):
    """What became of each candidate."""
    (entry,) = result.entries
    assert entry.is_measured, entry.note
    return [trial.status for trial in entry.record.trials]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_autotune_finds_runs_on_the_kernels_own_integers(way):
    """Under every transformation: every candidate is right."""
    executor = Executor(selector_with(Tuner(iters=1)))

    def fn(x, i):
        return WAYS[way](lambda *args, **more: executor(Careful(), *args, **more), x, i)

    assert statuses(autotune(fn, X, I, tuning=QUIET)) == ["ok"] * 3


def test_without_its_own_integers_that_kernel_s_candidates_differ():
    """The test above can tell."""

    class Careless(Careful):
        op_id = "careless"

        def example_inputs(self, inv, rng):
            return inv.args[0], rng.integers(0, 2, inv.args[1].shape).astype("int32")

    executor = Executor(selector_with(Tuner(iters=1)))
    assert "wrong" in statuses(autotune(lambda x, i: executor(Careless(), x, i), X, I, tuning=QUIET))


def test_a_call_in_a_program_that_is_traced_runs_on_the_kernels_own_integers():
    """Inline tuning, at the program's first call."""
    selector = selector_with(Tuner(iters=1))
    jax.jit(lambda x, i: Executor(selector)(Careful(), x, i))(X, I)
    assert [trial.status for trial in selector.tuner.record.trials] == ["ok"] * 3


@pytest.mark.parametrize("where", ["file", "registry", "lowered"])
def test_a_recorded_call_runs_on_the_kernels_own_integers(where, tmp_path, monkeypatch):
    """From a file, from the registry, and from a lowered program."""
    path = tmp_path / "calls.json"
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", str(path) if where == "file" else "1")
    executor = executor_with()
    lowered = jax.jit(lambda x, i: executor(Careful(), x, i)).lower(X, I)
    options = AutotuneOptions(selector=selector_with(Tuner(iters=1)), progress=False)
    assert statuses(autotune(path if where == "file" else lowered, tuning=options)) == ["ok"] * 3


def test_within_a_budget_a_call_runs_on_the_kernels_own_integers():
    """The look at what a call is worth draws nothing."""
    executor = Executor(selector_with(Tuner(iters=1)))
    options = AutotuneOptions(seconds=120, progress=False)
    assert statuses(autotune(lambda x, i: executor(Careful(), x, i), X, I, tuning=options)) == ["ok"] * 3


@pytest.mark.parametrize("way", ["plain", "vmap of integers"])
def test_a_worker_runs_on_the_kernels_own_integers(way):
    """They are sent to it."""
    executor = Executor(selector_with(Tuner(iters=1, isolate=True)))

    def fn(x, i):
        return WAYS[way](lambda *args: executor(Careful(), *args), x, i)

    assert statuses(autotune(fn, X, I, tuning=QUIET)) == ["ok"] * 3
