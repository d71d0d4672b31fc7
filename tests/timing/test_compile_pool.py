"""Compiling many programs at once: what comes back, and which programs are not waited for."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace

import jax
import pytest
from fakes import child

from ejkernel.ops.timing import compile_pool
from ejkernel.ops.timing.compile_pool import CompilePool, compile_all, workers_for

NEVER = math.inf
LONG_AGO = -math.inf


def outcomes(jobs, *, workers=2, deadline=NEVER):
    return {
        built.number: built.outcome for built in compile_all(list(jobs.items()), workers=workers, deadline=deadline)
    }


@pytest.fixture
def held():
    """A job that does not end before the test does."""
    release = threading.Event()

    def build():
        release.wait()
        return "at last"

    yield build
    release.set()


@pytest.fixture
def impatient(monkeypatch):
    """Stragglers are left behind at once."""
    # Yet a thread that a busy machine leaves aside for a moment is none.
    monkeypatch.setattr(compile_pool, "_STRAGGLER_SECONDS", 0.2)
    monkeypatch.setattr(compile_pool, "_STRAGGLER_TIMES", 0.0)


def test_everything_comes_back_under_its_number():
    """Each job's outcome, whichever thread made it."""
    assert outcomes({n: lambda n=n: f"program {n}" for n in range(20)}) == {n: f"program {n}" for n in range(20)}


def test_one_thread_keeps_the_order():
    """Jobs are taken in the order in which they were given."""
    jobs = [(n, lambda: "program") for n in (3, 1, 2)]

    assert [built.number for built in compile_all(jobs, workers=1, deadline=NEVER)] == [3, 1, 2]


def test_each_comes_as_soon_as_it_ends():
    """A quick one is given while a slow one is still under way."""
    release = threading.Event()

    def slow():
        release.wait()
        return "slow"

    found = compile_all([(0, slow), (1, lambda: "quick")], workers=2, deadline=NEVER)
    first = next(found)
    release.set()

    assert (first.number, first.outcome) == (1, "quick")
    assert [built.outcome for built in found] == ["slow"]


def test_failures_are_outcomes():
    """What a job raises comes back beside the others' programs."""

    def broken():
        raise ValueError("no such block")

    found = {b.number: b for b in compile_all([(0, broken), (1, lambda: "program")], workers=2, deadline=NEVER)}

    assert (found[0].failed, str(found[0].outcome)) == (True, "no such block")
    assert (found[1].failed, found[1].outcome) == (False, "program")


def test_seconds_are_told():
    """How long each took is part of the outcome."""
    (built,) = compile_all([(0, lambda: "program")], workers=1, deadline=NEVER)

    assert built.seconds >= 0


def test_nothing_to_do_ends():
    """No jobs, no outcomes."""
    assert outcomes({}) == {}


def test_they_run_at_the_same_time():
    """Two jobs that wait for each other both end."""
    meeting = threading.Barrier(2, timeout=60)

    assert sorted(outcomes({n: lambda: meeting.wait() for n in range(2)}).values()) == [0, 1]


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_there_are_no_more_threads_than_jobs_and_cores(count):
    """At least one, at most sixteen."""
    workers = workers_for(count)

    assert 1 <= workers <= min(count, 16)


# Settings.


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("precision", ["highest", "bfloat16", None])
def test_settings_of_the_caller_hold_in_the_threads(x64, precision):
    """Threads inherit nothing: 64-bit types, matmul precision and the default device are entered again."""
    device = jax.devices()[-1]

    def settings():
        config = jax.config
        return config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_default_device

    with jax.enable_x64(x64), jax.default_matmul_precision(precision), jax.default_device(device):
        here = settings()
        found = outcomes(dict.fromkeys(range(4), settings))

    assert here == (x64, precision, device)
    assert set(found.values()) == {here}


def test_settings_do_not_reach_the_callers_thread():
    """What the threads enter is theirs alone."""
    before = jax.config.jax_enable_x64
    with jax.enable_x64(True):
        outcomes({0: lambda: "program"})

    assert jax.config.jax_enable_x64 == before


# Programs that are not waited for.


def test_after_the_deadline_one_program_is_still_waited_for(held):
    """There must be one, however late."""
    begun = threading.Event()

    def slow():
        begun.wait()
        return "program"

    def endless():
        begun.set()
        return held()

    assert outcomes({0: slow, 1: endless}, deadline=LONG_AGO) == {0: "program"}


