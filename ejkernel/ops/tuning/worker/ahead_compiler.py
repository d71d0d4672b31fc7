"""Compiles programs of the next tunings in a worker, while this one is measured.

The parent sends them as it writes them down, and sends them again when their tuning begins; by then most are compiled.
Nothing of them runs on the device: where the compiler would time parts there, a program is compiled without that. They
wait until the programs of the tuning at work are compiled: JAX compiles one Mosaic kernel of a process at a time, and
nothing that needs LLVM beside it, so that on an H200 candidates took twice as long beside those of the next tuning.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, final

from ...timing.compile_pool import JaxSettings, compiling
from .executables import FlatExecutable, compiled, loaded

# The tuning that is measured goes first: its candidates wait for their compilers, and these programs for a later turn.
_NICER = 5
# Tunings that programs are given ahead of at most, as many calls are traced ahead; one that was not taken by then will
# not be.
_TUNINGS = 9


@final
class AheadCompiler:
    """Compiles programs on threads of its own; each is taken once."""

    def __init__(self, load: Callable[[bytes], Any] = loaded) -> None:
        self._load = load
        self._changed = threading.Condition()
        # Programs that no thread has begun with, in their order, and the outcomes of the others.
        self._waiting: deque[bytes] = deque()
        # What waits for nothing: programs, and other work with a future that says what came of it.
        self._at_once: deque[bytes] = deque()
        self._chores: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._begun: dict[bytes, Future[FlatExecutable]] = {}
        # Tunings that have begun, and how many had when a program was given.
        self._tunings = 0
        self._given: dict[bytes, int] = {}
        self._settings: JaxSettings | None = None
        # Are programs of the tuning at work being compiled?
        self._is_held = False
        self._has_threads = False
        self._priority = 0

    def begin(self) -> None:
        """Has programs compiled from now on with this thread's settings, and with a lower priority than it has."""
        self._settings = JaxSettings.here()
        self._priority = _own_priority()

    def hold(self) -> None:
        """Begins with no program until `go`; those under way go on."""
        with self._changed:
            self._is_held = True

    def go(self) -> None:
        """The tuning at work has its programs."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Begins with no program meanwhile."""
        self.hold()
        try:
            yield
        finally:
            self.go()

    def give(self, data: bytes, *, at_once: bool = False) -> None:
        """Has a program compiled; at once where it is no candidate, and so small."""
        with self._changed:
            if self._settings is None or data in self._given:
                return
            self._given[data] = self._tunings
            (self._at_once if at_once else self._waiting).append(data)
            self._begin_threads()

    def _begin_with(self, data: bytes) -> tuple[Callable[[], Any], Future[Any]]:
        future: Future[Any] = Future()
        self._begun[data] = future
        return functools.partial(compiled, data, load=self._load), future

    def _begin_threads(self) -> None:
        self._changed.notify()
        if not self._has_threads:
            self._has_threads = True
            # Half of the processors: the parent traces meanwhile.
            for _ in range(max(1, (os.cpu_count() or 2) // 2)):
                threading.Thread(target=self._work, name="ejkernel-ahead", daemon=True).start()

    def also(self, work: Callable[[], Any]) -> None:
        """Has something else compiled at once, that is kept where it is found again."""
        with self._changed:
            if self._settings is not None:
                self._chores.append((work, Future()))
                self._begin_threads()

    def take(self, data: bytes, *, for_speed: bool | None = None) -> FlatExecutable | None:
        """A program that was given, once it is there; None where it was not begun, failed, or is of another kind.

        None for `for_speed`: of any kind.
        """
        with self._changed:
            self._given.pop(data, None)
            future = self._begun.pop(data, None)
            if future is None:
                self._remove(data)
                return None
        # What fails is compiled again where it belongs, and says why.
        if future.exception() is not None:
            return None
        found = future.result()
        return found if for_speed in (None, found.for_speed) else None

    def forget(self) -> None:
        """A tuning begins: lets go of what was given long ago and was not taken."""
        with self._changed:
            self._tunings += 1
            for data in [data for data, given in self._given.items() if self._tunings - given > _TUNINGS]:
                del self._given[data]
                if self._begun.pop(data, None) is None:
                    self._remove(data)

    def _remove(self, data: bytes) -> None:
        for queue in (self._at_once, self._waiting):
            with contextlib.suppress(ValueError):
                queue.remove(data)

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        if self._at_once:
            return self._begin_with(self._at_once.popleft())
        if self._chores:
            return self._chores.popleft()
        return self._begin_with(self._waiting.popleft()) if self._waiting and not self._is_held else None

    def _work(self) -> None:
        _give_way(self._priority)
        while True:
            with self._changed:
                while (found := self._next()) is None:
                    self._changed.wait()
                work, future = found
                settings = self._settings
            assert settings is not None
            try:
                with compiling(), settings.entered():
                    future.set_result(work())
            # Its tuning compiles it once more, and says why not.
            except Exception as error:
                future.set_exception(error)


def _own_priority() -> int:
    """The priority of this thread; 0 elsewhere than on Linux, where threads have none."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    return 0


def _give_way(priority: int) -> None:
    """Has this thread go behind threads of this priority."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority + _NICER)
