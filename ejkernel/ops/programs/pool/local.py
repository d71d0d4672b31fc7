"""Processes of this machine as a pool: one a device, or several on a processor; those that die or hang are replaced."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, final

from ...core.errors import IsolationError, SettingError
from ...core.shown import Shown
from ...settings import device_variables
from ...tuning.worker.process import BIRTHS, KilledAtBirth, WorkerGone, WorkerProcess
from .by_name import name_of

_SERVES = "ejkernel.ops.programs.pool.serve"
# A task without an answer for so long hangs: the longest effort has ten minutes for a call.
_SILENCE_SECONDS = 1800.0
# Processes of a machine without another device, unless a number is given: more compile no faster.
_MOST_ON_A_PROCESSOR = 4


@final
class TaskFuture(Future[str]):
    """The text to come of a task; `worker` names the process that is at it, and `cancel` ends that as well."""

    worker = ""
    is_stopped = False

    def cancel(self) -> bool:
        """Ends the task, also where it runs: then its worker is replaced."""
        if super().cancel():
            return True
        self.is_stopped = not self.done()
        return self.is_stopped


@final
class LocalPool(Shown, Executor):
    """An executor of processes that end with this one, however it ends.

    `LocalPool()` has one process for each device of this process's platform; `devices=["gpu:0", "cpu"]` names them.
    With more workers than devices several share one, and take turns in measuring. It runs functions of text that can be
    imported by their names; nothing is pickled.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        devices: Sequence[str] | None = None,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
            raise SettingError(f"workers={workers!r} is not a whole number of at least 1")
        if not silence_seconds > 0:
            raise SettingError(f"silence_seconds={silence_seconds!r} is no bound; use a positive number of seconds")
        named = _devices_here() if devices is None else [_checked(name) for name in _several(devices)]
        if workers is None:
            alone = devices is None and named[0][0] == "cpu"
            workers = min(_MOST_ON_A_PROCESSOR, os.cpu_count() or 1) if alone else len(named)
        self.workers = workers
        self.silence_seconds = silence_seconds
        self._places = [named[i % len(named)] for i in range(workers)]
        self._tasks: queue.SimpleQueue[tuple[TaskFuture, dict[str, Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def in_short(self) -> str:
        """The value in a few words."""
        places = ", ".join(dict.fromkeys(f"{platform}:{number}" for platform, number in self._places))
        return f"{self.workers} workers on {places}"

    def submit(self, function: Callable[..., Any], /, *texts: Any, **more: Any) -> TaskFuture:  # type: ignore[override]
        """Has a worker call a function of text that can be imported; a future of the text that it returns."""
        name = name_of(function, texts, more)
        future = TaskFuture()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this LocalPool was shut down; open another one")
            self._tasks.put((future, {"function": name, "texts": list(texts)}))
            if len(self._threads) < self.workers:
                place = self._places[len(self._threads)]
                thread = threading.Thread(target=self._serve, args=(place,), name="ejkernel-pool", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more tasks, and ends the processes when those that were taken are done."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            if cancel_futures:
                self._drop()
            if is_first:
                for _ in self._threads:
                    self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _drop(self) -> None:
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return
            if task is not None:
                task[0].cancel()

    def _serve(self, place: tuple[str, int]) -> None:
        """One worker's life: its process is started when there is a task, and again when it has ended."""
        process: WorkerProcess | None = None
        # A worker ends with the thread that started it.
        while (task := self._tasks.get()) is not None:
            future, head = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                process = self._begun(process, place)
                future.worker = f"{place[0]}:{place[1]} (process {process.pid})"
                future.set_result(self._run(process, future, head))
            # Whatever it is, the task has an answer and the next one gets a process.
            except BaseException as error:
                if process is not None:
                    process.end()
                process = None
                future.set_exception(error)
        if process is not None:
            process.end()

    def _begun(self, process: WorkerProcess | None, place: tuple[str, int]) -> WorkerProcess:
        if process is not None and process.is_alive():
            return process
        if process is not None:
            process.end()
        for birth in range(BIRTHS):
            made = WorkerProcess({}, serves=_SERVES, variables=device_variables(*place))
            try:
                made.ready()
            except IsolationError as error:
                made.end()
                # Killed from outside before it was ready: that is no fault of the task.
                if not isinstance(error, KilledAtBirth) or birth == BIRTHS - 1:
                    raise
            else:
                return made
        raise AssertionError("unreachable")

    def _run(self, process: WorkerProcess, future: TaskFuture, head: dict[str, Any]) -> str:
        process.send("task", **head)
        until = time.perf_counter() + self.silence_seconds
        while True:
            try:
                message = process.hear()
            except WorkerGone:
                raise IsolationError(f"the process died ({process.last_words()})") from None
            if message is not None and message.verb == "done":
                return bytes(message.parts[0]).decode()
            if message is not None:
                raise IsolationError(str(message.head.get("message")))
            if future.is_stopped:
                raise CancelledError
            if time.perf_counter() > until:
                raise IsolationError(f"the process was ended: it said nothing for {self.silence_seconds:g} s")


def opened(rest: str) -> LocalPool:
    """The pool behind `processes`, `processes:4` or `processes:gpu:0,gpu:1`."""
    if not rest or rest.isdecimal():
        return LocalPool(int(rest) if rest else None)
    return LocalPool(devices=[name.strip() for name in rest.split(",")])


def _devices_here() -> list[tuple[str, int]]:
    """The devices of this process's own platform."""
    import jax

    from ...core.device import default_device, get_device_platform

    platform = get_device_platform(default_device())
    # A processor is one device, whatever number of devices JAX makes of it.
    count = 1 if platform == "cpu" else len(jax.local_devices(backend=platform))
    return [(platform, number) for number in range(count)]


def _several(devices: Any) -> list[Any]:
    if isinstance(devices, str) or not devices:
        raise SettingError(
            f"devices={devices!r} is no list of devices; write devices=['gpu:0', 'gpu:1'], or leave it out"
        )
    return list(devices)


def _checked(name: Any) -> tuple[str, int]:
    platform, _, number = str(name).partition(":")
    if platform not in ("cpu", "gpu", "tpu") or not (number or "0").isdigit():
        raise SettingError(f"{name!r} is no device; write cpu, gpu or tpu, and which one: 'gpu:1'")
    return platform, int(number or 0)
