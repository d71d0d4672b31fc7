"""Programs of the next tuning are compiled while this one is measured.

Covers `tuning/worker/delivered.py`, `tuning/worker/executables.py` and `tuning/worker/prepare.py`.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.programs import trace_ahead
from ejkernel.ops.timing.inputs import flatten_call
from ejkernel.ops.timing.program import Staged, stage
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.runner import InProcessRunner
from ejkernel.ops.tuning.worker import main
from ejkernel.ops.tuning.worker.ahead_compiler import AheadCompiler
from ejkernel.ops.tuning.worker.delivered import Deliveries
from ejkernel.ops.tuning.worker.executables import compiled, loaded
from ejkernel.ops.tuning.worker.export import export
from ejkernel.ops.tuning.worker.main import ImportingBuilder, Worker, WorkerBench
from ejkernel.ops.tuning.worker.protocol import Message

X = jnp.arange(6.0).reshape(2, 3)


def exported(fn, *args):
    """A program as bytes."""
    return bytes(jax.export.export(jax.jit(fn))(*args).serialize())


@pytest.fixture
def ahead():
    """One that has begun."""
    made = AheadCompiler()
    made.begin()
    yield made
    ended(made)


def ended(ahead):
    """Nothing is compiled any more."""
    ahead.hold()
    for future in list(ahead._begun.values()):
        future.exception()


def given(ahead, data):
    """A program that a thread has begun with."""
    ahead.give(data)
    while data not in ahead._begun:
        pass


def test_a_program_is_compiled_and_taken_once(ahead):
    """It computes what was exported."""
    data = exported(lambda x, y: [x + y], X, X)
    given(ahead, data)
    found = ahead.take(data, for_speed=True)

    assert found.arguments == 2
    np.testing.assert_array_equal(found.executable(X, X)[0], 2 * X)
    assert ahead.take(data, for_speed=True) is None


def test_a_program_with_products_is_compiled_quickly_and_serves_no_other_purpose(ahead):
    """For speed the compiler would run it on the device."""
    data = exported(lambda x: [x @ x.T], X)
    for wanted, is_there in ((False, True), (True, False)):
        given(ahead, data)
        assert (ahead.take(data, for_speed=wanted) is not None) == is_there


def test_nothing_is_compiled_before_the_worker_has_begun():
    """It has no device and no settings yet."""
    ahead = AheadCompiler()
    data = exported(lambda x: [x], X)
    ahead.give(data)
    assert ahead.take(data, for_speed=True) is None


def test_what_cannot_be_compiled_is_left_to_its_tuning(ahead):
    """That says why."""
    given(ahead, b"no program")
    assert ahead.take(b"no program", for_speed=True) is None


def test_what_was_not_begun_is_not_waited_for():
    """The tuning compiles it itself."""
    held = threading.Event()

    def load(data):
        held.wait()
        return loaded(data)

    ahead = AheadCompiler(load)
    ahead.begin()
    programs = [exported(lambda x, n=n: [x * n], X) for n in range(64)]
    given(ahead, programs[0])
    for data in programs[1:]:
        ahead.give(data)
    assert ahead.take(programs[-1], for_speed=True) is None
    ahead.hold()
    held.set()
    assert ahead.take(programs[0], for_speed=True) is not None
    ended(ahead)


def test_a_reference_that_was_not_begun_is_not_waited_for():
    """Threads may be busy with candidates of later tunings, one of which may never be compiled."""
    held, busy = threading.Event(), threading.Semaphore(0)

    def load(data):
        busy.release()
        held.wait()
        return loaded(data)

    ahead = AheadCompiler(load)
    ahead.begin()
    threads = max(1, (os.cpu_count() or 2) // 2)
    for n in range(threads):
        ahead.give(exported(lambda x, n=n: [x * n], X))
    for _ in range(threads):
        busy.acquire()
    reference = exported(lambda x: [x - 1], X)
    ahead.give(reference, at_once=True)
    assert ahead.take(reference) is None
    assert not ahead._at_once
    held.set()
    ended(ahead)


def test_a_reference_goes_before_candidates_and_does_not_wait_for_the_tuning_at_work(ahead):
    """It is small, and the next tuning needs it first."""
    candidate, reference = (exported(lambda x, n=n: [x * n], X) for n in (2.0, 3.0))
    ahead.hold()
    ahead.give(candidate)
    ahead.give(reference, at_once=True)
    while reference not in ahead._begun:
        pass
    assert candidate not in ahead._begun
    np.testing.assert_array_equal(ahead.take(reference).executable(X)[0], X * 3)


def test_what_no_tuning_has_taken_is_let_go_in_the_end(ahead):
    """Programs that are given while one is measured are of the next few."""
    data = exported(lambda x: [x], X)
    ahead.give(data)
    for _ in range(trace_ahead.DEPTH + 1):
        ahead.forget()
        assert data in ahead._given
    ahead.forget()
    assert not ahead._given
    assert ahead.take(data, for_speed=True) is None


def test_what_was_not_begun_is_let_go_too(ahead):
    """It never is."""
    data = exported(lambda x: [x], X)
    ahead.hold()
    ahead.give(data)
    for _ in range(trace_ahead.DEPTH + 2):
        ahead.forget()
    assert not ahead._waiting
    assert not ahead._given


def test_nothing_is_begun_with_while_the_tuning_at_work_compiles(ahead):
    """Its programs and these would wait for each other; one that is asked for meanwhile is not waited for."""
    first, second = (exported(lambda x, n=n: [x * n], X) for n in (2.0, 3.0))
    ahead.hold()
    ahead.give(first)
    ahead.give(second)
    assert ahead.take(first, for_speed=True) is None
    assert not ahead._begun
    ahead.go()
    while second not in ahead._begun:
        pass
    found = ahead.take(second, for_speed=True)
    assert (found.executable(X)[0] == X * 3).all()
    assert found.seconds > 0


@pytest.fixture
def importing(ahead):
    """A builder of two programs, one with a product."""
    programs = {n: exported(lambda x, n=n: [x @ x.T if n else x + 1], X) for n in range(2)}
    about = {"outputs": 1, "objective": "forward"}
    known = {
        n: (data, {"number": n, "compiler_timing": "products" if n else "", **about}) for n, data in programs.items()
    }
    return ImportingBuilder(known, ahead, Deliveries(), one_by_one=False)


def test_programs_behind_the_first_are_neither_traced_nor_lowered_before_they_are_compiled(importing):
    """One after the other that takes seconds; what was compiled ahead needs none of it."""
    assert importing.ready_made(0, "first", math.inf) is None
    traced = importing.traced(Staged("first", "forward", "", None, lambda executable: executable), 0)
    second = importing.ready_made(1, "second", math.inf)
    lowered, text = importing.lower(second)
    assert (traced.traced, second.traced, lowered, text) == (None, None, second, "1")
    assert importing.compiler_timing(traced, None) == ""
    assert importing.compiler_timing(second, lowered) == "products"
    for for_speed in (False, True):
        made = importing.build(second, lowered, for_speed=for_speed)
        assert made.for_speed is for_speed
        assert (made.call(X, "a cotangent")[0] == X @ X.T).all()


@pytest.mark.parametrize("beside_others", [True, False])
def test_a_worker_beside_processes_that_compile_says_so_to_the_compiler(importing, monkeypatch, beside_others):
    """To choose among kernels for products by timing needs an idle machine."""
    told = []
    monkeypatch.setattr(main, "compiled", lambda data, **how: told.append(how) or compiled(data))
    importing.beside_others = beside_others
    importing.traced(Staged("first", "forward", "", None, lambda executable: executable), 0)
    importing.build(importing.ready_made(1, "second", math.inf), None)
    assert told == [{"for_speed": True, "beside_others": beside_others}]


def test_a_program_that_was_compiled_ahead_is_taken(importing, ahead, monkeypatch):
    """It is compiled once."""
    data = importing.programs[0][0]
    ahead.give(data)
    while data not in ahead._begun or not ahead._begun[data].done():
        pass
    monkeypatch.setattr(main, "compiled", lambda data, **how: pytest.fail("compiled once more"))
    importing.traced(Staged("first", "forward", "", None, lambda executable: executable), 0)
    staged = importing.ready_made(0, "again", math.inf)
    made = importing.build(staged, staged)
    assert (made.call(X)[0] == X + 1).all()
    assert made.ahead_s > 0


@pytest.mark.skipif(not hasattr(os, "setpriority"), reason="threads have no priority here")
def test_the_tuning_at_work_goes_before_programs_that_are_compiled_ahead():
    """Their threads have a lower priority than this one."""
    seen = queue.SimpleQueue()

    def load(data):
        seen.put(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return loaded(data)

    ahead = AheadCompiler(load)
    ahead.begin()
    # As in a worker, where another thread takes in what is given.
    giving = threading.Thread(target=given, args=(ahead, exported(lambda x: [x], X)))
    giving.start()
    giving.join()
    assert seen.get() == min(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + 5, 19)
    ended(ahead)


@pytest.mark.parametrize(("again", "told"), [(False, ["forget", "hold"]), (True, ["hold"])])
def test_a_tuning_that_is_sent_again_is_the_same_one(again, told):
    """With cotangents, which the first program with gradients shows: later tunings' programs are not a turn older."""
    seen = []
    ahead = SimpleNamespace(forget=lambda: seen.append("forget"), hold=lambda: seen.append("hold"))
    head = {"verb": "tuning", "again": again, "sets": [], "expected": [], "tolerance": None}
    Worker(None, ahead).obey(Message(head, []))
    assert seen == told


