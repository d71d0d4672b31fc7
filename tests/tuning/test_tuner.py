"""`Tuner.autotune`: the fastest candidate that is right.

Covers `tuning/job.py`.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import Ran, TableClock, child
from fakes_tuning import Held

from ejkernel.ops import OpsError, RandomSearch, Tuner
from ejkernel.ops.core.errors import OutOfTimeError
from ejkernel.ops.tuning import check as check_case
from ejkernel.ops.tuning.job import TuningJob

X = jnp.ones(8)


def table(times, **settings):
    """A tuner whose clock reads a table, and the candidates to give it."""
    ran = Ran()
    return Tuner(clock=TableClock(ran, times), **settings), ran


def status_of(tuner):
    return {str(trial.cfg): trial.status for trial in tuner.record.trials}


# The winner.


@pytest.mark.parametrize("fastest", ["a", "b", "c"])
def test_the_fastest_wins(fastest):
    """The candidate with the shortest time is returned, wherever it stands."""
    tuner, ran = table({name: 1.0 if name == fastest else 2.0 for name in "abc"})

    assert tuner.autotune(ran.make_fn, (X,), {}, ["a", "b", "c"]) == fastest


def test_ties_go_to_the_earlier_candidate():
    """Of equal times the first given wins, so that two runs agree."""
    tuner, ran = table({"a": 1.0, "b": 1.0, "c": 1.0})

    assert tuner.autotune(ran.make_fn, (X,), {}, ["c", "a", "b"]) == "c"


def test_a_difference_within_the_noise_is_a_tie():
    """Half a percent is not believed."""
    tuner, ran = table({"a": 1.0, "b": 0.995})

    assert tuner.autotune(ran.make_fn, (X,), {}, ["a", "b"]) == "a"
    assert tuner.record.tied == (0, 1)


def test_a_single_slow_sample_does_not_decide():
    """The median counts: one hiccup of the faster candidate does not cost it the race."""
    tuner, ran = table({"a": [1.0, 1.0, 1.0, 1.4, 1.0], "b": 1.1}, iters=5)

    assert tuner.autotune(ran.make_fn, (X,), {}, ["b", "a"]) == "a"


def test_one_candidate_wins_alone():
    """A race of one has a winner."""
    tuner, ran = table({"a": 1.0})

    assert tuner.autotune(ran.make_fn, (X,), {}, ["a"]) == "a"


def test_candidates_may_be_an_iterator():
    """Anything that can be iterated once is enough."""
    tuner, ran = table({"a": 2.0, "b": 1.0})

    assert tuner.autotune(ran.make_fn, [X], {}, iter("ab")) == "b"


def test_keywords_reach_the_function():
    """`kwargs` are given to every candidate: arrays traced, the rest constant."""
    seen = []

    def make_fn(cfg):
        def fn(x, *, scale, flag):
            seen.append((isinstance(scale, jax.core.Tracer), flag))
            return x * scale

        return fn

    Tuner().autotune(make_fn, (X,), {"scale": jnp.float32(2), "flag": "on"}, ["a", "b"])

    assert set(seen) == {(True, "on")}


def test_duplicates_are_measured_once():
    """Equal candidates are one."""
    tuner, ran = table({"a": 2.0, "b": 1.0})
    tuner.autotune(ran.make_fn, (X,), {}, ["a", "b", "a", "b", "a"])

    assert [trial.cfg for trial in tuner.record.trials] == ["a", "b"]


def test_candidates_of_mixed_types_are_told_apart():
    """1, 1.0 and True are three candidates, and unlike types need not compare."""
    tuner = Tuner(0, 1)
    tuner.autotune(lambda cfg: lambda x: x * 2, (X,), {}, [1, 1.0, True, "1", None, 1, (1,), {"a": 1}, {"a": 1}])

    assert [repr(trial.cfg) for trial in tuner.record.trials] == ["1", "1.0", "True", "'1'", "None", "(1,)", "{'a': 1}"]


def test_the_answer_is_the_candidate_itself():
    """The very object that was offered comes back."""
    candidates = [{"block": 1}, {"block": 2}]
    winner = Tuner(0, 1).autotune(lambda cfg: jnp.sin, (X,), {}, candidates)

    assert any(winner is cfg for cfg in candidates)


# How often they run.


def test_the_winner_runs_at_least_as_often_as_asked():
    """`warmup` and `iters` are the least for the winner."""
    tuner, ran = table({"a": 1.0, "b": 3.0}, warmup=2, iters=4)
    tuner.autotune(ran.make_fn, (X,), {}, ["a", "b"])

    assert ran.log.count("a") >= 6
    assert len(tuner.record.trials[0].samples_s) >= 4


def test_clearly_slower_candidates_are_dropped_earlier():
    """Ten times slower goes after two samples, five percent once that is clear; the record says when."""
    tuner, ran = table({"a": 10.0, "b": 1.0, "c": 1.05}, iters=8)
    tuner.autotune(ran.make_fn, (X,), {}, "abc")
    slow, winner, close = tuner.record.trials

    assert len(slow.samples_s) == slow.dropped_round == 2
    assert 2 < len(close.samples_s) == close.dropped_round < len(winner.samples_s)
    assert (winner.dropped_round, len(winner.samples_s) >= 8) == (None, True)


# Right answers.


def wrong_tile(x):
    return (x * 2).at[8:16, 16:24].set(0)


def wrong_64_tile(x):
    return (x * 2).at[64:128, 192:256].set(0)


WRONG = {
    "another shape": lambda x: (x * 2)[:-1],
    "another rank": lambda x: (x * 2).reshape(-1),
    "another dtype": lambda x: (x * 2).astype(jnp.bfloat16),
    "a NaN": lambda x: (x * 2).at[3, 4].set(jnp.nan),
    "one wrong row": lambda x: (x * 2).at[5].set(x[6] * 2),
    "one wrong tile": wrong_tile,
    "a wrong 64x64 tile of a larger array": wrong_64_tile,
    "half a percent": lambda x: x * 2.01,
    "one wrong element": lambda x: (x * 2).at[63, 63].set(99),
    "all of it": lambda x: x * 2.1,
    "zeros": lambda x: x * 0,
    "another structure": lambda x: (x * 2,),
    "one output more": lambda x: [x * 2, x],
}


class ByFunction:
    """A clock that calls one function the fastest, whatever it computes."""

    name = "by output"

    def __init__(self, right):
        self.right = right

    def time(self, call, leaves, calls):
        out = jax.block_until_ready(call(*leaves))
        same = isinstance(out, jax.Array) and out.shape == leaves[0].shape and bool(jnp.array_equal(out, self.right))
        return 2.0 if same else 1.0


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_candidate_cannot_win(wrong):
    """However fast it is, a candidate whose output differs from the first one's is rejected."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((256, 512)).astype(jnp.float32))
    functions = {"right": lambda x: x * 2, "wrong": WRONG[wrong]}
    tuner = Tuner(clock=ByFunction(x * 2))

    assert tuner.autotune(functions.get, (x,), {}, ["right", "wrong"]) == "right"
    assert status_of(tuner) == {"right": "ok", "wrong": "wrong"}
    assert tuner.record.trials[1].message


