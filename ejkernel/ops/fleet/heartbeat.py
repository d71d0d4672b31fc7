"""Heartbeats: a process that others wait for writes now and then that it still works, and the others watch that."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from ..core.errors import AgreementError
from .kv_store import KeyValueStore

# Silent for this long, a process counts as dead. Compiling and tracing let other threads run at least every few
# milliseconds, so this is generous; a process that counts as dead too early costs one heuristic cfg.
LEASE = 10.0
# Heartbeats in one lease.
_BEATS = 4


def beat_key(root: str, process: int) -> str:
    """Key of a process's heartbeat in the service."""
    return f"{root}/pulse/{process}"


class Heartbeat:
    """Heartbeat of this process, while other processes may wait for it."""

    def __init__(self, service: KeyValueStore, key: str, life: str, lease: float = LEASE) -> None:
        self._service = service
        self._key = key
        self._life = life
        self._lease = lease
        self._count = 0
        self._users = 0
        self._lock = threading.Lock()
        self._rest = threading.Event()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Beats for the time of a `with` block; the first beat comes before the block."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._beat()
                self._rest = threading.Event()
                threading.Thread(target=self._run, args=(self._rest,), daemon=True, name="ejkernel-pulse").start()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._rest.set()

    def _run(self, rest: threading.Event) -> None:
        while not rest.wait(self._lease / _BEATS):
            try:
                self._beat()
            # The thread that works will meet the same error, and raise it.
            except AgreementError:
                return

    def _beat(self) -> None:
        self._count += 1
        self._service.set(self._key, f"{self._life} {self._count}")


class HeartbeatWatch:
    """Watches another process's heartbeat by this process's own clock."""

    def __init__(
        self,
        service: KeyValueStore,
        key: str,
        life: str,
        lease: float = LEASE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._key = key
        self._life = life
        self._lease = lease
        self._clock = clock
        self._last: str | None = None
        self._since = clock()

    @property
    def pause(self) -> float:
        """Seconds to wait before looking again."""
        return self._lease / _BEATS

    def alive(self) -> bool:
        """Has the process beaten within the lease, without a restart?"""
        found = self._service.get(self._key)
        if found is not None and found.partition(" ")[0] != self._life:
            # The process was started again: the work of its former life is lost.
            return False
        if found != self._last:
            self._last, self._since = found, self._clock()
        return self._clock() - self._since < self._lease
