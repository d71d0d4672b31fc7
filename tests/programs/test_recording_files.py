"""Recording that survives the process: a file of calls, written by many, tuned by another.

Covers `execution/signatures.py`.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded_kernels
from fakes import child
from fakes_execution import HEURISTICS, Asked, Picking, Times, executor_with, mesh_of, selector_with
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from recorded_kernels import Mean, Nested, Plain, Rank

from ejkernel.ops import (
    AutotuneOptions,
    AutotunePolicy,
    Executor,
    PersistentCache,
    Tuner,
    autotune,
    autotune_recorded,
    device_fingerprint,
    forward_autotune_only,
    get_invocations,
)
from ejkernel.ops.execution.recording import RecordingWarning

X = jnp.arange(1.0, 5.0)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Where calls are recorded."""
    path = tmp_path / "run" / "calls.json"
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", str(path))
    return path


def calls_in(file):
    """The calls of a recording."""
    return json.loads(file.read_text(encoding="utf-8"))["calls"]


def tuned(file, tuner=None):
    """The result of tuning a recording as another process would: with nothing but the file."""
    selector = selector_with(tuner or Picking())
    return autotune(file, tuning=AutotuneOptions(selector=selector, progress=False))


def in_turn(executor, *calls):
    """Makes some calls."""
    for kernel, x in calls:
        executor(kernel, x)


def under_precision(call, x):
    with jax.default_matmul_precision("highest"):
        return call(x)


def explicitly(call, x):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    return jax.jit(call)(jax.device_put(x, NamedSharding(mesh, P("i"))))


CALLS = {
    "eager": lambda run: run(Plain(), X),
    "jitted": lambda run: jax.jit(lambda x: run(Plain(), x))(X),
    "dtypes": lambda run: run(Plain(), X.astype(jnp.bfloat16), X.astype(jnp.int8), X > 1, jnp.complex64(1)),
    "a random key": lambda run: run(Plain(), X, jax.random.key(0)),
    "trees": lambda run: run(Plain(), X, {"b": [X, (1, None)], "a": ()}, []),
    "numbers": lambda run: run(Plain(), X, one=1, real=1.0, yes=True, text="é\n", nothing=None, large=1 << 70),
    "odd numbers": lambda run: run(Plain(), X, nan=math.nan, inf=-math.inf, zero=-0.0),
    "static dtypes": lambda run: run(Plain(), X, a=jnp.bfloat16, b=np.dtype("int32"), c=np.float32),
    "attributes": lambda run: run(Plain(2.5, ("a", "b")), X),
    "nested class": lambda run: run(Nested.Inside(), X),
    "own key": lambda run: run(Rank(), X),
    "vmap": lambda run: jax.vmap(lambda x: run(Plain(), x))(X[None]),
    "named vmap": lambda run: jax.vmap(lambda x: run(Mean(), x), axis_name="i")(X[None]),
    "precision": lambda run: under_precision(lambda x: run(Plain(), x), X),
    "explicit": lambda run: explicitly(lambda x: run(Plain(), x), X),
    "shard_map": lambda run: jax.jit(
        jax.shard_map(lambda x: run(Mean(), x), mesh=mesh_of(2), in_specs=P("i"), out_specs=P())
    )(X),
    "method": lambda run: run(Plain(), X, method="shard_map", mesh=mesh_of(2), in_specs=(P("i"),), out_specs=P(("i",))),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_written_and_tuned_under_its_key(call, file):
    """What the file holds is enough to tune the very call."""
    executor = executor_with()
    CALLS[call](executor)
    (written,) = calls_in(file)
    result = tuned(file)
    assert result.notes == ()
    [(device, op_id, call_key)] = result.by_key()
    assert (device, op_id, call_key) == (written["device"], written["op_id"], written["call_key"])
    assert result.entries[0].cfg == 5 or "integer" in result.entries[0].note
    with result:
        CALLS[call](executor)
    assert len(calls_in(file)) == 1


def test_a_recorded_call_among_shards_is_really_measured(file):
    """The axes of its shard_map are in the file, so its candidates can talk."""
    CALLS["shard_map"](executor_with())
    (entry,) = tuned(file, Tuner(iters=1)).entries
    assert [t.status for t in entry.record.trials] == ["ok"] * 3


def test_the_registry_remembers_what_is_around_a_call(monkeypatch):
    """In memory too: a call inside shard_map is tuned under its own key."""
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor = executor_with()
    CALLS["shard_map"](executor)
    CALLS["explicit"](executor)
    CALLS["precision"](executor)
    seen = {(op, key) for op, calls in get_invocations(device_fingerprint()).items() for key in calls}
    selector = selector_with(Picking())
    result = autotune_recorded(selector)
    assert {(op, key) for _, op, key in selector.cache.keys()} == seen
    assert {(e.op_id_v, e.call_key) for e in result.entries} == seen


@pytest.mark.parametrize("word", ["1", "on", "True"])
def test_a_switch_records_in_memory_alone(word, monkeypatch, tmp_path):
    """No file is named by it, or made."""
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", word)
    monkeypatch.chdir(tmp_path)
    executor_with()(Plain(), X)
    assert not list(tmp_path.glob("[!c]*"))


def test_a_file_records_in_memory_as_well(file):
    """What is in the file is in the registry, too."""
    executor_with()(Plain(), X)
    assert list(get_invocations(device_fingerprint())) == ["recorded.plain@v0"]


def test_a_relative_path_is_that_of_the_moment(monkeypatch, tmp_path):
    """The file is where the executor was made, wherever the program goes then."""
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "calls.json")
    monkeypatch.chdir(tmp_path)
    executor = executor_with()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    executor(Plain(), X)
    assert len(calls_in(tmp_path / "calls.json")) == 1