def whole(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def split(a, b, parts=8):
    """The same product as a sum of parts, each rounded to the arrays' own type."""
    pieces = zip(jnp.split(a, parts, 1), jnp.split(b, parts, 0), strict=True)
    return sum((jnp.matmul(p, q, preferred_element_type=jnp.float32).astype(a.dtype) for p, q in pieces))


REASSOCIATED = {
    "split in eight": split,
    "split in two": lambda a, b: split(a, b, 2),
    "other operand first": lambda a, b: whole(b.T, a.T).T,
    "from the end": lambda a, b: whole(a[:, ::-1], b[::-1]),
}


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("other", REASSOCIATED)
def test_a_candidate_that_rounds_otherwise_may_win(other, dtype):
    """Sums in another order, split or gathered in the narrow type itself, are right."""
    shapes = [jax.ShapeDtypeStruct((64, 512), dtype), jax.ShapeDtypeStruct((512, 64), dtype)]
    functions = {"whole": whole, "other": REASSOCIATED[other]}
    tuner = Tuner(0, 1)
    tuner.autotune(functions.get, shapes, {}, ["whole", "other"])

    assert status_of(tuner) == {"whole": "ok", "other": "ok"}


@pytest.mark.parametrize(("factor", "status"), [(1.0 + 1e-5, "ok"), (1.0 + 5e-3, "wrong"), (1.5, "wrong")])
def test_float32_may_be_off_by_rounding_alone(factor, status):
    """A hundred-thousandth passes, half a percent does not; the size of the error is in the record either way."""
    functions = {"right": lambda x: x * 2, "off": lambda x: x * (2 * factor)}
    tuner = Tuner(0, 1)
    tuner.autotune(functions.get, (jax.ShapeDtypeStruct((64, 64), jnp.float32),), {}, ["right", "off"])

    assert status_of(tuner) == {"right": "ok", "off": status}
    assert tuner.record.trials[1].error >= 0.5 * (factor - 1.0)


def test_a_candidate_that_is_right_on_the_first_inputs_alone_cannot_win():
    """The second set of inputs finds it."""
    first = []

    def factor(x):
        first[:] = first or [np.array(x)]
        return np.float32(2 if np.array_equal(x, first[0]) else 3)

    def wrong_later(x):
        return x * jax.pure_callback(factor, jax.ShapeDtypeStruct((), np.float32), x)

    functions = {"right": lambda x: x * 2, "wrong": wrong_later}
    tuner = Tuner(0, 1)

    assert tuner.autotune(functions.get, (jax.ShapeDtypeStruct((64,), jnp.float32),), {}, ["right", "wrong"]) == "right"
    assert status_of(tuner) == {"right": "ok", "wrong": "wrong"}


def test_an_output_that_is_not_written_is_found(monkeypatch):
    """Memory that still holds the last right answer is spoilt before every candidate."""
    memory = np.zeros(64, np.float32)
    spoil = check_case._poison

    def spoil_all(expected):
        memory.fill(np.nan)
        spoil(expected)

    def write(x):
        memory[:] = 2 * np.asarray(x)
        return memory.copy()

    monkeypatch.setattr(check_case, "_poison", spoil_all)
    x = jnp.arange(64.0)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    functions = {
        "writes": lambda x: jax.pure_callback(write, shape, x),
        "writes nothing": lambda x: jax.pure_callback(lambda _: memory.copy(), shape, x),
    }
    tuner = Tuner(0, 1)

    assert tuner.autotune(functions.get, (x,), {}, ["writes", "writes nothing"]) == "writes"
    assert status_of(tuner) == {"writes": "ok", "writes nothing": "wrong"}


def test_a_reference_decides_who_is_right():
    """With `reference=` the first candidate may be the wrong one."""
    functions = {"wrong": lambda x: x * 3, "right": lambda x: x * 2}
    tuner = Tuner(0, 1)

    assert tuner.autotune(functions.get, (X,), {}, ["wrong", "right"], reference=lambda x: x * 2) == "right"
    assert status_of(tuner) == {"wrong": "wrong", "right": "ok"}


def test_a_reference_gets_the_arguments_of_the_call():
    """It is called as the candidates are, with the same values."""
    calls = []

    def reference(x, *, scale, name):
        calls.append((x.tolist(), scale, name))
        return x * scale

    Tuner(0, 1).autotune(
        lambda cfg: lambda x, scale, name: x * scale, (X,), {"scale": 2, "name": "n"}, "ab", reference=reference
    )

    assert calls[0] == (X.tolist(), 2, "n")


def test_without_a_reference_the_first_that_runs_is_the_measure():
    """A first candidate that fails does not decide; the next one does."""

    def fail(x):
        raise ValueError("not this one")

    functions = {"broken": fail, "right": lambda x: x * 2, "wrong": lambda x: x * 3}
    tuner = Tuner(0, 1)

    assert tuner.autotune(functions.get, (X,), {}, ["broken", "right", "wrong"]) == "right"
    assert status_of(tuner) == {"broken": "compile", "right": "ok", "wrong": "wrong"}


def test_a_candidate_with_another_kind_of_output_is_only_wrong():
    """A candidate that is no JAX function and returns a number is rejected; the tuning goes on."""
    functions = {"right": lambda x: x.sum(), "wrong": lambda x: float(np.asarray(x).sum())}
    tuner = Tuner(0, 1)

    assert tuner.autotune(functions.get, (X,), {}, ["right", "wrong"]) == "right"


def test_candidates_may_return_keys():
    """Outputs that are PRNG keys are compared as well."""
    functions = {"right": lambda k: jax.random.split(k), "wrong": lambda k: jax.random.split(jax.random.fold_in(k, 1))}
    tuner = Tuner(0, 1)

    assert tuner.autotune(functions.get, (jax.random.key(0),), {}, ["right", "wrong"]) == "right"
    assert status_of(tuner) == {"right": "ok", "wrong": "wrong"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "bool", "complex64"])
