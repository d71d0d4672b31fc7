"""In a worker: executables that other processes compile, waited for where a candidate is built."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, final

from ...timing.program import first_line
from .executables import FlatExecutable, read_back


class NotDelivered(Exception):
    """An executable that did not come in time, or that took down the processes that compiled it."""


class Delivery(NamedTuple):
    """An executable as bytes; empty: it is to be compiled here. `why` says that it must not be."""

    data: bytes = b""
    why: str = ""
    for_speed: bool = True
    seconds: float = 0.0


@final
class Deliveries:
    """Executables of one tuning, by the names of their programs; each is taken once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[str, Delivery] = {}
        self._taken: set[str] = set()
        # Why executables could not be loaded, by their names.
        self.refused: dict[str, str] = {}
        # May threads wait for what has not come? Those that began to wait in an earlier turn may not.
        self._waits = True
        self._turn = 0

    def begin(self) -> None:
        """Another tuning, or the same one sent again with all its executables: nothing of the last one is kept."""
        with self._changed:
            self._arrived.clear()
            self._taken.clear()
            self.refused.clear()
            self._waits = True
            self._turn += 1
            self._changed.notify_all()

    def arrive(self, name: str, delivery: Delivery) -> None:
        """One has come; it comes twice where two candidates have one program."""
        with self._changed:
            if name not in self._taken:
                self._arrived[name] = delivery
                self._changed.notify_all()

    def wait(self) -> None:
        """From now on threads wait for what has not come."""
        with self._changed:
            self._waits = True

    def stop_waiting(self) -> None:
        """The tuning goes on with those that are there: no thread is left with one that is not."""
        with self._changed:
            self._waits = False
            self._turn += 1
            self._changed.notify_all()

    def wait_for(self, name: str) -> None:
        """Waits until one is there, or was taken; `NotDelivered` where the tuning does not wait for it any longer."""
        with self._changed:
            turn = self._turn
            while name not in self._arrived and name not in self._taken:
                if not self._waits or turn != self._turn:
                    raise NotDelivered("still being compiled when the time was up")
                self._changed.wait()

    def take(self, name: str, program: bytes, *, for_speed: bool) -> FlatExecutable | None:
        """The executable of a program, once it is there; None where it is to be compiled here."""
        with self._changed:
            self.wait_for(name)
            if name in self._taken:
                return None
            self._taken.add(name)
            found = self._arrived.pop(name)
            # The others that wait for it compile it.
            self._changed.notify_all()
        if found.why:
            raise NotDelivered(found.why)
        if not found.data or found.for_speed != for_speed:
            return None
        try:
            return read_back(found.data, program, for_speed=for_speed, seconds=found.seconds)
        # It does not fit this process or its device. Compiled here it does, or says why not.
        except Exception as error:
            self.refused[name] = (
                f"compiled in the worker: what another process had made cannot be loaded ({first_line(error)})"
            )
            return None


def delivery_of(head: dict[str, Any], parts: list[bytes]) -> Delivery:
    """A delivery as its message has it."""
    return Delivery(bytes(parts[0]), str(head["why"]), bool(head["for_speed"]), float(head["seconds"]))
