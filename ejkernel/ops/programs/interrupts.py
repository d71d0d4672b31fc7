"""Ctrl-C that is not lost: Python drops an exception that is raised inside a callback or a finaliser."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import final


@final
class Interrupts:
    """Remembers whether the user has pressed Ctrl-C since a `with` block began."""

    def __init__(self) -> None:
        self.heard = False

    def check(self) -> None:
        """Raises the interrupt once more: the first may have come inside a callback, a finaliser or a lock."""
        if self.heard:
            raise KeyboardInterrupt


@contextlib.contextmanager
def noting_interrupts() -> Iterator[Interrupts]:
    """Notes Ctrl-C in a `with` block; a handler of the user's own, and other threads, are left alone.

    One that Python drops, and would print with a traceback, is raised by the next `check`.
    """
    noted = Interrupts()
    usual, printing = signal.getsignal(signal.SIGINT), sys.unraisablehook
    if threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        noted.heard = True
        signal.default_int_handler(number, frame)

    def dropped(found: sys.UnraisableHookArgs) -> None:
        if not (noted.heard and found.exc_type is KeyboardInterrupt):
            printing(found)

    signal.signal(signal.SIGINT, note)
    sys.unraisablehook = dropped
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, usual)
        sys.unraisablehook = printing
