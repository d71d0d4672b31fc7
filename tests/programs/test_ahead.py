"""The next call is traced while this one is measured."""

from __future__ import annotations

import jax.numpy as jnp

from ejkernel.library import rms_norm, softmax
from ejkernel.ops import AutotuneOptions, ConfigCache, ConfigSelectorChain, Executor, Tuner, autotune
from ejkernel.ops.programs.ahead import TracedAhead
from ejkernel.ops.tuning.tuner import PreparedAhead
from ejkernel.ops.tuning.worker.process import WorkerProcess

X, W = jnp.ones((16, 32)), jnp.ones(32)


def tuned(monkeypatch, *, pays, isolate=False):
    """A program of two calls, tuned; and how many of its tunings were traced before their turn."""
    measured = []
    measure = PreparedAhead.measure
    monkeypatch.setattr(TracedAhead, "pays", staticmethod(lambda call: pays))
    monkeypatch.setattr(PreparedAhead, "measure", lambda self, *how: measured.append(self) or measure(self, *how))
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(isolate=isolate)))
    options = AutotuneOptions(progress=False)
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


def test_nothing_is_traced_ahead_where_that_would_be_measured_too(monkeypatch):
    """On a CPU tracing takes the cores that candidates run on."""
    result, ahead = tuned(monkeypatch, pays=False)
    assert [entry.is_measured for entry in result.entries] == [True, True]
    assert ahead == 0