# What a call is tuned for.

BOTH = AutotunePolicy(validate_backward=True)


class Objectives(Picking):
    """Remembers for which tunings forward and backward count together."""

    def __init__(self):
        super().__init__()
        self.backward = []

    def autotune(self, make_fn, args, kwargs, candidates):
        offered = list(candidates)
        self.backward.append(make_fn(offered[0])._ejk_validate_backward)
        return super().autotune(make_fn, args, kwargs, offered)


def test_a_program_that_tunes_both_passes_finds_them_tuned(file, tmp_path):
    """Each call of a recording is tuned for what its own program asked, and not again by that program."""
    selector = selector_with(policy=replace(HEURISTICS, validate_backward=True))
    run = Executor(selector)
    run(Plain(), X)
    with forward_autotune_only():
        run(Plain(), X[:2])
    assert [call["objective"] for call in calls_in(file)].count("forward+backward") == 1

    store, tuner = PersistentCache("op", tmp_path / "op.json"), Objectives()
    mine = selector_with(tuner, persistent=store)
    autotune(file, tuning=AutotuneOptions(selector=mine, progress=False))
    assert sorted(tuner.backward) == [False, True]
    assert not autotune(file, tuning=AutotuneOptions(selector=mine, progress=False)).notes
    program = Objectives()
    executor_with(program, persistent=store, policy=BOTH)(Plain(), X)
    assert (tuner.calls, program.calls) == (2, 0)


def test_a_policy_can_ask_for_more_than_was_recorded(file):
    """Forward and backward for every call, as `--backward` does."""
    executor_with()(Plain(), X)
    tuner = Objectives()
    autotune(file, tuning=AutotuneOptions(selector=selector_with(tuner, policy=BOTH), progress=False))
    assert tuner.backward == [True]


def test_the_wider_objective_of_two_programs_stays(file):
    """Whichever of them was recorded last."""
    for policy in (HEURISTICS, replace(HEURISTICS, validate_backward=True), HEURISTICS):
        executor_with(policy=policy)(Plain(), X)
    assert [call["objective"] for call in calls_in(file)] == ["forward+backward"]


