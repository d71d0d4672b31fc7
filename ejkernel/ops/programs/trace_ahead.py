"""The next calls of a program are traced while this one is measured: tracing needs Python, and measuring the device.

The first call has none before it: it is traced on the asking thread, and the others after it, since two threads that
trace share Python's lock. What is traced goes to the worker at once, which compiles it while the device is measured on:
so a call that takes long to compile does not keep the other processors waiting.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import jax

from .. import _jax
from ..core.device import is_attached
from ..core.errors import IsolationError
from ..core.key import Key
from ..timing.compile_pool import JaxSettings
from ..tuning.job import is_abandoned
from ..tuning.worker.limits import Isolation
from ..tuning.worker.process import start_ahead
from ..tuning.worker.runner import worker_settings
from .found_call import FoundCall

# Calls behind the one that is measured. With three the processes that compile had nothing to do for ten seconds of a
# minute on an H200, while small calls were measured, and calls with many candidates had no turn. What is compiled is
# held until its turn, some megabytes a candidate.
DEPTH = 8


@dataclass(frozen=True, order=True)
class _Turn:
    """A call that is to be traced; the place is minus the number of calls from it to the last one."""

    place: int
    call: FoundCall | None = field(default=None, compare=False)
    end: float = field(default=math.inf, compare=False)


@final
class TracedAhead:
    """One call after the other on a thread of its own.

    Not on a CPU: the clock there would measure the tracing too.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        # Calls in the order of their turns, each with the time at which its tuning must be over; None is the end.
        self._waiting: queue.PriorityQueue[_Turn] = queue.PriorityQueue()
        self._is_closed = False
        self._let_go: list[Callable[[], None]] = []
        # The calls that were begun with, and not measured yet; set once they are traced.
        self._begun: dict[Key, threading.Event] = {}

    @staticmethod
    def pays(call: FoundCall) -> bool:
        """Is the device another one than the processor that traces?"""
        return str(call.device.platform) != "cpu"

    def trace(self, call: FoundCall, seconds: float | None) -> None:
        """Traces a call now, on this thread, unless that was begun with ahead; then it waits for that."""
        self.wait(call)
        if self.pays(call) and call.key not in self._begun:
            self._prepare(call, seconds, is_next=False)
        self._begun.pop(call.key, None)

    def begin(self, measured: FoundCall, calls: Sequence[FoundCall], seconds: float | None) -> None:
        """Begins with the first of these calls, on another thread, while one is measured.

        What a call raises is raised once more when its turn comes. A kernel around another one that is not tuned yet is
        traced when its turn comes, since its program depends on the other's cfg.
        """
        untuned = [measured]
        for place, call in enumerate(calls[:DEPTH]):
            if place and (not _is_light(call) or _is_sharded(call)):
                break
            if self.pays(call) and call.key not in self._begun and all(call.key not in one.outer for one in untuned):
                self._begun[call.key] = threading.Event()
                # A call that had to wait for another one still goes before those behind it.
                end = math.inf if seconds is None else time.perf_counter() + seconds
                self._waiting.put(_Turn(place - len(calls), call, end))
            untuned.append(call)
        # One that a kernel has ended is followed by another.
        if self._begun and (self._thread is None or not self._thread.is_alive()):
            settings, context = JaxSettings.here(), contextvars.copy_context()
            work = (self._work, settings)
            self._thread = threading.Thread(target=context.run, args=work, name="ejkernel-ahead", daemon=True)
            self._thread.start()

    def _work(self, settings: JaxSettings) -> None:
        is_abandoned.set(lambda: self._is_closed)
        try:
            with settings.entered():
                while (turn := self._waiting.get()).call is not None and not self._is_closed:
                    call, end = turn.call, turn.end
                    # The calls before it have taken some of its time.
                    left = end - time.perf_counter()
                    if left > 0:
                        self._prepare(call, None if end == math.inf else left, is_next=True)
                    self._begun[call.key].set()
        finally:
            # Nothing waits for a thread that has ended.
            for event in list(self._begun.values()):
                event.set()

    def _prepare(self, call: FoundCall, seconds: float | None, *, is_next: bool) -> None:
        # Ignores what a kernel raises here: the call's own tuning begins from the start and reports it.
        with contextlib.suppress(Exception), call.restored():
            self._let_go.append(call.selectors[0].prepare(call.inv, call.kernel, seconds=seconds, is_next=is_next))

    def wait(self, call: FoundCall, until: float = math.inf) -> None:
        """Waits for a call that was begun with, until this time at most."""
        if call.key in self._begun:
            self._begun[call.key].wait(None if until == math.inf else max(0.0, until - time.perf_counter()))

    def close(self) -> None:
        """Lets go of what was traced and not measured; the candidate that is being traced is waited for."""
        self._is_closed = True
        self._waiting.put(_Turn(0))
        if self._thread is not None:
            self._thread.join()
        for let_go in self._let_go:
            let_go()
        self._let_go.clear()


def start_worker(calls: Sequence[FoundCall]) -> None:
    """Starts the worker that will measure these calls, while they are looked through: it imports JAX meanwhile.

    If it cannot be started, the call that needs it reports that. On a CPU it is not started ahead: that would save few
    seconds.
    """
    if _jax.distributed() is not None:
        return
    for call in calls:
        selector = call.selectors[0]
        if TracedAhead.pays(call) and _is_light(call) and is_attached(call.device) and not selector.tuning_is_off():
            isolate = selector.tuner.isolate
            isolation = isolate if isinstance(isolate, Isolation) else Isolation()
            with contextlib.suppress(IsolationError), call.restored():
                start_ahead(**worker_settings(call.device, isolation))
            return


def _is_sharded(call: FoundCall) -> bool:
    """Is the call inside a mesh, or over one? Then its inputs are placed when it is traced, and held until its turn."""
    if call.inv.mesh is not None or (call.trace_context is not None and call.trace_context.mesh is not None):
        return True
    leaves = jax.tree_util.tree_leaves((call.inv.args, call.inv.kwargs))
    shardings = [sharding for leaf in leaves if (sharding := getattr(leaf, "sharding", None)) is not None]
    return any(one.num_devices > 1 for one in shardings)


def _is_light(call: FoundCall) -> bool:
    """Is the call measured by a worker? This process would hold the inputs of each call that it has traced."""
    tuner = call.selectors[0].tuner
    return getattr(tuner, "isolate", False) is not False and getattr(tuner, "clock", None) is None