def test_candidates_of_every_dtype_are_compared(dtype):
    """Whatever the output's dtype, a right candidate stays and a wrong one goes."""
    x = jax.ShapeDtypeStruct((16, 16), jnp.dtype(dtype))
    functions = {"right": lambda x: x.T, "also right": lambda x: jnp.swapaxes(x, 0, 1), "wrong": lambda x: x}
    tuner = Tuner(0, 1)
    tuner.autotune(functions.get, (x,), {}, list(functions))

    assert status_of(tuner) == {"right": "ok", "also right": "ok", "wrong": "wrong"}


def test_a_wrong_gradient_is_found_where_gradients_are_asked_for():
    """Forward and backward together: an output that is right with a gradient that is not cannot win."""

    job = TuningJob(with_gradient, (X,), {}, [2.0, 3.0], objective="forward+backward")
    tuner = Tuner(0, 1)
    tuner.tune(job)

    assert status_of(tuner) == {"2.0": "ok", "3.0": "wrong"}
    assert tuner.record.objective == "forward+backward"


def with_gradient(factor, output=2.0):
    """Twice the argument, with this factor for its gradient."""

    @jax.custom_vjp
    def fn(x):
        return x * output

    fn.defvjp(lambda x: (x * output, None), lambda _, dy: (dy * factor,))
    return fn


