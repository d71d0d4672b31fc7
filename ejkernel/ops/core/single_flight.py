"""Single flight: one thread works on a key, the other threads wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator


class SingleFlight:
    """A lock for each key that a thread works on now."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[threading.RLock, int]] = {}
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def hold(self, key: Hashable) -> Iterator[bool]:
        """Holds the key; gives True where another thread held it before, so that the answer may be there by now."""
        with self._mutex:
            lock, users = self._locks.get(key, (threading.RLock(), 0))
            self._locks[key] = (lock, users + 1)
        waited = not lock.acquire(blocking=False)
        if waited:
            lock.acquire()
        try:
            yield waited
        finally:
            lock.release()
            with self._mutex:
                lock, users = self._locks[key]
                if users == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = (lock, users - 1)
