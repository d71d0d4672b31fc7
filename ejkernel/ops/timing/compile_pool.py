"""Compiling many programs at once, without ever waiting for one that does not end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import jax

from .. import _jax

# A compile that takes so many times as long as the others, and at least so many seconds, is left behind.
_STRAGGLER_TIMES = 8.0
_STRAGGLER_SECONDS = 10.0
# Of ten programs or more, the last tenth gets as long again as all others took, or as the slowest of them, and at least
# so many seconds: on an H200 one candidate of a norm compiled for over 10 s where 24 others were done in one.
_LAST_TENTH_SECONDS = 1.0
# While less than half of the programs are done, the typical time is not known: the limit is so many times as long.
_PATIENCE = 3.0
# Seconds that the end of the process waits for threads that still compile.
_LAST_SECONDS = 2.0
# Those that are inside XLA's compiler then are waited for so long up to jaxlib 0.11, where they would end the process
# with a crash, whatever its status was to be: a training step compiles for some ten seconds.
_LAST_COMPILER_SECONDS = 30.0


@dataclass(frozen=True)
class Built:
    """The outcome of one compilation."""

    number: int
    outcome: Any
    seconds: float

    @property
    def failed(self) -> bool:
        """Did it raise?"""
        return isinstance(self.outcome, BaseException)


def workers_for(count: int) -> int:
    """The number of threads for so many programs: one for each core, and no more than Python's lock can feed."""
    return max(1, min(count, 16, os.cpu_count() or 1))


_pools: weakref.WeakSet[CompilePool] = weakref.WeakSet()
# Threads of pools, and those that are compiling now.
_threads: set[threading.Thread] = set()
_compiling: set[threading.Thread] = set()


@atexit.register
def _end_stragglers() -> None:
    """Ends what still compiles: a thread inside JAX while the interpreter shuts down takes the process down with it."""
    for pool in list(_pools):
        pool.leave(for_good=True)
    until = time.perf_counter() + _LAST_SECONDS
    while _compiling and time.perf_counter() < until:
        for thread in list(_compiling):
            # Reaches Python code at once, and the compiler when it returns; again, since a callback may swallow it.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
            thread.join(0.05)
    if jax.__version_info__ < (0, 12):
        until = time.perf_counter() + _LAST_COMPILER_SECONDS
        while any(map(_is_in_compiler, list(_compiling))) and time.perf_counter() < until:
            time.sleep(0.05)
    # A thread that has stopped compiling still leaves JAX's settings: the interpreter must not shut down before that.
    for thread in _threads - _compiling:
        thread.join(max(until - time.perf_counter(), 0.0))


