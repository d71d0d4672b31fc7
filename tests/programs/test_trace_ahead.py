"""The next call is traced while this one is measured."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.library import rms_norm, softmax
from ejkernel.ops import AutotuneOptions, ConfigCache, ConfigSelectorChain, Executor, Tuner, autotune
from ejkernel.ops.programs import batch
from ejkernel.ops.programs import trace_ahead as ahead_of
from ejkernel.ops.programs.trace_ahead import TracedAhead
from ejkernel.ops.tuning.job import is_abandoned
from ejkernel.ops.tuning.prepared import PreparedAhead
from ejkernel.ops.tuning.worker.process import WorkerProcess

X, W = jnp.ones((16, 32)), jnp.ones(32)


def tuned(monkeypatch, *, pays, isolate=False, seconds=None):
    """A program of two calls, tuned; and how many of its tunings were traced before their turn."""
    measured = []
    measure = PreparedAhead.measure
    monkeypatch.setattr(TracedAhead, "pays", staticmethod(lambda call: pays))
    monkeypatch.setattr(PreparedAhead, "measure", lambda self, *how: measured.append(self) or measure(self, *how))
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(isolate=isolate)))
    options = AutotuneOptions(progress=False, seconds=seconds)
    result = autotune(lambda x, w: softmax(rms_norm(x, w, executor=executor), executor=executor), X, W, tuning=options)
    return result, len(measured)


def test_both_calls_are_traced_before_their_turn_and_measured(monkeypatch):
    """The first on the asking thread, and the second while the first is measured."""
    result, ahead = tuned(monkeypatch, pays=True)
    assert [entry.is_measured for entry in result.entries] == [True, True]
    assert ahead == 2


def test_one_worker_serves_both_calls_and_gets_the_second_s_programs_when_it_is_free(monkeypatch):
    """Until then they are only compiled there; programs of the first are sent as they are traced."""
    sent = []
    send = WorkerProcess.send

    def noted(self, verb, parts=(), **head):
        sent.append((self, verb))
        send(self, verb, parts, **head)

    monkeypatch.setattr(WorkerProcess, "send", noted)
    result, ahead = tuned(monkeypatch, pays=True, isolate=True)
    assert [entry.is_measured for entry in result.entries] == [True, True]
    assert all("in a worker process" in entry.record.clock for entry in result.entries)
    assert len({worker for worker, _ in sent}) == 1
    verbs = [verb for _, verb in sent if verb in ("tuning", "run")]
    assert verbs == ["tuning", "run", "tuning", "run"]
    assert "ahead" in [verb for _, verb in sent]
    assert ahead == 2


@pytest.mark.parametrize("setting", [{}, {"jax_enable_x64": True}])
def test_the_worker_starts_before_calls_are_looked_through(monkeypatch, setting):
    """It imports JAX meanwhile, and is the one that measures, whatever the settings of JAX are."""
    order = []
    begin, split = WorkerProcess.__init__, batch.share_of
    monkeypatch.setattr(WorkerProcess, "__init__", lambda self, *a, **k: order.append("worker") or begin(self, *a, **k))
    monkeypatch.setattr(batch, "share_of", lambda call: order.append("share") or split(call))
    with contextlib.ExitStack() as held:
        for name, value in setting.items():
            held.callback(jax.config.update, name, getattr(jax.config, name))
            jax.config.update(name, value)
        result, _ = tuned(monkeypatch, pays=True, isolate=True, seconds=60.0)
    assert [entry.is_measured for entry in result.entries] == [True, True]
    assert order == ["worker", "share", "share"]


@pytest.mark.parametrize("why", ["without a worker", "on a cpu", "turned off"])
def test_no_worker_starts_where_none_is_needed(monkeypatch, why):
    """Nor does a process where tuning is off."""
    begun = []
    monkeypatch.setattr(ahead_of, "start_ahead", lambda **head: begun.append(head))
    if why == "turned off":
        monkeypatch.setenv("EJKERNEL_OPS_AUTOTUNE", "off")
    tuned(monkeypatch, pays=why != "on a cpu", isolate=why != "without a worker")
    assert begun == []


def test_no_worker_starts_for_a_device_of_another_machine(monkeypatch):
    """It is compiled for, and runs nothing; its turn says so."""
    begun, call = [], Prepared().call("a")
    monkeypatch.setattr(ahead_of, "start_ahead", lambda **head: begun.append(head))
    call.device.client = SimpleNamespace(platform="cpu")
    call.selectors[0].tuning_is_off = lambda: False
    ahead_of.start_worker([call])
    assert begun == []


def test_nothing_is_traced_ahead_where_that_would_be_measured_too(monkeypatch):
    """On a CPU tracing takes the cores that candidates run on."""
    result, ahead = tuned(monkeypatch, pays=False)
    assert [entry.is_measured for entry in result.entries] == [True, True]
    assert ahead == 0


class Prepared:
    """Calls that note the order in which they are traced, and on which thread."""

    def __init__(self):
        self.order = []

    def call(self, name, *, outer=(), holds=None, isolate=None, mesh=None, over=None, args=()):
        def prepare(inv, kernel, *, seconds, is_next):
            self.order.append((name, threading.current_thread().name, is_next))
            if holds is not None:
                holds.wait()
            tells = is_abandoned.get()
            self.abandoned = tells is not None and tells()
            return lambda: self.order.append((name, "let go"))

        return SimpleNamespace(
            key=name,
            outer=frozenset(outer),
            device=SimpleNamespace(platform="gpu"),
            selectors=[SimpleNamespace(prepare=prepare, tuner=SimpleNamespace(isolate=isolate, clock=None))],
            inv=SimpleNamespace(mesh=over, args=args, kwargs={}),
            kernel=None,
            restored=contextlib.nullcontext,
            trace_context=None if mesh is None else SimpleNamespace(mesh=mesh),
        )


def test_some_calls_behind_the_one_that_is_measured_are_traced(monkeypatch):
    """In their order, each once, and no more of them until one has had its turn."""
    monkeypatch.setattr(ahead_of, "DEPTH", 3)
    made = Prepared()
    first, *rest = (made.call(name) for name in "abcdef")
    ahead = TracedAhead()
    ahead.trace(first, None)
    for measured, waiting in ((first, rest), (rest[0], rest[1:])):
        ahead.begin(measured, waiting, None)
        ahead.wait(waiting[2])
    ahead.trace(rest[0], None)
    ahead.close()
    traced = [one for one in made.order if one[1] != "let go"]
    thread = "ejkernel-ahead"
    assert traced == [("a", "MainThread", False), *((name, thread, True) for name in "bcde")]
    assert [one[0] for one in made.order if one[1] == "let go"] == ["a", "b", "c", "d", "e"]


def test_one_call_is_traced_ahead_where_this_process_would_hold_their_inputs():
    """A tuner without workers draws the inputs of a call when it is traced."""
    made = Prepared()
    first, *rest = (made.call(name, isolate=False) for name in "abc")
    ahead = TracedAhead()
    ahead.begin(first, rest, None)
    ahead.wait(rest[0])
    ahead.close()
    assert [one[0] for one in made.order] == ["b", "b"]


MESH = jax.sharding.AbstractMesh((2,), ("x",))
OF_TWO = jax.ShapeDtypeStruct(
    (4,), "float32", sharding=jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("x"))
)


@pytest.mark.parametrize(
    "around", [{"mesh": "a mesh"}, {"over": "a mesh"}, {"args": (OF_TWO,)}], ids=["inside", "over", "arrays-of-two"]
)
def test_one_call_of_several_devices_is_traced_ahead(around):
    """Its inputs are placed on the devices then, beside what is measured."""
    made = Prepared()
    first, *rest = (made.call(name, **around) for name in "abc")
    ahead = TracedAhead()
    ahead.begin(first, rest, None)
    ahead.wait(rest[0])
    ahead.close()
    assert [one[0] for one in made.order] == ["b", "b"]


def test_a_kernel_around_one_that_is_not_tuned_yet_waits_for_its_turn():
    """Its program depends on the cfg that the other one gets."""
    made = Prepared()
    inner, outer, other = made.call("inner", outer=["outer"]), made.call("outer"), made.call("other")
    ahead = TracedAhead()
    ahead.begin(inner, [outer, other], None)
    ahead.wait(other)
    ahead.trace(outer, None)
    ahead.close()
    assert [one[:2] for one in made.order[:2]] == [("other", "ejkernel-ahead"), ("outer", "MainThread")]


def test_a_call_that_is_still_traced_at_the_end_of_a_budget_is_not_waited_for():
    """Nor is one begun with then that waited behind it: what was left for it is counted from when it was asked for."""
    made, gate = Prepared(), threading.Event()
    first, second, third = made.call("a"), made.call("b", holds=gate), made.call("c")
    ahead = TracedAhead()
    ahead.begin(first, [second, third], 0.2)
    ahead.wait(second, time.perf_counter() + 0.3)
    assert not ahead._begun["b"].is_set()
    gate.set()
    ahead.wait(third)
    ahead.close()
    assert [one[0] for one in made.order] == ["b", "b"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_kernel_that_ends_the_thread_leaves_no_call_waiting():
    """Another thread goes on, and its own turn finds out why."""
    made = Prepared()
    first, ends, third, fourth = (made.call(name) for name in "abcd")
    ends.selectors[0].prepare = lambda *args, **how: sys.exit(3)
    ahead = TracedAhead()
    ahead.begin(first, [ends], None)
    ahead.wait(ends)
    ahead._thread.join()
    ahead.begin(ends, [third, fourth], None)
    ahead.wait(fourth)
    ahead.close()
    assert [one[0] for one in made.order if one[1] != "let go"] == ["c", "d"]


def test_the_end_waits_for_the_call_that_is_traced_and_for_no_other():
    """A budget that is used up leaves calls behind."""
    made, gate = Prepared(), threading.Event()
    first, second, third = made.call("a"), made.call("b", holds=gate), made.call("c")
    ahead = TracedAhead()
    ahead.begin(first, [second, third], None)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    while not ahead._is_closed:
        pass
    gate.set()
    closing.join()
    assert [one[0] for one in made.order] == ["b", "b"]
    # Its other candidates are not traced.
    assert made.abandoned
    assert is_abandoned.get() is None


def test_a_kernel_around_another_one_goes_before_calls_behind_it():
    """It may be traced only once the other is tuned, when calls behind it are waiting already."""
    made = Prepared()
    inner, other, outer = made.call("inner", outer=["outer"]), made.call("other"), made.call("outer")
    behind = [made.call(name) for name in "abcd"]
    ahead = TracedAhead()
    # No thread takes calls until both have been begun with.
    ahead._thread = threading.current_thread()
    ahead.begin(inner, [other, outer, *behind], None)
    ahead.begin(other, [outer, *behind], None)
    ahead._thread = None
    ahead.begin(other, [outer, *behind], None)
    ahead.wait(behind[-1])
    ahead.close()
    assert [one[0] for one in made.order if one[1] != "let go"] == ["other", "outer", "a", "b", "c", "d"]
