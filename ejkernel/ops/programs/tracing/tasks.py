"""Work for the processes that trace and compile: one candidate each, and which is next.

Calls go in the order in which their tunings began, then in the order in which they will. Of one call, what is to be
traced goes before what is to be compiled, since a program must be traced before it is sent anywhere; but not where many
programs wait already: a tuning that has no time for all candidates would end with all of them traced and none compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, final

from ...tuning.worker.delivered import Delivery
from ...tuning.worker.tracing import TracedElsewhere

TaskState = Literal["waiting", "begun", "done"]


@dataclass(eq=False)
class TraceTask:
    """One candidate to be traced."""

    number: int
    call: str
    cfg: Any
    state: TaskState = "waiting"
    found: TracedElsewhere | None = None
    # Is the program kept once it is taken?
    is_kept: bool = False
    # Why it is out: it took a process down.
    gone: str = ""
    # Has a process ended at it once?
    again: bool = False


@dataclass(eq=False)
class CompileTask:
    """One exported program to be compiled."""

    number: int
    call: str
    data: bytes
    # Without what the compiler would run on the device, to find the fastest form of it.
    quickly: bool
    state: TaskState = "waiting"
    again: bool = False
    coming: Future[Delivery] = field(default_factory=Future)

    def end(self, delivery: Delivery) -> None:
        """The executable is there, or will not come."""
        self.state = "done"
        if not self.coming.done():
            self.coming.set_result(delivery)


TracerTask = TraceTask | CompileTask


@final
class TaskOrder:
    """The tasks that wait; where so many programs of a call wait to be compiled, no more are traced for it."""

    def __init__(self, most_programs: int) -> None:
        self._most_programs = most_programs
        self._waiting: list[TracerTask] = []
        # The turns of the calls that are being tuned, or were.
        self._turns: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, task: TracerTask) -> None:
        """Has a task wait; so does one that a process could not finish."""
        task.state = "waiting"
        self._waiting.append(task)

    def begin(self, call: str) -> None:
        """A tuning has begun: its call goes behind those that began before, and before all others."""
        self._turns.setdefault(call, len(self._turns))

    def remove(self, task: TracerTask) -> None:
        """Takes out a task that need not be done any more."""
        if task in self._waiting:
            self._waiting.remove(task)

    def clear(self) -> list[TracerTask]:
        """Takes all of them away."""
        left, self._waiting = self._waiting, []
        return left

    def next(self, beside: Iterable[TracerTask]) -> TracerTask | None:
        """The next task for a process that has these at work; a program is compiled alone.

        One at hand behind a compilation would wait for seconds, where another process could have it.
        """
        if not self._waiting:
            return None
        programs = Counter(task.call for task in self._waiting if isinstance(task, CompileTask))
        enough = {call for call, count in programs.items() if count >= self._most_programs}
        found = min(self._waiting, key=lambda task: self._turn(task, enough))
        at_work: Sequence[TracerTask] = list(beside)
        if at_work and any(isinstance(task, CompileTask) for task in (*at_work, found)):
            return None
        self._waiting.remove(found)
        found.state = "begun"
        return found

    def _turn(self, task: TracerTask, enough: Collection[str]) -> tuple[int, bool, int]:
        is_later = isinstance(task, CompileTask) != (task.call in enough)
        # Tasks are numbered in the order in which their calls will be tuned.
        return self._turns.get(task.call, len(self._turns)), is_later, task.number