def test_a_wrong_gradient_is_found_beside_a_reference():
    """A reference judges the output; gradients are compared with those of the first one whose output is right."""
    functions = {
        "wrong output": with_gradient(9.0, output=3.0),
        "right": with_gradient(2.0),
        "wrong gradient": with_gradient(3.0),
        "also right": lambda x: x + x,
    }
    tuner = Tuner(0, 1)
    tuner.tune(
        TuningJob(functions.get, (X,), {}, list(functions), objective="forward+backward", reference=lambda x: 2 * x)
    )

    assert status_of(tuner) == {
        "wrong output": "wrong",
        "right": "ok",
        "wrong gradient": "wrong",
        "also right": "ok",
    }


def no_gradient(x):
    return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]


def test_who_has_no_gradient_cannot_win_where_others_have():
    """Forward times do not compare with those of forward and backward; the record says why it is out."""
    functions = {"without": no_gradient, "with": lambda x: x * 2}
    tuner = Tuner(0, 1)
    record = tuner.tune(TuningJob(functions.get, (X,), {}, ["without", "with"], objective="forward+backward"))

    assert (record.cfg, record.objective) == ("with", "forward+backward")
    assert status_of(tuner) == {"without": "compile", "with": "ok"}
    assert "differentiate" in record.trials[0].message


def test_if_nobody_has_a_gradient_all_are_timed_forward():
    """The record says what was measured in the end, and of each candidate why."""
    tuner = Tuner(0, 1)
    job = TuningJob(
        lambda cfg: lambda x: no_gradient(x) * cfg / cfg, (X,), {}, [2.0, 3.0], objective="forward+backward"
    )
    record = tuner.tune(job)

    assert (record.winner in (0, 1), record.objective) == (True, "forward")
    assert all("differentiate" in trial.message for trial in record.trials)


# What is equal.


class Counting:
    """A clock that keeps which programs it was given."""

    name = "counting"

    def __init__(self):
        self.calls = set()

    def time(self, call, leaves, calls):
        self.calls.add(call)
        jax.block_until_ready(call(*leaves))
        return 1.0


def test_equal_programs_are_measured_once():
    """Candidates that are lowered to the same text share one measurement, and the record says with which."""
    clock = Counting()
    tuner = Tuner(clock=clock)
    tuner.autotune(lambda cfg: lambda x: x * (2 if cfg < 4 else 3) / 2, (X,), {}, [1, 2, 3], reference=lambda x: x)
    one, *others = tuner.record.trials

    assert len(clock.calls) == 1
    assert all(trial.samples_s == one.samples_s and repr(one.cfg) in trial.message for trial in others)
    assert {trial.status for trial in tuner.record.trials} == {"ok"}


def test_equal_programs_fail_together_with_the_reason():
    """What is wrong with one is told of each."""
    functions = {"right": lambda x: x * 2, "wrong": lambda x: x * 3, "wrong too": lambda x: x * 3}
    tuner = Tuner(0, 1)
    tuner.autotune(functions.get, (X,), {}, list(functions))

    assert status_of(tuner) == {"right": "ok", "wrong": "wrong", "wrong too": "wrong"}
    assert "common factor" in tuner.record.trials[1].message
    assert "common factor" in tuner.record.trials[2].message


