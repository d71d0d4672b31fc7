"""Heartbeats against their lease: a process that works is never taken for dead, and one that stopped is noticed."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest
from fakes_fleet import Clock, FakeClient

from ejkernel.ops.fleet import heartbeat
from ejkernel.ops.fleet.heartbeat import Heartbeat, HeartbeatWatch
from ejkernel.ops.fleet.kv_store import KeyValueStore

LEASE = 10.0


class Rests:
    """In place of the event that a heartbeat rests by: each rest moves the clock, and some work is done then."""

    def __init__(self, clock, work, count):
        self.clock, self.work, self.left = clock, work, count
        self.done = threading.Event()

    def wait(self, seconds):
        self.clock.now += seconds
        self.work()
        self.left -= 1
        if self.left < 0:
            self.done.set()
        return self.left < 0

    def set(self):
        """The block has ended."""


@pytest.fixture
def service():
    client = FakeClient(Clock())
    return KeyValueStore(client, "coordinator:1"), client.clock


def test_a_process_that_works_beats_well_within_its_lease(service, monkeypatch):
    """Whenever another process looks, however long the work takes: a beat may even be lost."""
    store, clock = service
    watch = HeartbeatWatch(store, "pulse", "life", LEASE, clock)
    ages, seen = [], []

    def look():
        seen.append(watch.alive())
        ages.append(clock.now)

    rests = Rests(clock, look, 12)
    parts = SimpleNamespace(Event=lambda: rests, Thread=threading.Thread, Lock=threading.Lock)
    monkeypatch.setattr(heartbeat, "threading", parts)
    with Heartbeat(store, "pulse", "life", LEASE).beating():
        assert rests.done.wait(120)
    assert ages[-1] > 2 * LEASE
    assert max(after - before for before, after in itertools.pairwise(ages)) <= LEASE / 2
    assert seen == [True] * len(seen)


def test_a_process_that_stopped_is_dead_at_the_end_of_its_lease_and_not_before(service):
    """Counted from its last beat, by the clock of the process that watches."""
    store, clock = service
    watch = HeartbeatWatch(store, "pulse", "life", LEASE, clock)
    for beat in range(3):
        clock.now += 0.9 * LEASE
        store.set("pulse", f"life {beat}")
        assert watch.alive()
    clock.now += 0.9 * LEASE
    assert watch.alive()
    clock.now += 0.1 * LEASE
    assert not watch.alive()


def test_a_watch_looks_more_often_than_a_lease_is_long(service):
    """A death is noticed within a part of the lease after its end."""
    store, clock = service
    assert 0 < HeartbeatWatch(store, "pulse", "life", LEASE, clock).pause <= LEASE / 2
