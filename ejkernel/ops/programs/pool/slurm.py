"""SLURM as a pool, by submitit: a task is a job, and a thread looks for the results of jobs in a shared folder."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, InvalidStateError
from typing import Any, final

from ...core.errors import IsolationError, SettingError
from ...core.shown import Shown
from .by_name import call, name_of, places
from .engines import engine
from .schedule import ScheduleRules

# Starting Python and JAX takes seconds in each job, and a queue takes more: so many calls share a job at most.
_CALLS_IN_A_JOB = 8
# Jobs at once, unless a number is given.
_WORKERS = 8
_FOLDER = "ejkernel-jobs"
_TIMEOUT_MINUTES = 60
# How often folders are looked into: a file system that is shared by many machines is slow.
_POLL_SECONDS = 0.5
# The result of a job that has ended may be seen so much later on another machine.
_LATE_SECONDS = 15.0
# How often a job of this machine looks for the process that submitted it.
_LIFE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


@final
class JobFuture(Future[str]):
    """The text to come of a job; `cancel` ends the job as well."""

    def __init__(self, job: Any, *, is_local: bool) -> None:
        super().__init__()
        self.job = job
        self.is_local = is_local
        self.worker = f"job {job.job_id}"
        # When the job was first seen to have ended.
        self.ended: float | None = None

    def cancel(self) -> bool:
        """Ends the job, in the queue or where it runs."""
        if not super().cancel():
            return False
        if not self.is_local:
            self.job.cancel(check=False)
        elif not self.job.done():
            # submitit interrupts the process, which does nothing where interrupts are ignored; the job ends with it. It
            # may have ended since the question.
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self.job.job_id), signal.SIGKILL)
        return True


@final
class SlurmPool(Shown, Executor):
    """An executor with jobs of SLURM for tasks; `cluster="local"` runs them as processes of this machine.

    `workers` is how many jobs there are at once, in the queue or running. `asks` goes to submitit as it is:
    `slurm_partition`, `gpus_per_node`, `cpus_per_task`, `mem_gb`, `timeout_min`. The folder must be one that this
    machine and the nodes share.
    """

    def __init__(
        self,
        workers: int = _WORKERS,
        *,
        folder: str | os.PathLike[str] = _FOLDER,
        cluster: str = "slurm",
        calls_per_task: int = _CALLS_IN_A_JOB,
        executor: Any = None,
        **asks: Any,
    ) -> None:
        for name, number in (("workers", workers), ("calls_per_task", calls_per_task)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise SettingError(f"{name}={number!r} is not a whole number of at least 1")
        self.workers = workers
        self.calls_per_task = calls_per_task
        # A job that waits in the queue is no straggler, and SLURM ends one that runs longer than its time.
        self.rules = ScheduleRules(straggler_seconds=math.inf, silent_seconds=math.inf)
        self._executor = executor or _executor(cluster, folder, {"timeout_min": _TIMEOUT_MINUTES, **asks})
        self._lock = threading.Lock()
        self._futures: list[JobFuture] = []
        self._watching: threading.Thread | None = None
        self._is_closed = False

    def in_short(self) -> str:
        """The value in a few words."""
        return f"{self.workers} jobs at once, in {self._executor.folder}"

    def submit(self, function: Callable[..., Any], /, *texts: Any, **more: Any) -> JobFuture:  # type: ignore[override]
        """Has a job call a function of text that can be imported; a future of the text that it returns."""
        name = name_of(function, texts, more)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this SlurmPool was shut down; open another one")
            job = self._executor.submit(run_job, name, list(texts), places(), os.getpid())
            future = JobFuture(job, is_local=isinstance(job, engine("submitit", "slurm").LocalJob))
            self._futures.append(future)
            if self._watching is None:
                self._watching = threading.Thread(target=self._watch, name="ejkernel-jobs", daemon=True)
                self._watching.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more tasks; ends jobs where asked, else waits for them."""
        with self._lock:
            self._is_closed = True
            futures, watching = list(self._futures), self._watching
        for future in futures if cancel_futures else ():
            future.cancel()
        if wait and watching is not None:
            watching.join()

    def _watch(self) -> None:
        """Gives each future its result, until no job is left."""
        while True:
            with self._lock:
                futures = list(self._futures)
                if not futures:
                    self._watching = None
                    return
            gone = [future for future in futures if self._collect_result(future)]
            with self._lock:
                self._futures = [future for future in self._futures if future not in gone]
            if not gone:
                time.sleep(_POLL_SECONDS)

    def _collect_result(self, future: JobFuture) -> bool:
        """Takes the result of a job that has one; is there nothing more to wait for?"""
        job, now = future.job, time.perf_counter()
        try:
            if not job.done():
                # Processes of this machine must not outlive the pool.
                return future.cancelled() and not future.is_local
            if future.cancelled():
                return True
            future.ended = future.ended or now
            if not job.paths.result_pickle.exists():
                if not future.is_local and now - future.ended < _LATE_SECONDS:
                    return False
                raise IsolationError(f"job {job.job_id} ended without a result: {_last_words(job)}")
            text = job.result()
        # Of any class: the future has it.
        except Exception as error:
            _set(future, error=error)
            return True
        _set(future, text=text)
        _tidy(job)
        return True


