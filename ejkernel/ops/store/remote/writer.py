"""Writing to a remote in the background: a program never waits for it, and its end only within a bound."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, final

from ...core.key import Key
from ..snapshot import Raw
from .patience import SECONDS, said

if TYPE_CHECKING:
    from .remote_store import RemoteStore

log = logging.getLogger("ejkernel.ops")

# A remote that fails so often in a row is not tried again: the entries are in the local store.
_FAILURES = 2


@final
class BackgroundWriter:
    """The entries of one remote that wait to be written, and the thread that writes them."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = weakref.ref(store)
        self._waiting: deque[tuple[Key, Raw]] = deque()
        self._changed = threading.Condition()
        self._running = False
        self._failures = 0
        self._problem = ""

    def add(self, key: Key, raw: Raw) -> None:
        """Adds an entry; the thread that writes ends when nothing waits."""
        with self._changed:
            self._waiting.append((key, raw))
            start = not self._running and self._failures < _FAILURES
            self._running = self._running or start
        _writers.add(self)
        if start:
            threading.Thread(target=self._run, daemon=True, name="ejkernel-remote-writer").start()
        self._say()

    def flush(self, seconds: float) -> int:
        """Waits until nothing waits, at most so long; returns how many entries are not written."""
        end = time.monotonic() + seconds
        with self._changed:
            while self._running and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            waiting = len(self._waiting)
        self._say()
        return waiting

    def _run(self) -> None:
        while True:
            with self._changed:
                store = self._store()
                if not self._waiting or store is None or self._failures >= _FAILURES:
                    self._running = False
                    self._changed.notify_all()
                    return
                key, raw = self._waiting[0]
            try:
                if not store.knows(key, raw):
                    store.put_raw(key, raw)
            # Any error of a driver: the entry is in the local store, and `ejkernel cache push` brings it later.
            except Exception as error:
                self._failed(store, error)
                continue
            with self._changed:
                self._failures = 0
                self._waiting.popleft()

    def _failed(self, store: RemoteStore, error: Exception) -> None:
        with self._changed:
            self._failures += 1
            if self._failures >= _FAILURES:
                self._problem = (
                    f"{store} cannot be written ({said(error)}); what was tuned is kept locally, and "
                    "`ejkernel cache push` brings it there later"
                )

    def _say(self) -> None:
        """Names a problem on the program's own thread: a warning may be an error there, and must not end the writer."""
        store, self._problem, problem = self._store(), "", self._problem
        if problem and store is not None:
            store.say(problem)

    def leave(self) -> None:
        """Waits at the end of the process, within the patience that is left with the remote."""
        store = self._store()
        if store is None:
            return
        named = bool(self._problem) or self._failures >= _FAILURES
        left = self.flush(0.0 if store.reason else SECONDS)
        if left and not named:
            store.say(f"{left} tuned entries are not in {store} yet; `ejkernel cache push` brings them there")


_writers: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


def _leave_all() -> None:
    for writer in list(_writers):
        try:
            writer.leave()
        # Where warnings are errors, one of them must not stop what else is done at the end of a process.
        except Warning as warning:
            log.warning("%s", warning)


# Before the pools of threads that drivers look up names with are closed; atexit comes after that.
getattr(threading, "_register_atexit", atexit.register)(_leave_all)