def test_programs_that_call_back_are_never_equal():
    """Which function is called does not stand in the program's text: each is measured by itself."""
    ran, clock = Ran(), Counting()
    Tuner(clock=clock).autotune(ran.make_fn, (X,), {}, ["a", "b"])

    assert len(clock.calls) == 2


@pytest.mark.parametrize("size", [8, 4096])
def test_programs_that_differ_in_a_constant_are_not_equal(size):
    """Arrays that a candidate closes over belong to its program, however large."""
    drawn = np.random.default_rng(0)
    tables = {name: jnp.asarray(drawn.standard_normal(size).astype(jnp.float32)) for name in ("one", "other")}
    tuner = Tuner(0, 1)
    tuner.autotune(lambda cfg: lambda x: x * tables[cfg], (jnp.ones(size),), {}, ["one", "other"])

    assert status_of(tuner) == {"one": "ok", "other": "wrong"}


def test_the_earliest_of_equal_programs_stands_for_all():
    """Ties go to the earlier candidate, and every one has its samples."""
    tuner = Tuner(0, 1, clock=Counting())
    record = tuner.tune(TuningJob(lambda cfg: lambda x: x * 2, (X,), {}, [0, 1, 2], heuristic_first=True))

    assert record.winner == record.heuristic == 0
    assert all(trial.status == "ok" and trial.samples_s for trial in record.trials)
    assert record.gain is not None


# What fails.


@pytest.mark.parametrize("wrong", ["tracing", "running"])
def test_a_candidate_that_raises_does_not_stop_the_others(wrong):
    """Its own outcome is kept, with the first line of what it said."""

    def make_fn(cfg):
        def fn(x):
            if cfg == "tracing":
                raise ValueError("no such block\nand a long explanation")
            if cfg == "running":
                return x * jax.pure_callback(_fail, jax.ShapeDtypeStruct((), x.dtype))
            return x * 2

        return fn

    tuner = Tuner(0, 1)

    assert tuner.autotune(make_fn, (X,), {}, [wrong, "good"]) == "good"
    assert status_of(tuner) == {wrong: "compile" if wrong == "tracing" else "runtime", "good": "ok"}
    assert "\n" not in tuner.record.trials[0].message


def test_a_program_that_does_not_fit_is_not_run(monkeypatch):
    """What the compiler says that it needs is held against what is free, before anything runs."""
    monkeypatch.setattr("ejkernel.ops.tuning.compile.free_memory", lambda device: 1 << 20)

    def large(x):
        # Sorted: nothing that a compiler could do without the whole.
        return jnp.sort(jnp.sort(jnp.outer(x, x), axis=0), axis=1).sum(1) / x.sum()

    functions = {"small": lambda x: x * 1, "large": large}
    tuner = Tuner(0, 1)

    assert tuner.autotune(functions.get, (jnp.ones(2048),), {}, ["small", "large"]) == "small"
    assert status_of(tuner) == {"small": "ok", "large": "memory"}
    assert "MiB" in tuner.record.trials[1].message


def test_where_free_memory_is_not_known_nothing_is_refused(monkeypatch):
    """No figure is no reason."""
    monkeypatch.setattr("ejkernel.ops.tuning.compile.free_memory", lambda device: None)
    tuner = Tuner(0, 1)
    tuner.autotune(lambda cfg: lambda x: x * 2, (X,), {}, ["a"])

    assert status_of(tuner) == {"a": "ok"}


def test_failures_are_kept_as_data():
    """Each failed candidate has its status and message; the others are raced."""

    def make_fn(cfg):
        if cfg == "factory":
            raise KeyError("no such cfg")

        def fn(x):
            if cfg == "compile":
                raise ValueError("cannot be traced")
            if cfg == "memory":
                raise MemoryError("shared memory")
            if cfg == "exhausted":
                raise RuntimeError("RESOURCE_EXHAUSTED: too many registers")
            if cfg == "runtime":
                return x * jax.pure_callback(_fail, jax.ShapeDtypeStruct((), x.dtype))
            return x * 2

        return fn

    tuner = Tuner(0, 1)
    cfgs = ["factory", "compile", "memory", "exhausted", "runtime", "good"]

    assert tuner.autotune(make_fn, (X,), {}, cfgs) == "good"
    assert status_of(tuner) == {
        "factory": "compile",
        "compile": "compile",
        "memory": "memory",
        "exhausted": "memory",
        "runtime": "runtime",
        "good": "ok",
    }
    assert "cannot be traced" in tuner.record.trials[1].message
    assert all(trial.message for trial in tuner.record.trials[:5])
    assert [trial.cfg for trial in tuner.record.failures] == cfgs[:5]