def test_a_reference_is_not_the_program_that_is_waited_for():
    """It is compiled beside the candidates, under a number below zero: one of them there must be, however late."""
    jobs = {-1: lambda: "reference", 0: lambda: time.sleep(0.2) or "program"}

    assert outcomes(jobs, deadline=LONG_AGO, workers=1)[0] == "program"


def test_where_a_program_is_there_already_the_deadline_holds_for_all(held):
    """A later batch of a search has nothing to wait for once the time is up."""
    with CompilePool(1) as pool:
        pool.give(0, held)

        assert list(pool.results(LONG_AGO, usable=True)) == []


def test_a_failure_is_not_the_program_that_is_waited_for(held):
    """After the deadline jobs go on until one succeeds."""

    def broken():
        raise ValueError("no such block")

    found = outcomes({0: broken, 1: broken, 2: lambda: "program", 3: held}, workers=1, deadline=LONG_AGO)

    assert (list(found), found[2]) == ([0, 1, 2], "program")


def test_another_ones_program_is_not_the_one_that_is_waited_for(held):
    """A number says that a job has the same program as that one, which may be still to come."""
    found = outcomes({0: lambda: 1, 1: lambda: "program", 2: held}, workers=1, deadline=LONG_AGO)

    assert found == {0: 1, 1: "program"}


def test_no_job_begins_once_the_caller_has_its_answer():
    """What is still waiting then is never run."""
    ran, release = [], threading.Event()

    def last():
        ran.append(threading.current_thread())
        release.wait()

    found = outcomes({0: lambda: "program", 1: last, **dict.fromkeys(range(2, 9), last)}, workers=1, deadline=LONG_AGO)
    release.set()
    for thread in list(ran):
        thread.join()

    assert found == {0: "program"}
    assert len(ran) <= 1


def test_the_deadline_leaves_behind_what_does_not_end(held):
    """The answer does not wait for a compilation that never ends."""
    assert outcomes({0: lambda: "program", 1: held}, deadline=LONG_AGO) == {0: "program"}


def test_a_straggler_is_left_behind_without_a_deadline(held, impatient):
    """Once half are done, one that takes many times as long as they did is not waited for."""
    assert outcomes({0: lambda: "a", 1: lambda: "b", 2: held}) == {0: "a", 1: "b"}


def test_stragglers_do_not_keep_the_others_waiting(held, impatient):
    """Where every thread is lost to one that does not end, others take their places."""
    found = outcomes({0: held, 1: held, 2: lambda: "a", 3: lambda: "b", 4: lambda: "c"}, workers=2)

    assert found == {2: "a", 3: "b", 4: "c"}


def test_more_stragglers_than_threads_end_with_what_there_is(held, impatient):
    """Where most do not end, the few that did are the answer."""
    jobs = dict.fromkeys(range(8), held)

    assert outcomes({0: lambda: "a", **{n + 1: job for n, job in jobs.items()}}, workers=1) == {0: "a"}


def test_a_deadline_ends_even_where_nothing_can_be_compiled(held, impatient):
    """If nothing at all ends, neither in time nor soon after, there is no program and no waiting."""
    assert outcomes({0: held, 1: held}, deadline=LONG_AGO) == {}


def test_the_last_of_many_do_not_hold_up_the_rest(held, monkeypatch):
    """Of ten and more, the last tenth gets about as long again as the others took together."""
    monkeypatch.setattr(compile_pool, "_LAST_TENTH_SECONDS", 0.5)
    jobs = {n: lambda: "program" for n in range(19)}

    assert outcomes({**jobs, 19: held}).keys() == jobs.keys()


def test_programs_that_were_compiled_ahead_show_how_long_the_others_may_take(monkeypatch):
    """They come at once; the last of many is given the time that theirs took."""
    monkeypatch.setattr(compile_pool, "_LAST_TENTH_SECONDS", 0.0)
    ready, come = SimpleNamespace(ahead_s=60.0), threading.Event()
    jobs = {n: lambda: ready for n in range(19)}
    found = {}
    with CompilePool(20) as pool:
        for number, build in {**jobs, 19: lambda: come.wait() and "program"}.items():
            pool.give(number, build)
        for built in pool.results(math.inf):
            found[built.number] = built.seconds
            if len(found) == 19:
                threading.Timer(0.2, come.set).start()
    assert found.keys() == {*jobs, 19}
    assert min(found[number] for number in jobs) == 60.0


