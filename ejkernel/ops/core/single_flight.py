"""Single flight: one thread works on a key, the other threads wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator
from types import TracebackType
from typing import Self, final


class SingleFlight:
    """A mutex for each key that a thread works on now."""

    def __init__(self) -> None:
        self._mutexes: dict[Hashable, tuple[threading.RLock, int]] = {}
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def hold(self, key: Hashable) -> Iterator[bool]:
        """Holds the key; gives True where another thread held it before, so that the answer may be there by now."""
        with self._mutex:
            mutex, users = self._mutexes.get(key, (threading.RLock(), 0))
            self._mutexes[key] = (mutex, users + 1)
        waited = not mutex.acquire(blocking=False)
        if waited:
            mutex.acquire()
        try:
            yield waited
        finally:
            mutex.release()
            with self._mutex:
                mutex, users = self._mutexes[key]
                if users == 1:
                    del self._mutexes[key]
                else:
                    self._mutexes[key] = (mutex, users - 1)

    def on_demand(self, key: Hashable) -> Flight:
        """A block that may hold the key."""
        return Flight(self, key)


@final
class Flight:
    """A `with` block that holds its key from the call of `hold` to its end."""

    # A class, not a generator: every choice enters one, and few hold it.
    __slots__ = ("_flights", "_held", "_key")

    def __init__(self, flights: SingleFlight, key: Hashable) -> None:
        self._flights = flights
        self._key = key
        self._held: contextlib.AbstractContextManager[bool] | None = None

    def hold(self) -> bool:
        """Holds the key; True where another thread had it."""
        self._held = self._flights.hold(self._key)
        return self._held.__enter__()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held is not None:
            self._held.__exit__(kind, error, trace)
