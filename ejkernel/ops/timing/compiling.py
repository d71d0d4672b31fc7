"""Compiling many programs at once, without ever waiting for one that does not end."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .. import _jax

# A compile that takes so many times as long as the others, and at least so many seconds, is left behind.
_STRAGGLER_TIMES = 8.0
_STRAGGLER_SECONDS = 10.0


@dataclass(frozen=True)
class Built:
    """What became of one compilation."""

    number: int
    outcome: Any
    seconds: float

    @property
    def failed(self) -> bool:
        """Did it raise?"""
        return isinstance(self.outcome, BaseException)


def workers_for(platform: str, count: int) -> int:
    """How many threads compile at once: XLA's CPU compiler already uses every core for one program."""
    cores = os.cpu_count() or 1
    return max(1, min(count, 16, cores))


def compile_all(jobs: Sequence[tuple[int, Callable[[], Any]]], *, workers: int, deadline: float) -> Iterator[Built]:
    """Runs compilations in threads and gives each as it ends; what has not ended by then is not given at all.

    The threads are daemons: a compilation that never ends delays neither the answer nor the end of the process.
    """
    waiting: queue.SimpleQueue[tuple[int, Callable[[], Any]]] = queue.SimpleQueue()
    done: queue.SimpleQueue[Built] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    settings = _Settings.here()
    stop = threading.Event()

    def work() -> None:
        with settings.entered():
            while not stop.is_set():
                try:
                    number, build = waiting.get_nowait()
                except queue.Empty:
                    return
                start = time.perf_counter()
                try:
                    outcome: Any = build()
                # Whatever a candidate raises is the candidate's outcome.
                except Exception as error:
                    outcome = error
                done.put(Built(number, outcome, time.perf_counter() - start))

    for _ in range(min(workers, len(jobs))):
        threading.Thread(target=work, name="ejkernel-compile", daemon=True).start()
    try:
        yield from _as_they_end(done, len(jobs), deadline)
    finally:
        stop.set()


def _as_they_end(done: queue.SimpleQueue[Built], count: int, deadline: float) -> Iterator[Built]:
    taken: list[float] = []
    last = time.perf_counter()
    usable = False
    while len(taken) < count:
        # One program there must be, however late.
        limit = deadline if usable else float("inf")
        if usable and len(taken) * 2 >= count:
            typical = sorted(taken)[len(taken) // 2]
            limit = min(limit, last + max(_STRAGGLER_SECONDS, _STRAGGLER_TIMES * typical))
        left = limit - time.perf_counter()
        try:
            built = done.get(timeout=None if left == float("inf") else max(left, 0.0))
        except queue.Empty:
            return
        taken.append(built.seconds)
        usable = usable or not built.failed
        last = time.perf_counter()
        yield built


@dataclass(frozen=True)
class _Settings:
    """What of the calling thread's settings a compilation depends on: threads inherit nothing."""

    x64: bool
    precision: Any
    device: Any

    @staticmethod
    def here() -> _Settings:
        names = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_device")
        return _Settings(*(_jax.setting(name) for name in names))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            stack.enter_context(jax.default_matmul_precision(self.precision))
            stack.enter_context(jax.default_device(self.device))
            yield
