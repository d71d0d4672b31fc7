"""The next call is traced while this one is measured."""

from __future__ import annotations

import jax.numpy as jnp

from ejkernel.library import rms_norm, softmax
from ejkernel.ops import AutotuneOptions, ConfigCache, ConfigSelectorChain, Executor, Tuner, autotune
from ejkernel.ops.programs.ahead import TracedAhead
from ejkernel.ops.tuning.tuner import PreparedAhead

X, W = jnp.ones((16, 32)), jnp.ones(32)


def tuned(monkeypatch, *, pays):
    """A program of two calls, tuned; and how many of its tunings were traced ahead."""
    measured = []
    measure = PreparedAhead.measure
    monkeypatch.setattr(TracedAhead, "pays", staticmethod(lambda call: pays))
    monkeypatch.setattr(PreparedAhead, "measure", lambda self, *how: measured.append(self) or measure(self, *how))
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(isolate=False)))
    options = AutotuneOptions(progress=False)
    result = autotune(lambda x, w: softmax(rms_norm(x, w, executor=executor), executor=executor), X, W, tuning=options)
    return result, len(measured)


def test_the_second_call_is_traced_ahead_and_measured(monkeypatch):
    """Both calls have a winner, and the first had none to be traced behind."""
    result, ahead = tuned(monkeypatch, pays=True)
    assert [entry.is_measured for entry in result.entries] == [True, True]
    assert ahead == 1


def test_nothing_is_traced_ahead_where_that_would_be_measured_too(monkeypatch):
    """On a CPU tracing takes the cores that candidates run on."""
    result, ahead = tuned(monkeypatch, pays=False)
    assert [entry.is_measured for entry in result.entries] == [True, True]
    assert ahead == 0
