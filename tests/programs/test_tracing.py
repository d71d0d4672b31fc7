"""Candidates that other processes trace: taken where they are the same programs, and never believed where not.

Covers `programs/tracing/launch.py`, `programs/tracing/tasks.py`, `programs/tracing/tracer.py`,
`programs/tracing/tracers.py` and `tuning/worker/tracing.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import traced_kernels
from traced_kernels import Doubling, Outer, Training

from ejkernel.ops import (
    AutotuneOptions,
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Tuner,
    autotune,
)
from ejkernel.ops.core.abstract import abstractify
from ejkernel.ops.core.device import default_device
from ejkernel.ops.core.errors import SettingError
from ejkernel.ops.core.request import ask
from ejkernel.ops.core.trace_context import TraceContext
from ejkernel.ops.execution import signatures
from ejkernel.ops.programs.pool.task import AskedCall
from ejkernel.ops.programs.tracing import tracer
from ejkernel.ops.programs.tracing import tracers as tracers_module
from ejkernel.ops.programs.tracing.launch import process_count
from ejkernel.ops.programs.tracing.tasks import CompileTask, TaskOrder, TraceTask
from ejkernel.ops.programs.tracing.tracers import Tracers
from ejkernel.ops.settings import Settings
from ejkernel.ops.tuning.tuner import IsolationWarning
from ejkernel.ops.tuning.worker import session
from ejkernel.ops.tuning.worker.delivered import Delivery
from ejkernel.ops.tuning.worker.export import PortableProgram
from ejkernel.ops.tuning.worker.limits import Isolation
from ejkernel.ops.tuning.worker.protocol import Message
from ejkernel.ops.tuning.worker.runner import WorkerRunner, worker_settings
from ejkernel.ops.tuning.worker.session import _deliver
from ejkernel.ops.tuning.worker.tracing import ReadyMade, StillTracing, TracerGone, tracing_in_force

X = jnp.arange(1.0, 9.0)
# Tests that share a process have calls of their own.
_SIZES = itertools.count(16)


@pytest.fixture(scope="module")
def shared():
    """One process that traces for several tests."""
    made = Tracers(worker_settings(default_device(), Isolation()), 1)
    yield made
    made.close()


@pytest.fixture
def x():
    """An argument that no other test has."""
    return jnp.arange(1.0, 1.0 + next(_SIZES))


@pytest.fixture
def taken(monkeypatch):
    """The cfgs that tunings of this process took from another one, and those that they traced themselves."""
    found = {"elsewhere": [], "here": []}
    staged = ReadyMade.staged

    def noting(self, cfg, name, until):
        made = staged(self, cfg, name, until)
        found["here" if made is None else "elsewhere"].append(cfg)
        return made

    monkeypatch.setattr(ReadyMade, "staged", noting)
    return found


@contextlib.contextmanager
def held(tracers):
    """None of its processes gets a candidate."""
    following = tracers._next
    gate = threading.Event()

    def waiting(at_work):
        gate.wait()
        return following(at_work)

    tracers._next = waiting
    try:
        yield
    finally:
        gate.set()


@pytest.fixture
def tracers():
    """One process that traces."""
    made = Tracers(worker_settings(default_device(), Isolation()), 1)
    yield made
    made.close()


def wanted(tracers, kernel, *cfgs, x=X, objective="forward"):
    """The call of a kernel with these candidates traced, or out."""
    inv = Invocation(kernel.op_id, (x,), {})
    key = ask(inv, kernel, objective).key
    bare = Invocation(kernel.op_id, abstractify((x,)), {})
    tracers.want(AskedCall(key, signatures.written(kernel, bare, TraceContext.now()), objective), cfgs)
    call = tracers.call(key, objective)
    for cfg in cfgs:
        tracers.wait(tracers.task(call.name, cfg), math.inf)
    return call


def tuned(tracers, kernel, candidates, x, *, both=False):
    """The record of a tuning with a worker, which may take what is traced elsewhere."""
    selector = ConfigSelectorChain(ConfigCache(), AutotunePolicy(validate_backward=both), Tuner(iters=1, isolate=True))
    kernel.candidate_cfgs = lambda inv: candidates
    token = tracing_in_force.set(tracers)
    try:
        options = AutotuneOptions(selector=selector, progress=False, objective="auto")
        result = autotune([(kernel, Invocation(kernel.op_id, (x,), {}))], tuning=options)
    finally:
        del kernel.candidate_cfgs
        tracing_in_force.reset(token)
    return result.entries[0].record


@pytest.mark.parametrize(("kernel", "both"), [(Doubling(), False), (Training(), True)])
def test_a_tuning_takes_what_another_process_traced(shared, taken, x, kernel, both):
    """All but the first candidate, which is traced here to see that both processes make the same program of it."""
    objective = "forward+backward" if both else "forward"
    wanted(shared, kernel, "a", "b", "c", x=x, objective=objective)
    record = tuned(shared, kernel, ["a", "b", "c"], x, both=both)
    assert taken == {"here": ["a"], "elsewhere": ["b", "c"]}
    assert record.objective == objective
    assert [trial.status for trial in record.trials] == ["ok"] * 3


def test_the_first_candidate_is_left_with_processes_that_have_not_begun(x):
    """They trace it too: without theirs there would be nothing to compare, and all would be traced here."""
    made = Tracers(worker_settings(default_device(), Isolation()), 1)
    try:
        with held(made):
            inv = Invocation("traced.doubling", (x,), {})
            key = ask(inv, Doubling(), "forward").key
            bare = Invocation("traced.doubling", abstractify((x,)), {})
            made.want(AskedCall(key, signatures.written(Doubling(), bare, TraceContext.now())), ["a", "b"])
            ready = ReadyMade(made.call(key, "forward"))
            assert ready.staged("a", "a", math.inf) is None
        task = made.task(ready.call.name, "a")
        made.wait(task, math.inf)
        assert task.found is not None
    finally:
        made.close()


@pytest.fixture
def many(monkeypatch, x):
    """A process that counts as many, and gets no candidate until it is released; and a call with two of them."""
    monkeypatch.setattr(tracers_module, "_MANY", 1)
    made = Tracers(worker_settings(default_device(), Isolation()), 1)
    key = ask(Invocation("traced.doubling", (x,), {}), Doubling(), "forward").key
    text = signatures.written(Doubling(), Invocation("traced.doubling", abstractify((x,)), {}), TraceContext.now())
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(made))
        while not made._ready:
            time.sleep(0.001)
        made.want(AskedCall(key, text), ["a", "b"])
        yield SimpleNamespace(tracers=made, call=made.call(key, "forward"), release=stack.close)
    made.close()


def test_a_candidate_is_waited_for_where_many_processes_trace(many):
    """It comes from one of them as fast as it would be traced here, and this process has its own work."""
    releasing = threading.Timer(0.05, many.release)
    releasing.start()
    assert many.call.peek("a", math.inf) is not None
    assert many.call.program("b", math.inf) is not None
    releasing.join()


def test_candidates_of_a_call_are_waited_for_in_vain_once(many, monkeypatch):
    """The processes have other work, or one does not end: what they have not begun with is traced here."""
    monkeypatch.setattr(tracers_module, "_PATIENCE", 0.01)
    assert many.call.peek("a", math.inf) is None
    monkeypatch.setattr(tracers_module, "_PATIENCE", 1e9)
    assert many.call.peek("a", math.inf) is None
    assert many.call.program("b", math.inf) is None


def test_nothing_is_traced_here_for_a_tuning_that_is_over(many):
    """A candidate that was waited for does not come any more, and is not needed."""
    closing = threading.Thread(target=lambda: (time.sleep(0.05), many.release(), many.tracers.close()))
    many.tracers._waiting.clear()
    closing.start()
    with pytest.raises(StillTracing):
        many.call.program("a", math.inf)
    closing.join()


@pytest.mark.parametrize("room", [1 << 20, 0])
def test_a_program_is_kept_for_a_second_tuning_while_there_is_room(shared, x, monkeypatch, room):
    """A call may be tuned once more in what is left of a budget."""
    monkeypatch.setattr(tracers_module, "_MOST_KEPT", room + shared._kept)
    call = wanted(shared, Doubling(), "a", x=x)
    first, second = (call.program("a", math.inf) for _ in range(2))
    assert first is not None
    assert second is (first if room else None)


def test_another_program_elsewhere_is_not_believed(shared, taken, x, monkeypatch):
    """A value that only this process has changed shows in the first candidate: all are traced here."""
    wanted(shared, Doubling(), "a", "b", "c", x=x)
    monkeypatch.setattr(traced_kernels, "FACTOR", 3.0)
    record = tuned(shared, Doubling(), ["a", "b", "c"], x)
    assert taken == {"here": ["a", "b", "c"], "elsewhere": []}
    assert [trial.status for trial in record.trials] == ["ok"] * 3


def test_equal_programs_of_two_candidates_are_timed_once(shared, x):
    """Also where they come from another process: their texts are equal."""
    wanted(shared, Doubling(), "a", "b", "same", x=x)
    record = tuned(shared, Doubling(), ["a", "b", "same"], x)
    assert [trial.status for trial in record.trials] == ["ok", "ok", "ok"]
    assert record.trials[1].samples_s == record.trials[2].samples_s
    assert record.trials[1].samples_s


@pytest.fixture
def compiling():
    """One process that traces and compiles.

    It takes nothing from files of earlier runs: on a CPU what was loaded from there cannot be handed on.
    """
    settings = worker_settings(default_device(), Isolation())
    settings["settings"]["jax_enable_compilation_cache"] = False
    made = Tracers(settings, 1, compiles=True)
    yield made
    made.close()


@pytest.mark.parametrize(("kernel", "both"), [(Doubling(), False), (Training(), True)])
def test_a_worker_loads_what_another_process_compiled(compiling, x, kernel, both, monkeypatch):
    """Every candidate is raced; the first is compiled by the worker. What was compiled is let go with its call."""
    delivered = []
    monkeypatch.setattr(session, "_deliver", lambda *args: (delivered.append(args[2].result()), _deliver(*args)))
    call = wanted(compiling, kernel, "a", "b", "c", x=x, objective="forward+backward" if both else "forward")
    record = tuned(compiling, kernel, ["a", "b", "c"], x, both=both)
    assert [trial.status for trial in record.trials] == ["ok"] * 3
    assert all(one.data and not one.why for one in delivered)
    assert len(delivered) == 2
    assert not compiling._calls[call.name].programs


def test_a_program_that_cannot_be_compiled_elsewhere_is_compiled_by_the_worker(compiling, x):
    """What a process refuses is delivered as nothing."""
    call = wanted(compiling, Doubling(), "a", x=x)
    assert call.executable(b"no program", quickly=False).result(60) == Delivery()


@pytest.mark.parametrize(("number", "why"), [(signal.SIGKILL, ""), (signal.SIGSEGV, "SIGSEGV")])
def test_a_program_that_takes_two_processes_down_is_out_unless_they_were_killed(compiling, x, number, why, monkeypatch):
    """The system kills these first for want of memory: then the worker tries it, and its watchdog decides."""
    call = wanted(compiling, Doubling(), "a", x=x)
    sending = compiling._send

    def send(process, task, known):
        # Before it hears of the program: it might refuse it first.
        os.kill(process.pid, number)
        sending(process, task, known)

    monkeypatch.setattr(compiling, "_send", send)
    found = call.executable(b"no program", quickly=False).result(60)
    assert not found.data
    assert why in found.why
    assert bool(found.why) == bool(why)


def test_a_process_that_does_not_come_to_an_end_is_ended_and_others_go_on(compiling, x, monkeypatch):
    """One that never ends would keep all that wait behind it: the worker tries it."""
    call = wanted(compiling, Doubling(), "a", x=x)
    data = call.peek("a", 0.0).data
    sending = compiling._send

    def send(process, task, known):
        if task.data != data:
            # Nothing ever comes back.
            monkeypatch.setattr(tracers_module, "_LONGEST_TASK", 0.1)
            return
        monkeypatch.setattr(tracers_module, "_LONGEST_TASK", 120.0)
        sending(process, task, known)

    monkeypatch.setattr(compiling, "_send", send)
    stuck, good = (call.executable(one, quickly=False) for one in (b"never ends", data))
    assert stuck.result(60) == Delivery()
    assert good.result(60).data


def test_a_candidate_whose_trace_does_not_end_twice_is_out(tracers, x, monkeypatch):
    """It is named with the reason."""
    monkeypatch.setattr(tracers_module, "_LONGEST_TASK", 0.1)
    monkeypatch.setattr(tracers, "_send", lambda process, task, known: None)
    call = wanted(tracers, Doubling(), "a", x=x)
    with pytest.raises(TracerGone, match=r"at work for over 0\.1 s"):
        call.program("a", math.inf)


def test_a_process_that_ended_with_nothing_to_do_is_no_candidates_fault(compiling, x):
    """Another process goes on with the candidate."""
    call = wanted(compiling, Doubling(), "a", x=x)
    for other in ("b", "c"):
        [process] = compiling._processes
        os.kill(process.pid, signal.SIGKILL)
        while process.is_alive():
            time.sleep(0.001)
        call = wanted(compiling, Doubling(), other, x=x)
        assert call.peek(other, 0.0) is not None
        assert not compiling.task(call.name, other).again


def test_programs_are_compiled_once_enough_of_them_wait():
    """A tuning without time for all candidates would else end with all of them traced and none compiled."""
    order = TaskOrder(most_programs=2)
    order.begin("b")
    for number in range(4):
        order.add(TraceTask(number, "a", number))
        order.add(TraceTask(10 + number, "b", number))
    order.add(CompileTask(20, "b", b"", quickly=False))
    assert order.next(()).number == 10
    order.add(CompileTask(21, "b", b"", quickly=False))
    assert [order.next(()).number for _ in range(6)] == [20, 11, 12, 13, 21, 0]
    order.add(CompileTask(22, "a", b"", quickly=False))
    assert order.next(()).number == 1


def test_candidates_that_a_tuning_has_no_time_for_are_not_traced(shared, x):
    """Once it has gone through its candidates, processes compile what is left."""
    call = wanted(shared, Doubling(), x=x)
    shared._calls[call.name].tasks["late"] = late = TraceTask(0, call.name, "late")
    assert [trial.status for trial in tuned(shared, Doubling(), ["a", "b"], x).trials] == ["ok", "ok"]
    assert late.state == "done"


@pytest.mark.parametrize(
    ("number", "ahead", "is_done", "waits"),
    [(1, False, False, True), (0, False, True, False), (0, True, False, False), (0, True, True, True)],
)
def test_the_heuristic_waits_for_no_other_process(number, ahead, is_done, waits):
    """Without it nothing is known to be faster: the worker compiles it where it was not compiled ahead."""
    coming = Future()
    if is_done:
        coming.set_result(Delivery(b"an executable"))
    call = SimpleNamespace(executable=lambda data, *, quickly: coming)
    runner = WorkerRunner.__new__(WorkerRunner)
    runner._builder = SimpleNamespace(elsewhere=ReadyMade(call))
    runner._settings, runner._holds = {"platform": "gpu"}, ahead
    assert (runner._delivered(number, PortableProgram(b"", (), 1, None)) is coming) is waits


@pytest.mark.parametrize(("platform", "quickly"), [("gpu", True), ("tpu", False)])
def test_products_are_compiled_quickly_where_the_worker_asks_for_it(platform, quickly):
    """What was compiled in another way than asked for would be compiled again."""
    asked = []
    call = SimpleNamespace(executable=lambda data, *, quickly: asked.append(quickly))
    runner = WorkerRunner.__new__(WorkerRunner)
    runner._builder, runner._settings = SimpleNamespace(elsewhere=ReadyMade(call)), {"platform": platform}
    runner._compiled_elsewhere(1, PortableProgram(b"", (), 1, None, compiler_timing="products"))
    assert asked == [quickly]


def test_nothing_more_is_traced_for_a_call_that_is_tuned(x):
    """Its time was up, say: candidates of the next call come first."""
    made = Tracers(worker_settings(default_device(), Isolation()), 0, compiles=True)
    made._left = 1
    key = ask(Invocation("traced.doubling", (x,), {}), Doubling(), "forward").key
    made.want(AskedCall(key, {}), ["a", "b"])
    call = made.call(key, "forward")
    coming = call.executable(b"a program", quickly=False)
    call.let_go()
    assert not made._waiting
    assert coming.result(0) == Delivery()
    assert call.program("a", math.inf) is None


def test_executables_are_not_waited_for_once_no_process_is_left(compiling, x):
    """The worker compiles them."""
    call = wanted(compiling, Doubling(), "a", x=x)
    with held(compiling):
        coming = call.executable(b"a program", quickly=False)
        closing = threading.Thread(target=compiling.close)
        closing.start()
        assert coming.result(60) == Delivery()
    closing.join()
    assert call.executable(b"another", quickly=False) is None


def test_a_candidate_that_takes_its_process_down_is_out(tracers):
    """It is named, and another process goes on; once may be chance, so that it is out the second time."""
    call = wanted(tracers, Doubling(), "dies", "killed", "a")
    with pytest.raises(TracerGone, match="SIGSEGV"):
        call.program("dies", math.inf)
    with pytest.raises(TracerGone, match="SIGKILL"):
        call.program("killed", math.inf)
    assert all(tracers.task(call.name, name).again for name in ("dies", "killed"))
    assert call.program("a", math.inf) is not None
    assert tracers.failures == []


def test_what_a_process_refuses_is_traced_here(shared, x):
    """A kernel that calls another one is: the tuning process chooses for that one. So is a candidate that raises."""
    assert wanted(shared, Outer(), "a", x=x).peek("a", 0.0) is None
    assert wanted(shared, Doubling(), "raises", x=x).program("raises", math.inf) is None


def test_outputs_of_another_structure_are_made_here(shared, taken, x):
    """And are found to be wrong there."""
    wanted(shared, Doubling(), "a", "pair", "b", x=x)
    record = tuned(shared, Doubling(), ["a", "pair", "b"], x)
    assert taken == {"here": ["a", "pair"], "elsewhere": ["b"]}
    assert [trial.status for trial in record.trials] == ["ok", "wrong", "ok"]


def test_what_no_process_has_begun_with_is_traced_here():
    """Nothing waits for a process that is not there yet."""
    tracers = Tracers(worker_settings(default_device(), Isolation()), 0)
    key = ask(Invocation("traced.doubling", (X,), {}), Doubling(), "forward").key
    tracers.want(AskedCall(key, {}), ["a"])
    assert tracers.call(key, "forward") is None
    task = tracers.task('["' + '", "'.join([*key, "forward"]) + '"]', "a")
    assert tracers.withdraw(task)
    assert not tracers.withdraw(task)


def test_a_candidate_that_is_still_traced_when_the_time_is_up_is_not_waited_for(shared, x):
    """The tuning goes on with those that are there."""
    call = wanted(shared, Doubling(), "a", x=x)
    task = shared.task(call.name, "a")
    task.state = "begun"
    with pytest.raises(StillTracing):
        call.program("a", time.perf_counter())


def test_no_process_is_left(tracers):
    """Not even one that was still starting."""
    while not tracers._processes:
        time.sleep(0.001)
    pids = {process.pid for process in tracers._processes}
    tracers.close()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert tracers.failures == []


@pytest.mark.parametrize(
    ("platform", "processors", "gigabytes", "count"),
    [
        ("cpu", 16, 80, 0),
        ("gpu", 16, 80, 12),
        ("gpu", 64, 80, 12),
        ("gpu", 8, 80, 4),
        ("gpu", 5, 80, 0),
        ("gpu", 16, 16, 4),
    ],
)
def test_processes_trace_where_the_device_is_not_the_processor(monkeypatch, platform, processors, gigabytes, count):
    """All but four processors, and no more than a GPU's memory has room for. The setting has the last word."""
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    stats = {"bytes_limit": gigabytes << 30, "bytes_in_use": 0}
    calls = [SimpleNamespace(device=SimpleNamespace(platform=platform, memory_stats=lambda: stats))]
    monkeypatch.delenv("EJKERNEL_OPS_TRACERS", raising=False)
    assert process_count(calls) == count
    monkeypatch.setenv("EJKERNEL_OPS_TRACERS", "3")
    assert process_count(calls) == 3


