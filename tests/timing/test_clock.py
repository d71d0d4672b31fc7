"""The host's clock: it waits for what it times, and says seconds per call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ejkernel.ops.timing import clock
from ejkernel.ops.timing.clock import WallClock


class Host:
    """A clock that stands still until a call is sent off, or its result is waited for."""

    def __init__(self, send, finish):
        self.now = 100.0
        self.send, self.finish = send, finish
        self.waited = 0

    def call(self, leaf):
        self.now += self.send
        return SimpleNamespace(block_until_ready=self.wait)

    def wait(self):
        self.waited += 1
        self.now += self.finish


@pytest.mark.parametrize("calls", [1, 4])
def test_the_wall_clock_waits_and_divides_by_calls(calls, monkeypatch):
    """Calls are sent off one after the other and the last one is waited for; the answer is the time of one."""
    host = Host(send=0.25, finish=2.0)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: host.now))
    assert WallClock().time(host.call, ["array"], calls) == (calls * 0.25 + 2.0) / calls
    assert host.waited == 1
