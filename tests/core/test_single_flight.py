"""Single flight: one thread works on a key, the other threads wait for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ejkernel.ops.core.single_flight import SingleFlight


def test_a_thread_that_waited_is_told():
    """The answer may be there by now: the first thread works, and the second one looks again."""
    flights, asks = SingleFlight(), threading.Event()

    def second():
        asks.set()
        with flights.hold("key") as waited:
            return waited

    with ThreadPoolExecutor(1) as pool:
        with flights.hold("key") as waited:
            assert waited is False
            other = pool.submit(second)
            asks.wait(60)
            # Until the thread has taken its place behind this one.
            while flights._mutexes["key"][1] < 2:
                assert not other.done()
        assert other.result(60) is True


def test_other_keys_are_not_waited_for():
    """Two threads work on two keys at once."""
    flights = SingleFlight()

    def other():
        with flights.hold("other") as waited:
            return waited

    with flights.hold("key"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(other).result(60) is False


def test_a_thread_does_not_wait_for_itself():
    """Work on a key may come to the same key again."""
    flights = SingleFlight()
    with flights.hold("key"), flights.hold("key") as waited:
        assert waited is False


def test_a_key_is_let_go_when_the_work_fails():
    """And forgotten: keys that were worked on hold no memory."""
    flights = SingleFlight()
    with pytest.raises(ZeroDivisionError), flights.hold("key"):
        _ = 1 / 0
    with flights.hold("key") as waited:
        assert waited is False
    assert flights._mutexes == {}


def test_a_block_holds_its_key_from_where_it_asks():
    """A block that never asks holds nothing; one that does lets go at its end."""
    flights = SingleFlight()
    with flights.on_demand("key"):
        assert flights._mutexes == {}
    with flights.on_demand("key") as flight:
        assert flight.hold() is False
        assert set(flights._mutexes) == {"key"}
    assert flights._mutexes == {}