def test_an_objective_may_be_missing(file):
    """A chooser of the user's own says none, and older files have none: the policy alone decides."""
    Executor(Asked())(Plain(), X)
    assert "objective" not in calls_in(file)[0]
    tuner = Objectives()
    tuned(file, tuner)
    assert tuner.backward == [False]


# What cannot be written.


def test_a_kernel_that_cannot_be_imported_is_named_once(file):
    """A class made in a function; other kernels are recorded."""
    executor, kernel = executor_with(), Times.fresh()()
    with pytest.warns(RecordingWarning, match="top of a module") as caught:
        in_turn(executor, (kernel, X), (kernel, X[:2]), (Plain(), X))
    assert len(caught) == 1
    assert "times@v0" in str(caught[0].message)
    assert [call["op_id"] for call in calls_in(file)] == ["recorded.plain@v0"]


def test_a_kernel_of_the_main_script_is_named():
    """Another process has another main script."""
    code = (
        "import os, sys, warnings\n"
        "os.environ['EJKERNEL_OPS_RECORD'] = sys.argv[1]\n"
        "from ejkernel.ops import *\n"
        "class Mine(Kernel):\n"
        "    def run(self, x, *, cfg): return x\n"
        "    def heuristic_cfg(self, inv): return 1\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    Executor(ConfigSelectorChain(ConfigCache()))(Mine(), __import__('jax').numpy.ones(3))\n"
        "print(*(w.message for w in caught))\n"
    )
    with child(code, "never.json") as process:
        assert "__main__:Mine cannot be imported" in process.communicate(timeout=300)[0]


class Opaque:
    """A static value without a form in JSON, but with one in keys."""

    def __call__(self, x):
        return x


@pytest.mark.parametrize("value", [jnp.tanh, Opaque(), 1j, {1: 2}], ids=["function", "object", "complex", "dict"])
def test_a_static_value_that_cannot_be_written_is_named(value, file):
    """The message says which, and the call itself works."""
    kernel = Plain(names=value) if isinstance(value, dict) else Plain()
    options = {} if isinstance(value, dict) else {"act": value}
    with pytest.warns(RecordingWarning, match="names" if isinstance(value, dict) else "act"):
        out = executor_with()(kernel, X, **options)
    np.testing.assert_array_equal(out, X)
    assert not file.exists()


# One file, many writers.


def test_calls_are_added_to_those_that_are_there(file):
    """Executors, and runs, share a file; each call is in it once, in order."""
    for size in (4, 2, 4):
        executor_with()(Plain(), X[:size])
    keys = [(c["device"], c["op_id"], c["call_key"]) for c in calls_in(file)]
    assert len(keys) == 2
    assert keys == sorted(keys)


def test_several_processes_write_one_file_and_nothing_is_lost(file):
    """Each adds its own calls at the same time."""
    code = (
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "import jax.numpy as jnp\n"
        "from fakes_execution import executor_with\n"
        "from recorded_kernels import Plain\n"
        "executor = executor_with()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "for i in range(10):\n"
        "    executor(Plain(), jnp.ones(2), number=int(sys.argv[1]) * 100 + i)\n"
        "print('done', flush=True)\n"
    )
    folder = str(Path(__file__).parents[1] / "execution")
    with child(code, "1", folder) as one, child(code, "2", folder) as two:
        for process in (one, two):
            assert process.stdout.readline() == "ready\n"
        for process in (one, two):
            process.stdin.write("\n")
            process.stdin.flush()
        for process in (one, two):
            assert process.stdout.readline() == "done\n"
    assert sorted(c["kwargs"]["number"] for c in calls_in(file)) == [*range(100, 110), *range(200, 210)]