def test_what_stays_is_left_as_well_where_the_pool_is_left_for_good():
    """A tuning that is over needs no reference."""
    free, started, begun = threading.Event(), threading.Event(), []
    with CompilePool(1) as pool:
        pool.give(0, lambda: (started.set(), free.wait()))
        pool.give(-1, lambda: begun.append(-1), stays=True)
        started.wait()
    pool.leave(for_good=True)
    free.set()
    assert pool.late({0}, time.perf_counter() + 240).number == 0
    assert pool.late({-1}, time.perf_counter() + 0.01) is None
    assert not begun


def test_what_stays_is_compiled_although_the_pool_was_left_before_its_turn():
    """A reference is waited for longer than the candidates: it was lost where its thread came a moment too late."""
    free, begun = threading.Event(), []
    with CompilePool(1) as pool:
        pool.give(0, lambda: free.wait() and "first")
        pool.give(1, lambda: begun.append(1))
        pool.give(-1, lambda: begun.append(-1) or "reference", stays=True)
    free.set()
    assert pool.late({-1}, time.perf_counter() + 240).outcome == "reference"
    assert begun == [-1]


ENDLESS = """
import itertools, math, sys, threading
import jax
import jax.numpy as jnp
from ejkernel.ops.timing.compile_pool import compile_all

reached = threading.Event()

def lower(number):
    def fn(x):
        for _ in range(50):
            x = jnp.sin(x @ x) + number
        return x
    return jax.jit(fn).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))

def endless():
    lower(0)
    reached.set()
    {wait}

def quick():
    reached.wait()
    return "program"

print([built.outcome for built in compile_all([(0, endless), (1, quick)], workers=2, deadline=-math.inf)])
sys.exit(3)
"""


@pytest.mark.parametrize(
    "wait",
    ["threading.Event().wait()", "sum(1 for _ in itertools.count())", "[lower(n) for n in itertools.count()]"],
    ids=["waiting", "working", "lowering"],
)
def test_the_process_ends_while_something_still_compiles(wait):
    """A compilation that never ends delays neither the answer nor the exit, and the exit code stays."""
    with child(ENDLESS.format(wait=wait)) as process:
        out, _ = process.communicate(timeout=240)

    assert (out.strip(), process.returncode) == ("['program']", 3)


LEAVING = r"""
import atexit, sys, threading, time
from ejkernel.ops import _jax
from ejkernel.ops.timing.compile_pool import CompilePool, leave_process
atexit.register(print, "farewell")
started = threading.Event()
# As a thread looks that is inside the compiler: its innermost frame is one of this file.
exec(compile("def inside():\n started.set()\n time.sleep(600)", _jax.COMPILER, "exec"))
if sys.argv[1] == "busy":
    CompilePool(1).give(0, inside)
    started.wait()
leave_process(3)
"""


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_a_command_leaves_with_its_status_while_something_compiles(state):
    """No thread waits for the compiler, and what is registered for the end is done all the same, once."""
    with child(LEAVING, state) as process:
        said, _ = process.communicate(timeout=240)

    assert (process.returncode, said) == (3, "farewell\n")


CRASHING = r"""
import sys, threading, time
from ejkernel.ops import _jax
from ejkernel.ops.timing import compile_pool
compile_pool._LAST_SECONDS = 0.0
compile_pool._LAST_COMPILER_SECONDS = float(sys.argv[1])
started = threading.Event()
# As a thread looks that is inside the compiler: its innermost frame is one of this file.
exec(compile("def inside():\n started.set()\n time.sleep(0.5)", _jax.COMPILER, "exec"))
compile_pool.CompilePool(1).give(0, lambda: (inside(), print("compiled", flush=True)))
started.wait()
sys.exit(3)
"""


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="jaxlib 0.12 ends beside a compiler that runs")
@pytest.mark.parametrize("seconds", [240.0, 0.0])
def test_the_end_of_a_process_waits_for_xla_s_compiler(seconds):
    """It would crash the process: its status, and what comes later at its end, would be lost. Not for ever."""
    with child(CRASHING, str(seconds)) as process:
        said, _ = process.communicate(timeout=240)

    assert (process.returncode, "compiled" in said) == (3, bool(seconds))