def run_job(name: str, texts: Sequence[str], searched: Sequence[str], owner: int) -> str:
    """A job's whole work."""
    job = engine("submitit", "slurm").JobEnvironment()
    if job.cluster == "local":
        _end_with(owner, int(job.job_id))
    return call(name, texts, searched)


def _end_with(*processes: int) -> None:
    """A job of this machine ends with the owner of the pool, and with the process of submitit that started it."""
    if sys.platform == "linux":
        # At once, even while a candidate holds Python's lock.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while all(map(_is_there, processes)):
            time.sleep(_LIFE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _set(future: JobFuture, *, text: str = "", error: Exception | None = None) -> None:
    # It may have been cancelled meanwhile.
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(text)
        else:
            future.set_exception(error)


def _last_words(job: Any) -> str:
    lines = [line for line in (job.stderr() or "").splitlines() if line.strip()]
    return f"{job.state}; {lines[-1].strip() if lines else f'its log is {job.paths.stdout}'}"


def _tidy(job: Any) -> None:
    """Removes the files of a job that ended well; those of others may be read by the user."""
    for file in (job.paths.submitted_pickle, job.paths.result_pickle, job.paths.stdout, job.paths.stderr):
        with contextlib.suppress(OSError):
            file.unlink()


def _executor(cluster: str, folder: str | os.PathLike[str], asks: dict[str, Any]) -> Any:
    submitit = engine("submitit", "slurm")
    try:
        made = submitit.AutoExecutor(folder=os.fspath(folder), cluster=cluster)
        made.update_parameters(**asks)
    # An unknown cluster or parameter, or no SLURM on this machine: submitit has its own words for each.
    except (AssertionError, NameError, RuntimeError, TypeError, ValueError) as error:
        raise SettingError(
            f"no jobs can be submitted ({error}); jobs are submitted on a node of SLURM, and slurm:cluster=local runs "
            "them as processes of this machine"
        ) from error
    return made


def adapted(executor: Any) -> Any:
    """An executor of submitit as a pool, with its own parameters."""
    return SlurmPool(executor=executor)


def opened(rest: str) -> contextlib.AbstractContextManager[SlurmPool]:
    """A pool with options, as in `workers=8,slurm_partition=gpu,gpus_per_node=1`."""
    options: dict[str, Any] = {}
    for piece in filter(None, (piece.strip() for piece in rest.split(","))):
        name, equals, value = piece.partition("=")
        if not (name and equals and value):
            raise SettingError(
                f"{piece!r} is no option of the pool slurm; write slurm:workers=8,slurm_partition=gpu,gpus_per_node=1"
            )
        options[name] = int(value) if value.isdecimal() else value
    return SlurmPool(**options)