@pytest.mark.parametrize("content", ["import antigravity\n", "{}", '{"kind": "ejkernel.ops recorded calls"}'])
def test_a_file_that_is_something_else_is_not_touched(content, file):
    """One warning names it; the program runs on."""
    file.parent.mkdir()
    file.write_text(content, encoding="utf-8")
    executor = executor_with()
    with pytest.warns(RecordingWarning, match=r"calls\.json") as caught:
        in_turn(executor, (Plain(), X), (Plain(), X[:2]))
    assert len(caught) == 1
    assert file.read_text(encoding="utf-8") == content


def test_a_place_that_cannot_be_written_is_named_once(file):
    """One warning; the program runs on."""
    file.parent.write_text("a file where the folder should be", encoding="utf-8")
    executor = executor_with()
    with pytest.warns(RecordingWarning, match="no calls are recorded") as caught:
        in_turn(executor, (Plain(), X), (Plain(), X[:2]))
    assert len(caught) == 1


# What cannot be tuned.


def changed(file, **fields):
    """Adds a copy of the first call with other fields, as a file from elsewhere would have it."""
    data = json.loads(file.read_text(encoding="utf-8"))
    data["calls"].append({**data["calls"][0], "call_key": "other", **fields})
    file.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kernel": "no_such_module:Kernel"}, "no_such_module:Kernel cannot be imported: ModuleNotFoundError"),
        ({"kernel": "recorded_kernels:Gone"}, "recorded_kernels:Gone cannot be imported: AttributeError"),
        ({"kernel": "recorded_kernels:NOT_A_KERNEL"}, "is no kernel class"),
        ({"kernel": "os:system"}, "is no kernel class"),
        ({"kernel": 3}, "cannot be read"),
        ({"device": "tpu|TPU v9"}, "another kind of device"),
        ({"args": [{"array": ["float32", [3], None]}]}, "another key"),
        ({"args": [{"unheard": 1}]}, "unknown kind"),
        ({"args": [{}]}, "cannot be read"),
        ({"around": None}, "cannot be read"),
        ({"mesh": {"mesh": [["i", 64, "auto"]]}}, "needs 64 devices"),
    ],
)
def test_a_call_that_cannot_be_tuned_is_named_and_the_others_are_tuned(fields, why, file):
    """Nothing else is affected."""
    executor_with()(Plain(), X)
    changed(file, **fields)
    result = tuned(file)
    assert [e.cfg for e in result.entries] == [5]
    (note,) = result.notes
    assert why in note
    assert "not tuned" in note


def test_a_module_that_raises_when_it_is_imported_is_named(file, tmp_path, monkeypatch):
    """Whatever it raises."""
    (tmp_path / "broken_module.py").write_text("raise ZeroDivisionError('at import')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    executor_with()(Plain(), X)
    changed(file, kernel="broken_module:Kernel")
    assert "ZeroDivisionError: at import" in tuned(file).notes[0]


def test_a_kernel_of_a_newer_version_is_tuned_under_that(file, monkeypatch):
    """The call is the same, the cfgs are not."""
    executor_with()(Plain(), X)
    monkeypatch.setattr(recorded_kernels.Plain, "version", "7")
    (entry,) = tuned(file).entries
    assert entry.op_id_v == "recorded.plain@v7"


def test_a_file_that_is_no_recording_is_refused(tmp_path):
    """So is one that is not there; each says what to do."""
    with pytest.raises(OSError, match="no file of recorded calls"):
        tuned(tmp_path / "nothing.json")
    (tmp_path / "odd.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="no file of recorded calls"):
        tuned(tmp_path / "odd.json")
    (tmp_path / "new.json").write_text('{"kind": "ejkernel.ops recorded calls", "version": 9}', encoding="utf-8")
    with pytest.raises(ValueError, match="version 9"):
        tuned(tmp_path / "new.json")


def test_recording_says_nothing_where_all_is_well(file):
    """No warning, and a warm call writes nothing."""
    executor = executor_with()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor(Plain(), X)
        before = file.stat().st_mtime_ns
        executor(Plain(), X)
    assert file.stat().st_mtime_ns == before