def _is_in_compiler(thread: threading.Thread) -> bool:
    """Is this thread inside XLA's compiler, or just behind it?"""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename == _jax.COMPILER


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Marks this thread as compiling, so that the end of the process stops it first."""
    _compiling.add(threading.current_thread())
    try:
        yield
    finally:
        _compiling.discard(threading.current_thread())


def leave_process(status: int) -> NoReturn:
    """Ends a program of ours at once, with this status, whatever is still being compiled.

    Up to jaxlib 0.11 the end of the interpreter aborts a process while its compiler still runs: there is no other way
    out with the right status.
    """
    if _compiling:
        sys.stdout.flush()
        sys.stderr.flush()
        # `os._exit` skips the exit functions of stores and loggers, so they run here; no compiler is waited for.
        atexit.unregister(_end_stragglers)
        atexit._run_exitfuncs()
        os._exit(status)
    sys.exit(status)


class CompilePool:
    """Threads that compile what is given to them, from the first one on.

    They are daemons: a compilation that never ends delays neither the answer nor the end of the process.
    """

    def __init__(self, workers: int) -> None:
        # Number, build, and whether it is built even where the pool was left before its turn.
        self._waiting: queue.SimpleQueue[tuple[int, Callable[[], Any], bool] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Built | None] = queue.SimpleQueue()
        self._given = 0
        self._settings = JaxSettings.here()
        self._left = self._is_over = False
        # The start time of each compilation that is under way.
        self._started: dict[int, float] = {}
        self._workers = workers
        self._threads = 0
        _pools.add(self)
        for _ in range(workers):
            self._hire()

    def _hire(self) -> None:
        self._threads += 1
        thread = threading.Thread(target=self._work, name="ejkernel-compile", daemon=True)
        thread.start()
        _threads.difference_update([old for old in list(_threads) if not old.is_alive()])
        _threads.add(thread)

    def give(self, number: int, build: Callable[[], Any], *, stays: bool = False) -> None:
        """Adds a compilation. `stays`: it is begun with although the pool was left, since `late` waits for it."""
        self._given += 1
        self._waiting.put((number, build, stays))

    def wake(self) -> None:
        """Wakes the thread that waits for results: it gets None."""
        self._done.put(None)

    def results(
        self, deadline: float, *, usable: bool = False, needed: Collection[int] = (), latest: float = math.inf
    ) -> Iterator[Built | None]:
        """Gives each compilation as it ends, but none that has not ended by the deadline and no straggler.

        Without a usable program the first one is waited for beyond the deadline, until `latest`. A program with a
        number in `needed` has longer than others before it counts as a straggler.
        """
        try:
            yield from self._as_they_end(deadline, usable, set(needed), latest)
        finally:
            self.leave()

    def late(self, numbers: Collection[int], until: float) -> Built | None:
        """The first of these programs that ends after `results` did; None where none does by this time."""
        while (left := until - time.perf_counter()) > 0:
            try:
                built = self._done.get(timeout=left)
            except queue.Empty:
                break
            if built is not None and built.number in numbers:
                return built
        return None

    def has_news(self) -> bool:
        """Has a compilation ended that `results` has not given yet?"""
        return not self._done.empty()

    def leave(self, *, for_good: bool = False) -> None:
        """Lets the threads go; one that still compiles goes when it is done. `for_good`: nothing is begun with."""
        self._left, self._is_over = True, self._is_over or for_good
        for _ in range(self._threads):
            self._waiting.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def _as_they_end(self, deadline: float, usable: bool, needed: set[int], latest: float) -> Iterator[Built | None]:
        taken: list[float] = []
        start = last = time.perf_counter()
        while len(taken) < self._given:
            typical = sorted(taken)[len(taken) // 2] if taken else 0.0
            patience = max(_STRAGGLER_SECONDS, _STRAGGLER_TIMES * typical) * (_PATIENCE if needed else 1.0)
            half = len(taken) * 2 >= self._given
            limit = deadline if usable else latest
            if usable and half:
                limit = min(limit, last + patience)
            if usable and not needed and self._given >= 10 and len(taken) >= 0.9 * self._given:
                limit = min(limit, last + max(_LAST_TENTH_SECONDS, last - start, *taken))
            now = time.perf_counter()
            late = now >= deadline
            overdue = now - patience * (1.0 if half or late else _PATIENCE)
            if self._is_stuck(len(taken), overdue) and (usable or late):
                return
            # Wakes up now and then, since the compilations under way change.
            wait = min(limit - now, _STRAGGLER_SECONDS if late else min(_STRAGGLER_SECONDS, deadline - now))
            try:
                built = self._done.get(timeout=max(wait, 0.0))
            except queue.Empty:
                if time.perf_counter() >= limit:
                    return
                continue
            if built is None:
                yield None
                continue
            needed.discard(built.number)
            taken.append(built.seconds)
            # A program of a candidate can be used. A number below zero is a reference's, and an outcome that is an int
            # names another candidate, which may still be compiling.
            usable = usable or not (built.number < 0 or built.failed or isinstance(built.outcome, int))
            last = time.perf_counter()
            yield built

    def _is_stuck(self, taken: int, overdue: float) -> bool:
        """Are all compilations under way since before this time, with no thread free for those that wait?"""
        under_way = list(self._started.values())
        waiting = self._waiting.qsize()
        lost = sum(since <= overdue for since in under_way)
        # A straggler's thread is lost to the others: another one takes its place.
        if waiting and lost > self._threads - self._workers < self._workers:
            self._hire()
            return False
        # A program between the queue and its thread is in none of the counts: then the sum is less than was given.
        return 0 < lost == len(under_way) and taken + lost + waiting == self._given

    def _work(self) -> None:
        with self._settings.entered():
            while (job := self._waiting.get()) is not None:
                number, build, stays = job
                if self._is_over or (self._left and not stays):
                    continue
                start = self._started[number] = time.perf_counter()
                try:
                    with compiling():
                        outcome: Any = build()
                # Whatever a candidate raises is the candidate's outcome.
                except Exception as error:
                    outcome = error
                finally:
                    del self._started[number]
                # A program that was compiled ahead counts with the seconds that it took then.
                ahead = getattr(outcome, "ahead_s", 0.0)
                self._done.put(Built(number, outcome, max(time.perf_counter() - start, ahead)))


def compile_all(jobs: Sequence[tuple[int, Callable[[], Any]]], *, workers: int, deadline: float) -> Iterator[Built]:
    """Compiles all of these in threads and gives each as it ends."""
    with CompilePool(min(workers, len(jobs))) as pool:
        for number, build in jobs:
            pool.give(number, build)
        yield from (built for built in pool.results(deadline) if built is not None)


@dataclass(frozen=True)
class JaxSettings:
    """Settings of the calling thread that a compilation depends on: threads inherit nothing."""

    x64: bool
    precision: Any
    device: Any

    @staticmethod
    def here() -> JaxSettings:
        """The settings of this thread."""
        names = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_device")
        return JaxSettings(*(_jax.setting(name) for name in names))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Has them hold in another thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            stack.enter_context(jax.default_matmul_precision(self.precision))
            stack.enter_context(jax.default_device(self.device))
            yield
