"""Processes that trace the candidates of a program's calls, ahead of their tunings.

Tracing and exporting is Python's work, and Python's lock has one thread of a process do it: on an H200 the candidates
of a mixture-of-experts step took longer to trace than to compile and to time together. So some processes trace, in the
order in which the calls will be tuned; a tuning takes what is there, waits for what is being traced, and traces itself
what no process has begun with. A candidate at which two processes die is out; one that a process refuses is traced
where it is tuned.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from ...core.codec import encode
from ...core.errors import IsolationError
from ...core.record import Objective
from ...tuning.worker.process import WorkerGone, WorkerProcess
from ...tuning.worker.protocol import Message
from ...tuning.worker.tracing import StillTracing, TracedElsewhere, TracerGone, tracing_in_force
from ..pool.task import AskedCall

# A process has one candidate at work and the next one at hand: an answer waits for Python's lock here.
_AT_ONCE = 2
# Starts of processes after the first ones, however many candidates take one down.
_RESTARTS = 8
_SERVES = "ejkernel.ops.programs.tracing.tracer"


@dataclass(eq=False)
class _Task:
    """One candidate to be traced."""

    number: int
    call: str
    cfg: Any
    state: Literal["waiting", "begun", "done"] = "waiting"
    found: TracedElsewhere | None = None
    # Why it is out: it took a process down.
    gone: str = ""
    # Has a process ended at it once?
    again: bool = False


@dataclass
class _Wanted:
    """A call with the candidates that are traced for it, by the text of their cfgs."""

    text: str
    tasks: dict[str, _Task] = field(default_factory=dict)


@final
class Tracers:
    """Some processes, and the candidates that wait for them."""

    def __init__(self, head: Mapping[str, Any], count: int) -> None:
        self._head = head
        self._calls: dict[str, _Wanted] = {}
        self._waiting: deque[_Task] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._restarts = _RESTARTS
        self._numbers = 0
        # Why processes ended that should not have.
        self.failures: list[str] = []
        self._left = count
        self._processes: set[WorkerProcess] = set()
        self._threads = [
            threading.Thread(target=self._serve, name=f"ejkernel-tracer-{place}", daemon=True) for place in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Tunings in a `with` block take what is traced here; the processes end with it."""
        token = tracing_in_force.set(self)
        try:
            yield
        finally:
            tracing_in_force.reset(token)
            self.close()

    def want(self, asked: AskedCall, cfgs: Sequence[Any]) -> None:
        """Has candidates of a call traced, behind those that were wanted before."""
        name = _name(asked.key, asked.objective)
        text = json.dumps({**vars(asked), "key": list(asked.key)})
        with self._changed:
            wanted = self._calls.setdefault(name, _Wanted(text))
            for cfg in cfgs:
                form = json.dumps(encode(cfg))
                if form not in wanted.tasks:
                    task = wanted.tasks[form] = _Task(self._numbers, name, json.loads(form))
                    self._numbers += 1
                    self._waiting.append(task)
            self._changed.notify_all()

    def call(self, key: tuple[str, str, str], objective: Objective) -> WantedCall | None:
        """The candidates of a call, which go before all others from now on."""
        name = _name(key, objective)
        with self._changed:
            if name not in self._calls or not self._left:
                return None
            first = [task for task in self._waiting if task.call == name]
            rest = [task for task in self._waiting if task.call != name]
            self._waiting = deque([*first, *rest])
        return WantedCall(self, name)

    def close(self) -> None:
        """Ends the processes."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
            # One that is still starting would be waited for.
            for process in self._processes:
                process.kill()
        for thread in self._threads:
            thread.join()

    def task(self, call: str, cfg: Any) -> _Task | None:
        """The task of a candidate, if it is one."""
        return self._calls[call].tasks.get(json.dumps(encode(cfg)))

    def withdraw(self, task: _Task) -> bool:
        """Takes back a candidate that no process has begun with."""
        with self._changed:
            if task.state != "waiting":
                return False
            with contextlib.suppress(ValueError):
                self._waiting.remove(task)
            task.state = "done"
            return True

    def wait(self, task: _Task, until: float) -> None:
        """Waits for a candidate that a process has begun with."""
        with self._changed:
            while task.state != "done" and self._left and not self._closed:
                left = until - time.perf_counter()
                if left <= 0:
                    raise StillTracing
                self._changed.wait(min(left, 1.0))

    def _serve(self) -> None:
        """One process after the other, as long as there is something to do."""
        try:
            while (process := self._started()) is not None:
                try:
                    if not self._follow(process):
                        return
                finally:
                    with self._changed:
                        self._processes.discard(process)
                    process.end()
        # It cannot be started, or is killed before it is ready: what it would have traced is traced elsewhere.
        except IsolationError as error:
            if not self._closed:
                self.failures.append(str(error))
        finally:
            with self._changed:
                self._left -= 1
                self._changed.notify_all()

    def _started(self) -> WorkerProcess | None:
        with self._changed:
            if self._closed:
                return None
            process = WorkerProcess(self._head, serves=_SERVES)
            self._processes.add(process)
            return process

    def _follow(self, process: WorkerProcess) -> bool:
        """Gives a process one candidate after the other; True where another process is to go on."""
        process.ready()
        at_work: deque[_Task] = deque()
        known: set[str] = set()
        try:
            while not self._closed:
                while len(at_work) < _AT_ONCE and (task := self._next(wait=not at_work)) is not None:
                    if task.call not in known:
                        known.add(task.call)
                        process.send("call", name=task.call, text=self._calls[task.call].text)
                    process.send("trace", task=task.number, name=task.call, cfg=task.cfg)
                    at_work.append(task)
                if not at_work:
                    return False
                message = process.hear()
                if message is not None and message.verb in ("traced", "refused"):
                    self._done(at_work.popleft(), message)
                elif message is not None:
                    raise IsolationError(f"a process that traces cannot be used: {message.head.get('message')}")
        except WorkerGone:
            return self._gone(process, at_work)
        finally:
            self._give_back(at_work)
        return False

    def _next(self, *, wait: bool) -> _Task | None:
        with self._changed:
            while wait and not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting:
                return None
            task = self._waiting.popleft()
            task.state = "begun"
            return task

    def _done(self, task: _Task, message: Message) -> None:
        with self._changed:
            if message.verb == "traced":
                head = message.head
                task.found = TracedElsewhere(
                    bytes(message.parts[0]),
                    *(str(head["text"]), int(head["outputs"]), head["objective"], str(head["structure"])),
                    tuple(None if one is None else (str(one[0]), tuple(one[1])) for one in head["extra"]),
                    str(head["notes"]),
                    bool(head["products"]),
                )
            task.state = "done"
            self._changed.notify_all()

    def _gone(self, process: WorkerProcess, at_work: deque[_Task]) -> bool:
        """A process has died, of the first of what it had."""
        words = process.last_words()
        with self._changed:
            # Once may be chance, or a kill from outside: another process tries it.
            if at_work and at_work[0].again:
                culprit = at_work.popleft()
                culprit.gone, culprit.state = f"the process that traced it ended ({words})", "done"
            elif at_work:
                at_work[0].again = True
            self._restarts -= 1
            self._changed.notify_all()
            return self._restarts >= 0

    def _give_back(self, at_work: deque[_Task]) -> None:
        with self._changed:
            for task in reversed(at_work):
                task.state = "waiting"
                self._waiting.appendleft(task)
            self._changed.notify_all()


@final
@dataclass(frozen=True)
class WantedCall:
    """The candidates of one call, as a tuning takes them."""

    tracers: Tracers
    name: str

    def peek(self, cfg: Any) -> TracedElsewhere | None:
        """The program of a candidate, where it is there by now."""
        task = self.tracers.task(self.name, cfg)
        return None if task is None else task.found

    def take(self, cfg: Any) -> None:
        """This candidate is traced here, and need not be elsewhere."""
        task = self.tracers.task(self.name, cfg)
        if task is not None:
            self.tracers.withdraw(task)

    def program(self, cfg: Any, until: float) -> TracedElsewhere | None:
        """The program of a candidate, waited for where a process is tracing it; None: it is to be traced here."""
        task = self.tracers.task(self.name, cfg)
        if task is None or self.tracers.withdraw(task):
            return None
        self.tracers.wait(task, until)
        if task.gone:
            raise TracerGone(task.gone)
        found, task.found = task.found, None
        return found


def _name(key: Sequence[str], objective: Objective) -> str:
    return json.dumps([*key, objective])
