"""One thread works on a key, the others wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator


class SingleFlight:
    """A lock for each key that a thread works on now."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[threading.RLock, int]] = {}
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def hold(self, key: Hashable) -> Iterator[bool]:
        """Holds the key; True where another thread had it, so that the answer may be there by now."""
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

    @contextlib.contextmanager
    def on_demand(self, key: Hashable) -> Iterator[Callable[[], bool]]:
        """Gives a function that holds the key from its call to the end of the block, and says whether it waited."""
        with contextlib.ExitStack() as held:
            yield lambda: held.enter_context(self.hold(key))
