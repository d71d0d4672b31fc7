"""What is compiled and checked in this process, in which order, and which candidates are cut off.

Covers `tuning/builder.py` and `tuning/runner.py`.
"""

from __future__ import annotations

import math
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_tuning import Held

from ejkernel.ops.timing.compile_pool import CompilePool
from ejkernel.ops.timing.program import Staged
from ejkernel.ops.tuning.job import TuningJob, is_abandoned
from ejkernel.ops.tuning.runner import InProcessRunner

X = jnp.arange(1.0, 9.0)


@pytest.fixture(autouse=True, params=[False, True], ids=["compiled first", "pipelined"])
def pipelined(request, monkeypatch):
    """Whether candidates are checked while others compile changes nothing of what follows."""
    made = InProcessRunner.__init__

    def init(runner, *args, **settings):
        made(runner, *args, **{"pipelined": request.param, **settings})

    monkeypatch.setattr(InProcessRunner, "__init__", init)
    return request.param


def runner_of(functions, *args, **job):
    """A runner of these functions, by name, compiled and not yet checked."""
    return compiled(TuningJob(functions.get, args or (X,), {}, list(functions), **job), list(functions))


def compiled(job, cfgs, seed=0, deadline=math.inf, end=math.inf):
    made = InProcessRunner(job, seed=seed, device=jax.devices()[0])
    made.candidates.enter(cfgs)
    made.compile(deadline, end)
    return made


def statuses(found):
    return [trial.status for trial in found.candidates.trials()]


def noting(log, name):
    """Twice the argument; each run leaves a name and what it was given."""

    def note(x):
        log.append((name, np.array(x)))
        return np.float32(2)

    return lambda x: x * jax.pure_callback(note, jax.ShapeDtypeStruct((), np.float32), x)


def test_what_compiles_may_run():
    """Every program that was compiled is there, in the order of the candidates."""
    found = runner_of({"a": lambda x: x * 2, "b": lambda x: x + x, "c": lambda x: x * 4 / 2})
    found.check()

    assert list(found.candidates.running) == [0, 1, 2]
    assert all(trial.compile_s is not None for trial in found.candidates.trials())


def test_random_inputs_are_checked_on_two_sets():
    """Each candidate runs on both, and they are not the same."""
    log = []
    runner_of({name: noting(log, name) for name in "ab"}, jax.ShapeDtypeStruct((8,), jnp.float32)).check()
    runs = {name: [values for given, values in log if given == name] for name in "ab"}

    assert [len(values) for values in runs.values()] == [2, 2]
    assert not np.array_equal(*runs["a"])
    np.testing.assert_array_equal(runs["a"], runs["b"])


def test_the_callers_own_inputs_are_one_set():
    """Where every array has values there is nothing else to draw."""
    log = []
    runner_of({name: noting(log, name) for name in "ab"}).check()

    assert [name for name, _ in log] == ["a", "b"]
    np.testing.assert_array_equal(log[0][1], X)


def test_fresh_floats_are_two_sets_and_integers_stay():
    """With random floats asked for, the caller's integers are in both sets."""
    log = []

    def function(x, index):
        note = jax.pure_callback(
            lambda x, index: log.append((np.array(x), np.array(index))) or np.float32(1),
            jax.ShapeDtypeStruct((), np.float32),
            x,
            index,
        )
        return x[index] * note

    runner_of({"a": function, "b": function}, X, jnp.array([1, 5]), fresh_floats=True).check()

    assert len(log) == 4
    assert len({x.tobytes() for x, _ in log}) == 2
    assert all(index.tolist() == [1, 5] for _, index in log)


def test_examples_of_the_kernel_are_two_sets():
    """A kernel that makes its own inputs is asked twice, with other random numbers."""
    log = []

    def example(rng):
        return (jnp.asarray(rng.standard_normal(8).astype(jnp.float32)),), {}

    runner_of({name: noting(log, name) for name in "ab"}, example=example).check()

    assert len({values.tobytes() for _, values in log}) == 2


def test_one_seed_gives_one_pair_of_inputs():
    """Inputs are reproducible."""

    def drawn(seed):
        log = []
        job = TuningJob(lambda cfg: noting(log, cfg), (jax.ShapeDtypeStruct((8,), jnp.float32),), {}, ["a", "b"])
        compiled(job, ["a", "b"], seed=seed).check()
        return [values.tolist() for _, values in log]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_the_reference_is_run_once_for_each_set():
    """However many candidates there are."""
    log = []
    found = runner_of(
        {name: (lambda x, n=n: x * n * 2 / n) for n, name in enumerate("abc", 1)},
        jax.ShapeDtypeStruct((8,), jnp.float32),
        reference=noting(log, "reference"),
    )
    found.check()

    assert [name for name, _ in log] == ["reference"] * 2
    assert list(found.candidates.running) == [0, 1, 2]