def _fail():
    raise OSError("while running")


def test_a_candidate_that_fails_in_the_race_loses_it():
    """One that runs once and then no more ends with its reason."""

    class Breaking:
        name = "breaking"

        def __init__(self, ran):
            self.ran = ran

        def time(self, call, leaves, calls):
            jax.block_until_ready(call(*leaves))
            if self.ran.log[-1] == "a" and self.ran.log.count("a") > 3:
                raise RuntimeError("worn out")
            return 1.0

    ran = Ran()
    tuner = Tuner(1, 5, clock=Breaking(ran))

    assert tuner.autotune(ran.make_fn, (X,), {}, ["a", "b"]) == "b"
    assert status_of(tuner) == {"a": "runtime", "b": "ok"}
    assert "worn out" in tuner.record.trials[0].message


@pytest.mark.parametrize("candidates", [[], (), iter(())])
def test_no_candidates_is_a_runtime_error(candidates):
    """There is nothing to tune, and the message says so."""
    with pytest.raises(RuntimeError, match="candidates") as caught:
        Tuner().autotune(lambda cfg: jnp.sin, (X,), {}, candidates)

    assert isinstance(caught.value, OpsError)


def test_all_failed_is_a_runtime_error_with_each_reason():
    """Every candidate stands in the message with its own reason."""

    def make_fn(cfg):
        def fn(x):
            raise ValueError(f"{cfg} is impossible")

        return fn

    with pytest.raises(RuntimeError) as caught:
        Tuner().autotune(make_fn, (X,), {}, ["one", "two"])

    assert "one is impossible" in str(caught.value)
    assert "two is impossible" in str(caught.value)


def test_candidates_that_cannot_be_jitted_are_raced_as_they_are():
    """Plain Python among compiled candidates takes part, and the record says so."""
    functions = {"jitted": lambda x: x * 2, "plain": lambda x: x * 2 if x.sum() > 0 else x}
    tuner = Tuner(0, 1)
    tuner.autotune(functions.get, (X,), {}, ["jitted", "plain"])

    assert status_of(tuner) == {"jitted": "ok", "plain": "ok"}
    assert "jit" in tuner.record.trials[1].message


# Where it is called from, and for how long.


@pytest.mark.parametrize("trace", ["jit", "grad", "vmap"])
def test_inside_a_trace_candidates_run_for_real(trace):
    """Tracers become random arrays of their shape, and the winner is a plain value."""
    ran = Ran()
    winners = []

    def function(x):
        winners.append(Tuner(1, 1).autotune(ran.make_fn, (x,), {}, ["a", "b"]))
        return (x * 2).sum()

    {"jit": lambda: jax.jit(function)(X), "grad": lambda: jax.grad(function)(X), "vmap": lambda: jax.vmap(function)(X)}[
        trace
    ]()

    assert winners[0] in ("a", "b")
    assert {"a", "b"} <= set(ran.log)


def test_a_budget_that_is_spent_ends_with_what_there_is():
    """A deadline that has passed before anything is compiled leaves one candidate; the record says so."""
    traced = []

    def make_fn(cfg):
        traced.append(cfg)
        return lambda x: x * 2

    tuner = Tuner(seconds=1e-9)

    assert tuner.autotune(make_fn, (X,), {}, ["a", "b", "c"]) == "a"
    assert status_of(tuner) == {"a": "ok", "b": "timeout", "c": "timeout"}
    assert tuner.record.stop == "deadline"
    assert traced == ["a"]
    assert all(trial.message for trial in tuner.record.trials[1:])


@pytest.fixture
def held():
    """A candidate's part that is not lowered before the test ends."""
    made = Held()
    yield made
    made.release.set()


def enough():
    """Ten times the seconds that this machine, as busy as it is now, takes to tune a candidate."""
    start = time.perf_counter()
    Tuner(0, 1).autotune(lambda n: lambda x: x * n / n, (X,), {}, [2.0, 3.0])
    return 10 * (time.perf_counter() - start)


def test_a_deadline_does_not_wait_for_a_compilation_that_never_ends(held):
    """The best of the others is the answer, and the record says what became of that one and why it stopped."""
    functions = {"quick": lambda x: x * 2, "endless": lambda x: held(x) * 2}
    tuner = Tuner(seconds=enough())

    assert tuner.autotune(functions.get, (X,), {}, ["quick", "endless"]) == "quick"
    assert status_of(tuner) == {"quick": "ok", "endless": "timeout"}
    assert tuner.record.stop == "deadline"


