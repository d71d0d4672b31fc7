"""Texts to a pool and back, whatever its futures are."""

from __future__ import annotations

from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import pytest
from fakes_pool import Inline

from ejkernel.ops import AutotuneOptions
from ejkernel.ops.programs.pool.client import Arrived, PoolBroken, PoolClient, workers_of


class Slow:
    """A future that can only be asked, and is done at the third question."""

    def __init__(self, text):
        self.text = text
        self.asked = 0

    def done(self):
        self.asked += 1
        return self.asked >= 3

    def result(self):
        return self.text


class Bare:
    """A future that has nothing but its result."""

    def __init__(self, text):
        self.text = text

    def result(self):
        return self.text


@pytest.mark.parametrize("kind", [Slow, Bare])
def test_a_future_that_calls_nothing_back_is_asked(kind):
    """Its text arrives all the same."""

    class Pool:
        def submit(self, function, text):
            return kind(function(text))

    client = PoolClient(Pool(), str.upper)
    client.send(7, "text")
    assert client.receive(5.0) == Arrived(7, "TEXT")
    assert client.receive(0.0) is None


@pytest.mark.parametrize("error", [ValueError("two\nlines"), KeyboardInterrupt(), SystemExit(1)])
def test_what_ends_a_worker_is_a_sentence(error):
    """No exception of a worker, not even Ctrl-C there, is one of this process."""

    def fails(text):
        raise error

    client = PoolClient(Inline(fails), str)
    client.send(1, "text")
    found = client.receive(1.0)
    assert found.error.startswith(type(error).__name__)
    assert "\n" not in found.error


def test_a_broken_pool_is_told_from_a_dead_worker():
    """Python's own pool takes no more work after a worker has died."""

    def fails(text):
        raise BrokenProcessPool("a process died")

    client = PoolClient(Inline(fails), str)
    client.send(1, "text")
    assert client.receive(1.0).broke


def test_a_pool_that_broke_is_one_sentence_whichever_shows_it_first():
    """A worker's death may be seen by the next submit before the answer that it took away."""

    class Broken(Executor):
        def submit(self, function, text):
            raise BrokenProcessPool("a process died")

    with pytest.raises(PoolBroken, match=r"the pool broke \(BrokenProcessPool: a process died\)"):
        PoolClient(Broken(), str).send(1, "text")


def test_a_pool_that_takes_no_work_is_a_sentence():
    """Closed, broken or not a pool at all: the message has its words."""

    class Closed(Executor):
        def submit(self, function, text):
            raise RuntimeError("cannot schedule new futures after shutdown")

    with pytest.raises(PoolBroken, match="after shutdown"):
        PoolClient(Closed(), str).send(1, "text")
    with pytest.raises(PoolBroken, match="no future"):
        PoolClient(type("Odd", (), {"submit": lambda self, function, text: 3})(), str).send(1, "text")


@pytest.mark.parametrize("pool", [4, "processes", Inline, object()])
def test_what_is_no_executor_is_refused(pool):
    """The message says what to give instead."""
    with pytest.raises(ValueError, match=r"has no submit.*LocalPool"):
        AutotuneOptions(pool=pool)


def test_a_pool_that_forks_is_refused():
    """A fork of a process in which JAX runs hangs."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool, pytest.raises(ValueError, match="spawn"):
        AutotuneOptions(pool=pool)


def test_the_number_of_workers_is_known_where_a_pool_tells_it():
    """Ours and Python's do."""
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        assert workers_of(pool) == 3
    assert workers_of(Inline()) is None
