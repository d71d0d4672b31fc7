"""What tests of workers' sessions share: a clock that only waiting moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fakes_session import Scripted

from ejkernel.ops.tuning.worker import session as session_module
from ejkernel.ops.tuning.worker import watchdog


@pytest.fixture
def clock(monkeypatch):
    """A clock that only waiting for a worker in vain moves: how busy the machine is does not count."""
    hands = SimpleNamespace(now=1000.0)
    hands.perf_counter = lambda: hands.now

    def rest():
        hands.now += 0.005

    monkeypatch.setattr(Scripted, "rest", staticmethod(rest))
    for module in (watchdog, session_module):
        monkeypatch.setattr(module, "time", hands)
    return hands