def test_without_the_heuristic_in_time_nothing_is_better(held):
    """What was measured may be slower than it, and tuned must never be slower than untuned."""
    functions = {"heuristic": lambda x: held(x) * 2, "quick": lambda x: x * 2}
    job = TuningJob(functions.get, (X,), {}, list(functions), heuristic_first=True)
    tuner = Tuner(seconds=enough())

    with pytest.raises(OutOfTimeError, match="before the heuristic cfg was measured"):
        tuner.tune(job)
    assert status_of(tuner) == {"heuristic": "timeout", "quick": "ok"}


def test_with_the_heuristic_alone_in_time_nothing_is_tuned(held):
    """Kept as an answer, it would stand for candidates that were never measured; those that fail are another matter."""
    functions = {"heuristic": lambda x: x * 2, "endless": lambda x: held(x) * 2, "wrong": lambda x: x * 3}
    job = TuningJob(functions.get, (X,), {}, list(functions), heuristic_first=True)

    with pytest.raises(OutOfTimeError, match="before any of 1 candidates beside the heuristic cfg was measured"):
        Tuner(seconds=enough()).tune(job)
    del functions["endless"]
    record = Tuner(seconds=enough()).tune(replace(job, candidates=list(functions)))
    assert record.cfg == "heuristic"


@pytest.mark.parametrize("count", [2, 40], ids=["race", "search"])
def test_candidates_that_all_had_no_time_did_not_fail(held, monkeypatch, count):
    """Nothing is wrong with them, no user is told to correct the kernel, and none is waited for beyond the deadline."""
    monkeypatch.setattr("ejkernel.ops.timing.compile_pool._STRAGGLER_SECONDS", 3600.0)
    cfgs = [(n,) for n in range(count)]
    tuner = Tuner(seconds=0.2, strategy=RandomSearch())
    # A caller that waits all the same gets an answer, in the end.
    rescue = threading.Timer(60.0, held.release.set)
    rescue.start()

    with pytest.raises(OutOfTimeError, match="before the heuristic cfg was measured"):
        tuner.tune(TuningJob(lambda n: lambda x: held(x) * n[0], (X,), {}, cfgs, heuristic_first=True))
    rescue.cancel()
    assert not held.release.is_set()
    assert tuner.record.stop == "deadline"
    assert tuner.record.winner is None


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "in a worker"])
@pytest.mark.parametrize("count", [2, 40], ids=["race", "search"])
def test_a_reference_that_is_not_compiled_in_time_ends_the_tuning(held, count, isolate):
    """No candidate can be judged without it, and run as it is it could take as long again: the heuristic cfg stays."""
    cfgs = [(n,) for n in range(count)]

    def reference(x):
        # What calls back cannot be exported, and runs in this process.
        return held(x) * jax.pure_callback(lambda: np.float32(2), jax.ShapeDtypeStruct((), np.float32))

    job = TuningJob(lambda n: lambda x: x * 2 + 0 * n[0], (X,), {}, cfgs, reference=reference, heuristic_first=True)
    tuner = Tuner(seconds=1.0, strategy=RandomSearch(), isolate=isolate)

    with pytest.raises(OutOfTimeError, match="before the heuristic cfg was measured"):
        tuner.tune(job)
    assert not held.release.is_set()


def test_a_compilation_that_never_ends_is_left_behind_without_a_deadline(held, monkeypatch):
    """No thread waits for one that takes many times as long as the others."""
    # Three times that for the third one, which another test may not have compiled before.
    monkeypatch.setattr("ejkernel.ops.timing.compile_pool._STRAGGLER_SECONDS", 1.0)
    functions = {"quick": lambda x: x * 2, "endless": lambda x: held(x) * 2, "other": lambda x: x + x}
    tuner = Tuner(0, 1)

    assert tuner.autotune(functions.get, (X,), {}, ["quick", "endless", "other"]) in ("quick", "other")
    assert status_of(tuner) == {"quick": "ok", "endless": "timeout", "other": "ok"}
    assert tuner.record.stop == "finished"


