"""The next call of a program is traced while this one is measured: tracing needs Python, and measuring the device.

The first call has none before it: it is traced on the asking thread, and the second one after it, since two threads
that trace share Python's lock.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import final

from ..core.key import Key
from ..timing.compile_pool import JaxSettings
from .found_call import FoundCall


@final
class TracedAhead:
    """One call at a time on a thread of its own.

    Not on a CPU: the clock there would measure the tracing too.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._let_go: list[Callable[[], None]] = []
        # The calls that were begun with, and not measured yet.
        self._begun: set[Key] = set()

    @staticmethod
    def pays(call: FoundCall) -> bool:
        """Is the device another one than the processor that traces?"""
        return str(call.device.platform) != "cpu"

    def trace(self, call: FoundCall, seconds: float | None) -> None:
        """Traces a call now, on this thread, unless that was begun with ahead; then it waits for that."""
        self.wait()
        if self.pays(call) and call.key not in self._begun:
            self._prepare(call, seconds, is_next=False)
        self._begun.discard(call.key)

    def begin(self, call: FoundCall, seconds: float | None) -> None:
        """Begins with a call on another thread; what it raises is raised once more when its turn comes."""
        if not self.pays(call):
            return
        self._begun.add(call.key)
        settings, context = JaxSettings.here(), contextvars.copy_context()

        def trace() -> None:
            with settings.entered():
                self._prepare(call, seconds, is_next=True)

        self._thread = threading.Thread(target=context.run, args=(trace,), name="ejkernel-ahead", daemon=True)
        self._thread.start()

    def _prepare(self, call: FoundCall, seconds: float | None, *, is_next: bool) -> None:
        # Whatever a kernel raises here: its turn, which then begins from the start, finds and tells it.
        with contextlib.suppress(Exception), call.restored():
            self._let_go.append(call.selectors[0].prepare(call.inv, call.kernel, seconds=seconds, is_next=is_next))

    def wait(self) -> None:
        """Waits for the call that was begun with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Lets go of what was traced and not measured."""
        self.wait()
        for let_go in self._let_go:
            let_go()
        self._let_go.clear()
