"""Ray: tasks that are cancelled, and clusters that are found and left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from fakes_pool import is_gone
from pool_adapters import ADAPTERS

from ejkernel.ops import RayPool

pytestmark = pytest.mark.engines
ray = pytest.importorskip("ray", reason="needs the extra `ray`")


def wait_for(folder):
    """Says which process it is, and does not end."""
    Path(folder, "process").write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(10_000)


def own_number(text):
    """The number of the process."""
    return f"{text}{os.getpid()}"


@pytest.fixture(scope="module")
def pool():
    """A pool of one worker."""
    with ADAPTERS["ray"].open(1) as pool:
        yield pool


def number_in(file):
    """The number that a process writes once it runs."""
    while not (file.exists() and file.read_text(encoding="utf-8")):
        time.sleep(0.01)
    return int(file.read_text(encoding="utf-8"))


def test_a_task_that_is_cancelled_ends_with_its_worker_and_another_one_serves(pool, tmp_path):
    """A hung worker does not keep its place."""
    future = pool.submit(wait_for, str(tmp_path))
    process = number_in(tmp_path / "process")
    assert future.cancel()
    assert future.cancelled()
    assert int(pool.submit(own_number, "").result()) != process
    assert is_gone(process)


def test_a_cluster_that_was_there_is_left_as_it_is(pool):
    """The process is connected: a second pool uses that, and its end is not the cluster's."""
    with RayPool() as second:
        assert second.submit(own_number, "a").result().startswith("a")
    assert ray.is_initialized()
    assert pool.submit(own_number, "a").result().startswith("a")


def test_a_pool_says_what_it_is(pool):
    """Its workers, and what they ask for."""
    assert repr(RayPool(3, num_cpus=0.5)) == "<RayPool: 3 workers with num_cpus=0.5>"
    assert pool.workers == 1