def test_if_nothing_can_be_compiled_in_time_the_error_says_so(held, monkeypatch):
    """A deadline ends a tuning of which no candidate is ever compiled."""
    monkeypatch.setattr("ejkernel.ops.timing.compile_pool._STRAGGLER_SECONDS", 0.1)

    with pytest.raises(RuntimeError, match="timeout"):
        Tuner(seconds=0.1).autotune(lambda cfg: lambda x: held(x) * cfg, (X,), {}, [1.0, 2.0])


ENDLESS = """
import sys
sys.path.insert(0, {folder!r})
import jax.numpy as jnp
from fakes_tuning import Held
from ejkernel.ops import Tuner

held = Held()
functions = dict(quick=lambda x: x * 2, endless=lambda x: held(x) * 2)
print(Tuner(0, 1, seconds=0.5).autotune(functions.get, (jnp.ones(8),), dict(), ["quick", "endless"]))
"""


def test_a_process_ends_while_a_candidate_still_compiles():
    """The compilation that never ends delays neither the answer nor the exit."""
    with child(ENDLESS.format(folder=str(Path(__file__).parent))) as process:
        out, _ = process.communicate(timeout=240)

    assert (out.strip(), process.returncode) == ("quick", 0)


class Slow:
    """A clock whose every look takes a second of a host time that stands still otherwise."""

    name = "slow"

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now

    def time(self, call, leaves, calls):
        self.now += 1.0
        return 1.0


def test_a_deadline_that_passes_while_candidates_are_timed_keeps_what_there_is(monkeypatch):
    """A candidate that had no turn by then is told as such and cannot win; a tuning overruns by a run, not a round."""
    clock = Slow()
    for name in ("tuning.prepared", "timing.sampler", "tuning.runner", "tuning.compile", "timing.compile_pool"):
        monkeypatch.setattr(f"ejkernel.ops.{name}.time", clock)
    tuner = Tuner(1, 3, clock=clock, seconds=7.5)
    tuner.autotune(lambda cfg: lambda x: x * cfg / cfg, (X,), {}, [float(n) for n in range(2, 12)])
    statuses = [trial.status for trial in tuner.record.trials]

    assert statuses == ["ok"] + ["timeout"] * 9
    assert clock.now - 1000.0 <= 7.5 + 2.0
    assert tuner.record.stop == "deadline"


def test_slow_candidates_have_the_runs_that_were_asked_for(monkeypatch):
    """Without a deadline the winner has its `iters`, however long a run takes."""
    clock = Slow()
    for name in ("tuning.prepared", "timing.sampler", "tuning.runner", "tuning.compile", "timing.compile_pool"):
        monkeypatch.setattr(f"ejkernel.ops.{name}.time", clock)
    tuner = Tuner(1, 5, clock=clock)
    tuner.autotune(lambda cfg: lambda x: x * cfg / cfg, (X,), {}, [2.0, 3.0])

    assert len(tuner.record.trials[tuner.record.winner].samples_s) >= 5
    assert tuner.record.stop == "finished"


def test_without_a_budget_all_are_measured():
    """The record of a tuning that ran to its end says so."""
    tuner, ran = table({"a": 1.0, "b": 2.0})
    tuner.autotune(ran.make_fn, (X,), {}, "ab")

    assert (tuner.record.stop, tuner.record.budget_s) == ("finished", None)
    assert (tuner.record.winner, tuner.record.runner_up) == (0, 1)


def test_one_seed_gives_one_order_of_runs():
    """Two tunings with the same seed and the same times run the same candidates in the same order."""
    orders = []
    for seed in (5, 5, 6):
        tuner, ran = table(dict.fromkeys("abcdef", 1.0), seed=seed, iters=6)
        tuner.autotune(ran.make_fn, (X,), {}, "abcdef")
        orders.append(ran.log)

    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_threads_have_records_of_their_own():
    """`record` is what this thread's latest tuning left, whatever other threads do with the same tuner."""
    tuner = Tuner(0, 1)

    def work(name):
        tuner.autotune(lambda cfg: lambda x: x * 2, (X,), {}, [name])
        return tuner.record.cfg

    with ThreadPoolExecutor(4) as pool:
        names = [f"thread {n}" for n in range(4)]
        assert list(pool.map(work, names)) == names
    assert tuner.record is None


def test_the_arguments_stay_as_they_are():
    """A tuning neither deletes nor changes the caller's arrays."""
    x = jnp.arange(8.0)
    Tuner(1, 1).autotune(lambda cfg: lambda x: x * 2, (x,), {}, ["a", "b"])

    assert x.tolist() == list(range(8))
