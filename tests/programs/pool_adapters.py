"""The pools that the contract suite runs over: a new adapter is one more line of the table."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from fakes_pool import Inline

from ejkernel.ops import LocalPool


@dataclass(frozen=True)
class Adapter:
    """A pool under test: how it is opened, and what it promises."""

    # A context manager of a pool with so many workers; leaving it leaves no process.
    open: Callable[[int], Any]
    # Are its workers processes, which can be killed and can hang?
    has_processes: bool = True
    # Does it go on after a worker has died? In a pool that the user owns the calls are named instead.
    restarts: bool = True


@contextlib.contextmanager
def processes(workers):
    """Python's own; a worker that hangs would keep it open, so its processes are ended at last."""
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        left = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join(30)


ADAPTERS = {
    "inline": Adapter(lambda workers: contextlib.nullcontext(Inline()), has_processes=False),
    "threads": Adapter(ThreadPoolExecutor, has_processes=False),
    "processes": Adapter(processes, restarts=False),
    "local": Adapter(LocalPool),
}

# The default suite has the first, and troubles on our own processes.
EVERY = [
    pytest.param(adapter, id=name, marks=() if name == "inline" else pytest.mark.engines)
    for name, adapter in ADAPTERS.items()
]
WITH_PROCESSES = [
    pytest.param(adapter, id=name, marks=() if name == "local" else pytest.mark.engines)
    for name, adapter in ADAPTERS.items()
    if adapter.has_processes
]
