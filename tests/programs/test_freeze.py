"""Freezing: where a lock file's decisions come from."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from fakes import Blocks, DictStore, Doubling, TableTuner
from fakes_execution import Counting, Picking, Times, executor_with, key_for, mesh_of, selector_with

from ejkernel.ops import (
    AutotuneOptions,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Kernel,
    OpsError,
    PersistentCache,
    autotune,
    autotune_recorded,
    calls_made,
    device_fingerprint,
    freeze,
    locked,
)

X = jnp.arange(8.0)
Scale = Times.fresh()


@pytest.fixture
def path(tmp_path):
    """Where the lock goes."""
    return tmp_path / "step.lock.json"


def calls_in(path):
    """The calls of a lock file in words, with their cfgs."""
    data = json.loads(Path(path).read_text())
    return {tuple(raw["call"].values()): raw["cfg"] for name, raw in data.items() if name != "~lock"}


# A traced function.


def test_a_function_is_frozen_without_being_run(path):
    """Its calls are found by tracing; nothing of it runs."""
    ran = []
    executor = executor_with()

    def step(x):
        jax.debug.callback(lambda: ran.append(1))
        return executor(Scale(), x) + executor(Scale(), x[:4]).sum()

    freeze(path, step, X)
    assert calls_in(path) == {("float32[8]",): 2, ("float32[4]",): 2}
    assert ran == []


def test_a_function_that_was_compiled_before_is_traced_again(path):
    """What JAX remembers of it does not hide its calls, in functions inside it neither."""
    executor = executor_with()

    @jax.jit
    def inner(x):
        return executor(Scale(), x)

    @jax.jit
    def step(x):
        return inner(x) * 2

    step(X)
    for _ in range(2):
        freeze(path, step, X)
        assert calls_in(path) == {("float32[8]",): 2}


def test_calls_inside_transformations_are_frozen(path):
    """Gradients, scans, maps and shards: each call as it is looked up there."""
    executor = executor_with()
    mesh = mesh_of(2, names="i")
    spec = jax.sharding.PartitionSpec("i")

    def step(x):
        local = jax.shard_map(lambda y: executor(Scale(), y), mesh=mesh, in_specs=spec, out_specs=spec)(x)
        mapped = jax.vmap(lambda y: executor(Scale(), y))(x.reshape(4, 2))
        grad = jax.grad(lambda y: executor(Scale(), y).sum())(x[:3])
        carry, _ = jax.lax.scan(lambda c, _: (executor(Scale(), c), None), x[:5], length=2)
        return local.sum() + mapped.sum() + grad.sum() + carry.sum()

    freeze(path, step, X)
    shapes = {call[0] for call in calls_in(path)}
    assert {"float32[2]", "float32[3]", "float32[5]"} <= shapes
    assert any(shape.startswith("float32[4]") for shape in shapes)
    with locked(path):
        jax.jit(step).lower(X)


def test_static_arguments_stay_static(path):
    """Arrays of the call are traced, everything else is as it was given."""
    executor = executor_with()

    @functools.partial(jax.jit, static_argnames="mode")
    def step(x, mode):
        return executor(Scale(), x) if mode == "on" else x

    freeze(path, step, X, mode="on")
    assert len(calls_in(path)) == 1


def test_what_is_not_known_yet_is_tuned_as_the_policy_says(path):
    """A trace may tune; what it finds is what is frozen."""
    tuner = Picking()
    executor = executor_with(tuner)
    freeze(path, lambda x: executor(Scale(), x), X)
    assert calls_in(path) == {("float32[8]",): 5}
    assert tuner.calls == 1


def test_kernels_inside_candidates_are_not_the_programs(path):
    """What a tuning asks for while it measures other candidates is no call of the program."""

    class Outer(Kernel[int, jax.Array]):
        op_id = "outer"

        def run(self, x, *, cfg):
            return executor(Scale(), x[:cfg]).sum()

        def heuristic_cfg(self, inv):
            return 2

        def candidate_cfgs(self, inv):
            return [2, 3]

    class LastTraced(Picking):
        def autotune(self, make_fn, args, kwargs, candidates):
            for cfg in candidates:
                jax.eval_shape(make_fn(cfg), *args, **kwargs)
            return super().autotune(make_fn, args, kwargs, candidates)

    executor = Executor(selector_with(LastTraced()))
    freeze(path, lambda x: executor(Outer(), x), X)
    assert calls_in(path) == {("float32[8]",): 3, ("float32[3]",): 5}


def test_a_guess_is_frozen_as_a_guess(path):
    """The reviewer sees which decisions were not measured."""
    executor = executor_with()
    freeze(path, lambda x: executor(Scale(), x), X)
    (raw,) = [raw for name, raw in json.loads(path.read_text()).items() if name != "~lock"]
    assert raw["source"] == "guess"


def test_a_call_with_its_own_cfg_is_not_in_the_file(path):
    """It needs no lock; a program of such calls alone has nothing to freeze."""
    executor = executor_with()
    with pytest.raises(ValueError, match=r"nothing to freeze.*cfg= needs no lock") as caught:
        freeze(path, lambda x: executor(Scale(), x, cfg=3), X)
    assert not path.exists()
    assert isinstance(caught.value, OpsError)


# Calls of a block.


def test_the_calls_of_a_block_are_frozen(path):
    """Eager calls and functions that were compiled before, as they are made in it."""
    executor = executor_with()
    step = jax.jit(lambda x: executor(Scale(), x[:4]))
    step(X)
    executor(Scale(), X)
    with calls_made() as calls:
        step(X)
        executor(Scale(), X)
    executor(Scale(), X[:2])
    assert len(calls) == 2
    freeze(path, calls)
    assert set(calls_in(path)) == {("float32[8]",), ("float32[4]",)}


# A selector, and a result.


@pytest.mark.parametrize("kept", ["memory", "store", "a store of the user's own"])
def test_a_selector_is_frozen_with_what_it_knows(path, tmp_path, kept):
    """Memory and store alike, with the calls behind the keys; an executor stands for its selector."""
    stores = {
        "memory": None,
        "store": PersistentCache("ops", tmp_path / "ops.json"),
        "a store of the user's own": DictStore(),
    }
    selector = ConfigSelectorChain(ConfigCache(), tuner=TableTuner(), persistent=stores[kept])
    executor = Executor(selector)
    executor(Doubling(), X)
    if kept == "store":
        selector.cache.clear()
    freeze(path, selector)
    assert calls_in(path) == {("float32[8]",): {"size": 2}}
    text = path.read_text()
    assert '"source": "autotune"' in text
    freeze(path, executor)
    assert path.read_text() == text


def test_what_memory_says_is_frozen_where_the_store_says_otherwise(path, tmp_path):
    """Memory answers first, so it is what the program runs with."""
    store = PersistentCache("ops", tmp_path / "ops.json", cfg_type=Blocks)
    selector = ConfigSelectorChain(ConfigCache(), tuner=TableTuner(), persistent=store)
    key = key_for(Doubling(), X)
    store.put(*key, Blocks(1))
    selector.cache.put(*key, Blocks(4))
    assert freeze(path, selector)[key] == {"size": 4}


def test_a_result_is_frozen(path, monkeypatch):
    """Its device and entries; the calls are described where the registry saw them."""
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor = executor_with(Picking())
    executor(Scale(), X)
    freeze(path, autotune_recorded(executor.chooser))
    assert calls_in(path) == {("float32[8]",): 5}
    lock = freeze(path, AutotuningResult("gpu|NVIDIA H200", [Entry("op@v1", "abc", {"m": 1})]))
    assert dict(lock) == {("gpu|NVIDIA H200", "op@v1", "abc"): {"m": 1}}


# Under the lock.


def test_a_result_from_a_file_is_frozen_as_the_one_it_was(path, tmp_path):
    """Its cfgs are plain JSON by then; the lock is the same, and the kernel gets its own type."""
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=TableTuner()))
    result = autotune(lambda x: executor(Doubling(), x), X, tuning=AutotuneOptions(progress=False))
    freeze(tmp_path / "before.lock.json", result)

    freeze(path, AutotuningResult.loads(result.dumps()))

    assert path.read_text() == (tmp_path / "before.lock.json").read_text()
    assert calls_in(path) == {("float32[8]",): {"size": 2}}
    with locked(path):
        assert executor.choose_config(Doubling(), X) == Blocks(2)


def test_a_guess_of_a_result_is_frozen_as_a_guess(path):
    """A reviewer sees what was never measured."""
    freeze(path, AutotuningResult("cpu|one", [Entry("op@v1", "00", 1, source="heuristics"), Entry("op@v1", "01", 1)]))

    assert [raw["source"] for raw in json.loads(path.read_text()).values() if "cfg" in raw] == ["guess", "hand"]


def test_frozen_again_under_its_lock_the_text_is_the_same(path, tmp_path):
    """What the lock says of its entries stays said."""
    executor = executor_with()
    freeze(path, lambda x: executor(Scale(), x), X)
    with locked(path):
        freeze(tmp_path / "again.lock.json", lambda x: executor(Scale(), x), X)

    assert (tmp_path / "again.lock.json").read_text() == path.read_text()


def test_the_frozen_program_runs_under_its_lock_with_the_same_cfgs(path):
    """Eagerly, jitted and compiled; a policy that would tune is not asked."""
    tuned = executor_with(Picking())
    freeze(path, lambda x: tuned(Scale(), x), X)
    kind = Times.fresh()
    tuner = Picking()
    executor = executor_with(tuner)
    with locked(path):
        executor(kind(), X)
        jax.jit(lambda x: executor(kind(), x))(X)
        compiled = executor.compile(kind(), X)
    compiled(X)
    assert set(kind.log) == {5}
    assert tuner.calls == 0


def test_a_call_that_is_not_frozen_is_an_error_before_anything_is_compiled(path):
    """The kernel is not even traced."""
    executor = executor_with()
    freeze(path, lambda x: executor(Scale(), x), X)
    kind = Times.fresh()
    with locked(path):
        for call in (executor, executor.compile, lambda *a: jax.jit(lambda x: executor(kind(), x))(a[1])):
            with pytest.raises(RuntimeError, match=r"args\[0\] is float32\[8\] there, float32\[3\] here"):
                call(kind(), X[:3])
    assert kind.log == []


def test_the_lock_leaves_no_trace_outside(path):
    """What was learned about the caches before a lock holds after it: a later put reaches eager calls."""
    executor = executor_with()
    kind = Times.fresh()
    key = key_for(kind(), X)
    executor.chooser.cache.put(*key, 3)
    freeze(path, AutotuningResult(device_fingerprint(), [Entry(key[1], key[2], 5)]))
    assert float(executor(kind(), X)[1]) == 3
    with locked(path):
        assert float(executor(kind(), X)[1]) == 5
    executor.chooser.cache.put(*key, 5)
    assert float(executor(kind(), X)[1]) == 5
    executor.chooser.cache.put(*key, 2)
    assert float(executor(kind(), X)[1]) == 2


# Bad input.


@dataclass(frozen=True)
class Opaque:
    """A cfg that JSON cannot give back without its type."""

    size: int


def test_a_cfg_that_would_not_come_back_is_refused(path):
    """A kernel whose heuristic is of another type than the tuned cfg cannot be rebuilt from JSON."""

    class Mixed(Counting):
        op_id = "mixed"
        candidates = (1, Opaque(2))

        def run(self, x, *, cfg):
            return x

    executor = executor_with(Picking())
    with pytest.raises(TypeError, match=r"does not come back from JSON.*cfg_type"):
        freeze(path, lambda x: executor(Mixed(), x), X)
    assert not path.exists()


def test_a_cfg_that_json_cannot_hold_is_named(path):
    """The key and the field are in the message, and nothing is written."""
    result = AutotuningResult("cpu|any", [Entry("op@v1", "abc", {"f": object()})])
    with pytest.raises(TypeError, match=r"op@v1 \(call abc\)"):
        freeze(path, result)
    assert not path.exists()


@pytest.mark.parametrize("source", [3, {"key": 1}, None])
def test_what_cannot_be_frozen_is_named(path, source):
    """The message says what can."""
    with pytest.raises(ValueError, match="cannot be frozen; give a function"):
        freeze(path, source)


def test_arguments_without_a_function_are_an_error(path):
    """Only a function is traced."""
    with pytest.raises(ValueError, match="arguments are for a function"):
        freeze(path, selector_with(), X)
