"""Dask: a client as a pool, and a cluster by its address."""

from __future__ import annotations

import uuid

import pytest
from fakes_pool import calls_of, on, selecting
from pool_adapters import ADAPTERS

from ejkernel.ops import autotune
from ejkernel.ops.programs.pool import dask
from ejkernel.ops.programs.pool.dask import DaskPool
from ejkernel.ops.programs.pool.engines import opened, suited

pytestmark = pytest.mark.engines
pytest.importorskip("distributed", reason="needs the extra `dask`")


def unlike(text):
    """Another answer each time."""
    return f"{text} {uuid.uuid4()}"


@pytest.fixture(scope="module")
def client():
    """A client of two workers."""
    with ADAPTERS["dask"].open(2) as client:
        yield client


def test_a_client_is_wrapped_and_asked_anew_each_time(client):
    """Dask alone would give the first answer again, and a second attempt would wait for the worker that hangs."""
    assert client.submit(unlike, "a").result() == client.submit(unlike, "a").result()
    pool = suited(client)
    assert isinstance(pool, DaskPool)
    assert pool.submit(unlike, "a").result() != pool.submit(unlike, "a").result()
    assert pool.workers == 2


def test_a_cluster_is_reached_by_its_address(client):
    """As `--pool dask:ADDRESS` does; the cluster goes on afterwards."""
    with opened(f"dask:{client.scheduler.address}") as pool:
        assert len(autotune(calls_of(2), tuning=on(pool, selecting())).entries) == 2
    assert client.submit(len, "abc").result() == 3


def test_a_cluster_that_does_not_answer_is_named(monkeypatch):
    """With its address, and how to start one."""
    monkeypatch.setattr(dask, "_CONNECT_SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"no Dask scheduler answers at tcp://127.0.0.1:9 .*dask scheduler"):
        opened("dask:tcp://127.0.0.1:9").__enter__()
