"""The pools that the contract suite runs over: a new adapter is one more line of the table."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from fakes_pool import Inline

from ejkernel.ops import LocalPool, RayPool, SlurmPool
from ejkernel.ops.programs.pool.engines import opened


@dataclass(frozen=True)
class Adapter:
    """A pool under test: how it is opened, and what it promises."""

    # A context manager of a pool with so many workers; leaving it leaves no process.
    open: Callable[[int], Any]
    # Are its workers processes, which can be killed and can hang?
    has_processes: bool = True
    # Does it go on after a worker has died? In a pool that the user owns the calls are named instead.
    restarts: bool = True
    # After how many tasks of 40 calls a worker is killed, and how many calls share a task.
    at_length: Mapping[str, int] = field(default_factory=lambda: {"killed": 10})


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


@contextlib.contextmanager
def dask(workers):
    """A client of a cluster of this machine, a process a worker."""
    distributed = pytest.importorskip("distributed", reason="needs the extra `dask`")
    with (
        # Any port will do for its page.
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs="CRITICAL"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@contextlib.contextmanager
def ray(workers):
    """A cluster of this machine, in a folder of its own: names of sockets may have 107 characters."""
    engine = pytest.importorskip("ray", reason="needs the extra `ray`")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with mock.patch.dict(os.environ, settings):
        try:
            with warnings.catch_warnings():
                # JAX warns of every fork of its process; Ray's run another program at once.
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                engine.init(
                    address="local",
                    num_cpus=workers,
                    include_dashboard=False,
                    object_store_memory=80 * 2**20,
                    log_to_driver=False,
                    logging_level="CRITICAL",
                    _temp_dir=folder,
                )
            yield RayPool()
        finally:
            engine.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def slurm(workers):
    """Jobs of submitit, as processes of this machine."""
    pytest.importorskip("submitit", reason="needs the extra `slurm`")
    with tempfile.TemporaryDirectory() as folder, SlurmPool(workers, folder=folder, cluster="local") as pool:
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def mpi(workers):
    """The processes beside this one; `test_mpi.py` runs the suite in a program of `mpiexec`."""
    return opened("mpi")


ADAPTERS = {
    "inline": Adapter(lambda workers: contextlib.nullcontext(Inline()), has_processes=False),
    "threads": Adapter(ThreadPoolExecutor, has_processes=False),
    "processes": Adapter(processes, restarts=False),
    "local": Adapter(LocalPool),
    "dask": Adapter(dask),
    "ray": Adapter(ray),
    # A job is a process that imports JAX, so calls share one.
    "slurm": Adapter(slurm, at_length={"killed": 3, "calls_per_task": 5}),
}
# A worker that dies ends the whole program, so there are no troubles to be had.
if "EJKERNEL_TESTS_MPI" in os.environ:
    ADAPTERS["mpi"] = Adapter(mpi, has_processes=False)

# The default suite has the first, and six calls in trouble on our own processes.
EVERY = [
    pytest.param(adapter, id=name, marks=() if name == "inline" else pytest.mark.engines)
    for name, adapter in ADAPTERS.items()
]
AT_LENGTH = [pytest.param(adapter, id=name) for name, adapter in ADAPTERS.items()]