def test_autotune_has_its_calls_traced(monkeypatch):
    """Each with its candidates; what no process traces is traced here."""
    asked = []
    monkeypatch.setattr(Tracers, "want", lambda self, call, cfgs: asked.append((call.key.op_id, cfgs)))
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(iters=1)))
    options = AutotuneOptions(progress=False, again=True)
    monkeypatch.setenv("EJKERNEL_OPS_TRACERS", "1")
    result = autotune(lambda x: executor(Doubling(), x), X, tuning=options)
    assert asked == [("traced.doubling@v0", ["a", "b", "c"])]
    assert (result.entries[0].is_measured, list(result.notes)) == (True, [])


@pytest.mark.parametrize("text", ["-1", "two", "1.5"])
def test_a_number_of_processes_is_a_whole_number(monkeypatch, text):
    """Said by name."""
    monkeypatch.setenv("EJKERNEL_OPS_TRACERS", text)
    with pytest.raises(SettingError, match=r"EJKERNEL_OPS_TRACERS=.* whole number"):
        Settings.read()


def test_processes_that_cannot_be_started_are_one_warning_and_no_note(monkeypatch):
    """Every call is tuned all the same, so that nothing is said to be left."""
    monkeypatch.setenv("EJKERNEL_OPS_TRACERS", "1")
    monkeypatch.setattr(tracers_module, "_SERVES", "ejkernel.ops.no_such_module")
    gave_up = threading.Event()
    left = Tracers.close
    monkeypatch.setattr(Tracers, "close", lambda self: (self._threads[0].join(), gave_up.set(), left(self)))
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(iters=1)))
    with pytest.warns(IsolationWarning, match="traced candidates gave up: .*no_such_module"):
        result = autotune(lambda x: executor(Doubling(), x), X, tuning=AutotuneOptions(progress=False))
    assert gave_up.is_set()
    assert (result.entries[0].is_measured, list(result.notes)) == (True, [])


def test_a_process_that_traces_seldom_looks_for_garbage(monkeypatch):
    """What it makes lives until the next candidate; looking for garbage in it took an eighth of its time."""
    seen, sent = [], []
    frozen, limits = lambda: seen.append("frozen"), lambda *limits: seen.append(limits)
    garbage = SimpleNamespace(freeze=frozen, get_threshold=lambda: (7, 8, 9), set_threshold=limits)
    monkeypatch.setattr(tracer, "gc", garbage)
    monkeypatch.setattr(tracer, "take_device", lambda head: SimpleNamespace(platform="cpu", device_kind="a device"))
    made = tracer.Tracer(SimpleNamespace(send=lambda verb, parts=(), **head: sent.append(verb)))
    made.obey(Message({"verb": "start", "imports": []}))
    assert seen == ["frozen", (200_000, 8, 9)]
    assert sent == ["hello"]
