"""`Tuner.autotune`: the fastest candidate that is right."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import Ran, TableClock

from ejkernel.ops import OpsError, Tuner
from ejkernel.ops.tuning.job import Job

X = jnp.ones(8)


def table(times, **settings):
    """A tuner whose clock reads a table, and the candidates to give it."""
    ran = Ran()
    return Tuner(clock=TableClock(ran, times), **settings), ran


def status_of(tuner):
    return {str(trial.cfg): trial.status for trial in tuner.record.trials}


# Who wins.


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
    """A candidate ten times slower does not run as often as the winner, and the record says when it went."""
    tuner, ran = table({"a": 10.0, "b": 1.0, "c": 1.05}, iters=8)
    tuner.autotune(ran.make_fn, (X,), {}, "abc")
    slow, winner, close = tuner.record.trials

    assert len(slow.samples_s) < len(winner.samples_s) == len(close.samples_s)
    assert slow.dropped_round == 1
    assert winner.dropped_round is None


# Who is right.


def wrong_tile(x):
    return (x * 2).at[8:16, 16:24].set(0)


WRONG = {
    "another shape": lambda x: (x * 2)[:-1],
    "another rank": lambda x: (x * 2).reshape(-1),
    "another dtype": lambda x: (x * 2).astype(jnp.bfloat16),
    "a NaN": lambda x: (x * 2).at[3, 4].set(jnp.nan),
    "one wrong row": lambda x: (x * 2).at[5].set(x[6] * 2),
    "one wrong tile": wrong_tile,
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
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)
    functions = {"right": lambda x: x * 2, "wrong": WRONG[wrong]}
    tuner = Tuner(clock=ByFunction(x * 2))

    assert tuner.autotune(functions.get, (x,), {}, ["right", "wrong"]) == "right"
    assert status_of(tuner) == {"right": "ok", "wrong": "wrong"}
    assert tuner.record.trials[1].message


def test_a_candidate_that_rounds_otherwise_may_win():
    """What differs by the order of a sum is right."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)
    functions = {"one": lambda x: x.sum(0), "other": lambda x: jnp.cumsum(x[::-1], 0)[-1]}
    tuner = Tuner(0, 1)
    tuner.autotune(functions.get, (x,), {}, ["one", "other"])

    assert status_of(tuner) == {"one": "ok", "other": "ok"}


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

    def with_gradient(factor):
        @jax.custom_vjp
        def fn(x):
            return x * 2

        fn.defvjp(lambda x: (x * 2, None), lambda _, dy: (dy * factor,))
        return fn

    job = Job(with_gradient, (X,), {}, [2.0, 3.0], objective="forward+backward")
    tuner = Tuner(0, 1)
    tuner.tune(job)

    assert status_of(tuner) == {"2.0": "ok", "3.0": "wrong"}
    assert tuner.record.objective == "forward+backward"


# What fails.


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
    """After the deadline no candidate is compiled any more; the first one still answers, and the record says so."""
    tuner = Tuner(seconds=1e-9)

    assert tuner.autotune(lambda cfg: lambda x: x * 2, (X,), {}, ["a", "b", "c"]) == "a"
    assert status_of(tuner) == {"a": "ok", "b": "skipped", "c": "skipped"}
    assert tuner.record.stop == "deadline"


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
