"""Executables that other processes compile, waited for in a worker where a candidate is built."""

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
        # May threads wait for an executable that has not come? A thread that began to wait before the turn changed
        # may not.
        self._waits = True
        self._turn = 0

    def begin(self) -> None:
        """Begins another tuning, or the same one anew, for which all executables are sent again: nothing is kept."""
        with self._changed:
            self._arrived.clear()
            self._taken.clear()
            self.refused.clear()
            self._waits = True
            self._turn += 1
            self._changed.notify_all()

    def arrive(self, name: str, delivery: Delivery) -> None:
        """Takes in an executable; one that two candidates share arrives twice."""
        with self._changed:
            if name not in self._taken:
                self._arrived[name] = delivery
                self._changed.notify_all()

    def wait(self) -> None:
        """Lets threads wait for executables that have not come, from now on."""
        with self._changed:
            self._waits = True

    def stop_waiting(self) -> None:
        """Ends every wait: the tuning goes on with the executables that are there."""
        with self._changed:
            self._waits = False
            self._turn += 1
            self._changed.notify_all()

    def wait_for(self, name: str) -> None:
        """Waits until an executable is there, or was taken; `NotDelivered` once waits have ended."""
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
            # Other threads that wait for this executable wake up, and compile it themselves.
            self._changed.notify_all()
        if found.why:
            raise NotDelivered(found.why)
        if not found.data or found.for_speed != for_speed:
            return None
        try:
            return read_back(found.data, program, for_speed=for_speed, seconds=found.seconds)
        # The executable does not fit this process or its device: the program is compiled here instead.
        except Exception as error:
            self.refused[name] = (
                f"compiled in the worker: what another process had made cannot be loaded ({first_line(error)})"
            )
            return None


def delivery_of(head: dict[str, Any], parts: list[bytes]) -> Delivery:
    """A delivery as its message has it."""
    return Delivery(bytes(parts[0]), str(head["why"]), bool(head["for_speed"]), float(head["seconds"]))
