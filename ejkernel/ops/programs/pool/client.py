"""Texts to a pool and back: any executor with `submit`, whatever its futures are."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any, NamedTuple, final

from ...core.errors import IsolationError, SettingError
from ...tuning.worker.process import LacksModule, missing_module

# How often futures are asked that call nothing back.
_POLL_SECONDS = 0.02


class PoolBroken(Exception):
    """A pool that takes no more work; its argument says why."""


class Arrived(NamedTuple):
    """An attempt that ended: its text, or the reason why there is none."""

    number: int
    text: Any = None
    error: str = ""
    # The pool itself is of no use any more.
    broke: bool = False
    # The module that the worker could not import: it never began.
    lacks: str = ""


def check_pool(pool: Any) -> None:
    """Refuses what is no executor, and one that would fork a process with threads."""
    if isinstance(pool, type) or not callable(getattr(pool, "submit", None)):
        raise SettingError(
            f"pool={pool!r} has no submit(function, text) that returns a future; give an executor, such as "
            "ejkernel.ops.LocalPool(4), a ProcessPoolExecutor or a dask.distributed Client"
        )
    context = getattr(pool, "_mp_context", None) if isinstance(pool, ProcessPoolExecutor) else None
    if context is not None and context.get_start_method(allow_none=True) == "fork":
        raise SettingError(
            "this ProcessPoolExecutor forks, and a fork of a process in which JAX runs hangs; give it "
            "mp_context=multiprocessing.get_context('spawn'), or use ejkernel.ops.LocalPool"
        )


def workers_of(pool: Any) -> int | None:
    """The number of workers, where a pool tells it: `workers` of ours, `_max_workers` of Python's own."""
    for name in ("workers", "_max_workers"):
        found = getattr(pool, name, None)
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
    return None


@final
class PoolClient:
    """Sends tasks to a pool, and gives out what comes back in the order of its arrival."""

    def __init__(self, pool: Any, run: Callable[[str], str]) -> None:
        self._pool = pool
        self._run = run
        self._futures: dict[int, Any] = {}
        # Numbers of futures that are done.
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        # Futures that call nothing back.
        self._asked: set[int] = set()

    def send(self, number: int, text: str) -> None:
        """Submits a task; `PoolBroken` where the pool takes none."""
        try:
            future = self._pool.submit(self._run, text)
        except BrokenExecutor as error:
            raise PoolBroken(broke(said(error))) from error
        # Engines have classes of their own for a pool that is closed or broken.
        except Exception as error:
            raise PoolBroken(f"the pool takes no more work: {said(error)}") from error
        if not callable(getattr(future, "result", None)):
            raise PoolBroken(f"the pool's submit returned {future!r}, which is no future")
        self._futures[number] = future
        if callable(getattr(future, "add_done_callback", None)):
            future.add_done_callback(lambda *_: self._done.put(number))
        elif callable(getattr(future, "done", None)):
            self._asked.add(number)
        else:
            # Its result is all that it has, so that is waited for.
            self._done.put(number)

    def receive(self, seconds: float) -> Arrived | None:
        """The next attempt that ended, within these seconds; else None."""
        until = time.perf_counter() + seconds
        while True:
            for number in [number for number in self._asked if self._futures[number].done()]:
                self._asked.discard(number)
                self._done.put(number)
            left = max(0.0, until - time.perf_counter())
            try:
                number = self._done.get(timeout=min(left, _POLL_SECONDS) if self._asked else left)
            except queue.Empty:
                if left > 0:
                    continue
                return None
            # It stays until it is forgotten: Ctrl-C may come while it is read.
            future = self._futures.get(number)
            if future is not None:
                return _arrived(number, future)

    def forget(self, number: int) -> None:
        """Forgets an attempt that arrived, once all of it is kept."""
        self._futures.pop(number, None)

    def ended(self) -> list[Arrived]:
        """The attempts that ended and were not forgotten."""
        ended = [number for number, future in self._futures.items() if getattr(future, "done", bool)()]
        return [_arrived(number, self._futures[number]) for number in ended]

    def where(self, number: int) -> str:
        """The worker that an attempt runs on, where the pool's futures say so."""
        return str(getattr(self._futures.get(number), "worker", "") or "")

    def cancel(self, number: int) -> None:
        """Stops an attempt, as far as its future can."""
        self._asked.discard(number)
        future = self._futures.pop(number, None)
        if callable(getattr(future, "cancel", None)):
            # A future that cannot be stopped goes on in vain; engines raise what they like here.
            with contextlib.suppress(Exception):
                future.cancel()

    def close(self) -> None:
        """Stops everything that is under way."""
        for number in list(self._futures):
            self.cancel(number)


def _arrived(number: int, future: Any) -> Arrived:
    try:
        return Arrived(number, future.result())
    except BrokenExecutor as error:
        return Arrived(number, error=said(error), broke=True)
    # Engines have classes of their own, and what ended a worker, such as Ctrl-C or `sys.exit`, comes back as it is.
    except BaseException as error:
        return Arrived(number, error=said(error), lacks=_lacks(error))


def _lacks(error: BaseException) -> str:
    """The module that a worker lacks: `run_task` raises nothing, so what raises is the way to it."""
    # The last words of a process that died at its work may be about any module.
    if isinstance(error, IsolationError):
        return error.module if isinstance(error, LacksModule) else ""
    # Engines put the words into exceptions of their own.
    return missing_module(f"{error} {error.__cause__ or ''}")


def broke(error: str) -> str:
    """The sentence about a pool that ended, whether a submit or an answer showed it first."""
    return f"the pool broke ({error})"


def said(error: BaseException) -> str:
    """An exception in a line, its class first."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300].removesuffix(": ")