def test_a_reference_that_cannot_be_jitted_runs_as_it_is():
    """It may look at values; what it gives is right all the same."""

    def reference(x):
        return np.asarray(x) * (2 if float(x[0]) == float(x[0]) else 0)

    found = runner_of({"a": lambda x: x * 3, "b": lambda x: x * 2}, reference=reference)
    found.check()

    assert statuses(found) == ["wrong", "ok"]


def test_the_reference_is_one_program():
    """Run as it is, each of its operations would be compiled by itself: seconds on a GPU."""
    traced = []

    def reference(x):
        traced.append(isinstance(x, jax.core.Tracer))
        return x * 2

    found = runner_of({"a": lambda x: x + x}, reference=reference)
    found.check()

    assert traced == [True]


def test_a_reference_is_not_compiled_for_speed(monkeypatch):
    """It runs once for each set of inputs; candidates are compiled as they will run."""
    asked, compiled = {}, Staged.compile

    def note(staged, lowered, *, for_speed=True):
        asked[staged.name.split("_")[0]] = for_speed
        return compiled(staged, lowered, for_speed=for_speed)

    monkeypatch.setattr(Staged, "compile", note)
    # A check waits for what is still being compiled.
    runner_of({"a": lambda x: x * 2}, reference=lambda x: x + x).check()

    assert asked == {"reference": False, "ejk": True}


def test_a_reference_has_a_thread_of_its_own(monkeypatch):
    """Beside a single candidate too: neither waits for the other."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    asked, made = [], CompilePool.__init__

    def count(pool, workers):
        asked.append(workers)
        made(pool, workers)

    monkeypatch.setattr(CompilePool, "__init__", count)
    runner_of({"a": lambda x: x * 2})
    runner_of({"a": lambda x: x * 2}, reference=lambda x: x * 2)

    assert asked == [1, 2]


@pytest.mark.parametrize("in_time", [True, False])
def test_a_reference_is_waited_for_until_the_end_of_the_tuning(monkeypatch, in_time):
    """The time for compiling may be over before it: as long as the tuning's own is not, it decides what is right."""
    held, late = Held(), CompilePool.late

    def waiting(pool, number, until):
        if not in_time:
            return None
        held.release.set()
        return late(pool, number, until)

    monkeypatch.setattr(CompilePool, "late", waiting)
    job = TuningJob(lambda cfg: lambda x: x * 3, (X,), {}, "a", reference=lambda x: held(x) * 2, heuristic_first=True)
    now = time.perf_counter()
    found = compiled(job, "a", deadline=now, end=now + 1200)
    found.check()
    held.release.set()

    assert statuses(found) == ["wrong" if in_time else "timeout"]
    assert in_time or found.candidates.trial(0).message == "the reference was still being compiled when the time was up"
    assert in_time or found.compiler.late


def test_a_tolerance_of_the_kernel_is_the_limit():
    """A kernel may allow more than its dtype, or less."""
    functions = {"right": lambda x: x * 2, "off": lambda x: x * 2.1}
    loose, tight = runner_of(functions, tolerance=0.2), runner_of(functions)
    loose.check()
    tight.check()

    assert (statuses(loose), statuses(tight)) == (["ok", "ok"], ["ok", "wrong"])


def test_the_size_of_the_error_is_kept():
    """The worst element over the reference's root mean square; none where that is no number."""
    functions = {
        "right": lambda x: x * 2,
        "off": lambda x: x * 2.2,
        "infinite": lambda x: x / 0,
    }
    found = runner_of(functions)
    found.check()

    assert found.candidates.trials()[0].error == 0.0
    assert found.candidates.trials()[1].error == pytest.approx(
        0.1 * 8 / np.sqrt(np.mean(np.arange(1.0, 9.0) ** 2)), rel=1e-3
    )
    assert found.candidates.trials()[2].error is None


# When the time is up.


def test_after_the_deadline_one_is_checked():
    """The first that is right may run; the others were not looked at, and cannot win."""
    found = runner_of({name: (lambda x, n=n: x * n * 2 / n) for n, name in enumerate("abc", 1)})
    found.check(-math.inf)

    assert list(found.candidates.running) == [0]
    assert statuses(found) == ["ok", "timeout", "timeout"]
    assert all("time was up" in trial.message for trial in found.candidates.trials()[1:])


def test_after_the_deadline_checking_goes_on_until_one_is_right():
    """A wrong one is no answer."""
    functions = {"wrong": lambda x: x * 3, "right": lambda x: x * 2, "also right": lambda x: x + x}
    found = runner_of(functions, reference=lambda x: x * 2)
    found.check(-math.inf)

    assert statuses(found) == ["wrong", "ok", "timeout"]