@pytest.mark.parametrize(("count", "given"), [(2, True), (1, False)])
def test_the_first_of_several_shows_how_candidates_are_compared(count, given):
    """Though the others have not come yet; one alone is compared with nothing."""
    runner = InProcessRunner(TuningJob(lambda cfg: lambda x: x * cfg, (X,), {}, ()), seed=0, device=jax.devices()[0])
    runner.compiler.open(count)
    [place] = runner.candidates.enter([2.0])
    runner.compiler.add(place)
    assert runner.compiler._checks_given is given
    runner.close()


@pytest.mark.parametrize(("fn", "is_timed"), [(lambda x: x @ x.T, True), (lambda x: x + 1, False)])
def test_an_exported_program_says_whether_its_compiler_runs_parts_of_it(fn, is_timed):
    """The process that gets it need not lower it to know."""
    staged = stage(fn, flatten_call((X,), {}), [X], "forward")
    assert bool(export(staged, "cpu", ()).compiler_timing) is is_timed


@pytest.mark.parametrize(("kept", "needed"), [(7, (0,)), (None, ())])
def test_a_worker_waits_for_the_heuristic_and_then_lets_programs_of_later_tunings_be_compiled(kept, needed):
    """Among programs that were compiled ahead it is the slowest, since its products are timed."""
    told = []
    compiler = SimpleNamespace(until=lambda deadline, *, needed: told.append(("until", needed)))
    runner = SimpleNamespace(
        compiler=compiler,
        candidates=SimpleNamespace(runs_as=lambda place: place, runs=lambda place: True),
        wait=lambda: told.append("wait"),
        check=lambda until: told.append("check"),
        race=lambda *args, **how: told.append("race"),
    )
    bench = WorkerBench.__new__(WorkerBench)
    bench._made, bench._is_open, bench._places = runner, True, {7: 0}
    bench._ahead = SimpleNamespace(go=lambda: told.append("go"))
    bench._delivered = SimpleNamespace(stop_waiting=lambda: told.append("stop waiting"))
    bench.obey("run", {"runners": [7], "looks": None, "kept": kept, "seed": 0, "seconds": 10.0}, [])
    assert told == [("until", needed), "wait", "check", "stop waiting", "go", "race"]


def test_programs_wait_while_those_at_work_are_compiled_once_more(ahead):
    """And go on behind that."""
    data = exported(lambda x: [x - 1], X)
    with ahead.held():
        ahead.give(data)
        assert ahead.take(data, for_speed=True) is None
        ahead.give(data)
        assert data not in ahead._begun
    while data not in ahead._begun:
        pass
    np.testing.assert_array_equal(ahead.take(data, for_speed=True).executable(X)[0], X - 1)