def test_after_the_deadline_one_is_traced():
    """Tracing takes time as well."""
    traced = []

    def make_fn(cfg):
        traced.append(cfg)
        if cfg == "broken":
            raise ValueError("no such block")
        return lambda x: x * 2

    cfgs = ["broken", "good", "late"]
    found = compiled(TuningJob(make_fn, (X,), {}, cfgs), cfgs, deadline=-math.inf)
    found.check()

    assert traced == ["broken", "good"]
    assert statuses(found) == ["compile", "ok", "timeout"]


# Checking while others compile.


def hold(monkeypatch, step, waits, for_whom):
    """Lets one candidate's compilation wait until the other's is done, or until it is released."""
    done = threading.Event()
    original = getattr(Staged, step)

    def held(staged, *args, **more):
        number = staged.name.rpartition("_")[2]
        if number == str(waits):
            assert done.wait(60)
        try:
            return original(staged, *args, **more)
        finally:
            if number == str(for_whom):
                done.set()

    monkeypatch.setattr(Staged, step, held)
    return done


@pytest.mark.parametrize("pipelined", [True], indirect=True)
def test_candidates_run_while_others_compile(monkeypatch, pipelined):
    """Once all are lowered, the check of the first does not wait for the last compilation."""
    released = hold(monkeypatch, "compile", waits=2, for_whom=None)
    runs = []

    def release(x):
        runs.append(x)
        released.set()
        return np.float32(2)

    def first(x):
        return x * jax.pure_callback(release, jax.ShapeDtypeStruct((), np.float32), x)

    found = runner_of({"a": first, "b": lambda x: x + x, "c": lambda x: x * 4 / 2})
    assert not runs
    found.check()

    assert list(found.candidates.running) == [0, 1, 2], found.candidates.trials()


@pytest.mark.parametrize("pipelined", [True], indirect=True)
def test_one_that_was_left_behind_does_not_hold_up_the_next_batch(monkeypatch, pipelined):
    """The next batch is checked while it compiles, as the first was."""
    monkeypatch.setattr("ejkernel.ops.timing.compile_pool._STRAGGLER_SECONDS", 0.1)
    straggler = hold(monkeypatch, "compile", waits=2, for_whom=None)
    functions = {"a": lambda x: x * 2, "b": lambda x: x + x, "c": lambda x: x * 4 / 2, "d": lambda x: x * 8 / 4}
    found = compiled(TuningJob(functions.get, (X,), {}, list(functions)), ["a", "b", "c"])
    found.check()
    assert statuses(found) == ["ok", "ok", "timeout"]

    # The one of this batch is waited for, also on a busy machine.
    monkeypatch.setattr("ejkernel.ops.timing.compile_pool._STRAGGLER_SECONDS", 300.0)
    released = hold(monkeypatch, "compile", waits=3, for_whom=None)
    found.candidates.enter(["d"])
    # Would wait for ever if it did not return once all of the batch are lowered.
    found.compile(math.inf)
    released.set()
    straggler.set()
    found.check()

    assert list(found.candidates.running) == [0, 1, 3], found.candidates.trials()


def test_the_first_candidate_is_the_reference_however_late_it_comes(monkeypatch):
    """Without a reference no candidate is judged before the first has run: it is the second one that is wrong."""
    hold(monkeypatch, "compile", waits=0, for_whom=1)
    found = runner_of({"a": lambda x: x * 2, "b": lambda x: x * 3, "c": lambda x: x + x})
    found.check()

    assert statuses(found) == ["ok", "wrong", "ok"]


def test_the_first_of_equal_programs_runs_for_all():
    """It is compiled and checked once; the others have its outcome, and say with which candidate they share it."""
    found = runner_of({"a": lambda x: x * 2, "b": lambda x: x * 3, "c": lambda x: x * 2})
    found.check()

    assert list(found.candidates.running) == [0]
    assert statuses(found) == ["ok", "wrong", "ok"]
    assert "same program as 'a'" in found.candidates.trials()[2].message


@pytest.mark.parametrize("is_ahead", [True, False])
def test_what_is_abandoned_is_not_traced_further(is_ahead):
    """The end of a program's budget would else wait for all candidates of a call that will not be measured.

    A kernel inside that one is tuned while it is traced, not ahead: its tuning would be kept without these candidates.
    """
    traced = []

    def make(name):
        traced.append(name)
        return lambda x: x * 2

    made = InProcessRunner(TuningJob(make, (X,), {}, ["a", "b", "c"]), seed=0, device=jax.devices()[0])
    made.candidates.enter(["a", "b", "c"])
    token = is_abandoned.set(lambda: len(traced) == 1)
    try:
        made.begin(math.inf, ahead=is_ahead)
    finally:
        is_abandoned.reset(token)
        made.close()
    assert traced == (["a"] if is_ahead else ["a", "b", "c"])
