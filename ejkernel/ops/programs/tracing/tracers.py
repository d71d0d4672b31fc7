"""Processes that trace and compile the candidates of a program's calls, ahead of their tunings.

Tracing and exporting is Python's work, and Python's lock has one thread of a process do it; Mosaic kernels are compiled
one at a time in a process. On an H200 both took longer than to time the candidates. So some processes trace and
compile, in the order in which the calls will be tuned. A tuning takes what is traced, waits for what is being traced,
and traces itself what no process has begun with; all its programs are compiled here, and its worker, which measures,
loads the executables. A candidate at which two processes die is out; one that a process refuses is traced, or
compiled, where it is tuned.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, final

from ...core.codec import encode
from ...core.errors import IsolationError
from ...core.record import Objective
from ...tuning.worker.delivered import Delivery
from ...tuning.worker.process import FROM_OUTSIDE, WorkerGone, WorkerProcess
from ...tuning.worker.protocol import Message
from ...tuning.worker.tracing import StillTracing, TracedElsewhere, TracerGone, tracing_in_force
from ..pool.task import AskedCall
from .tasks import CompileTask, TaskOrder, TracerTask, TraceTask

# A process has one candidate at work and the next one at hand: an answer waits for Python's lock here.
_AT_ONCE = 2
# With so many processes a candidate is waited for that none of them has begun with: here it takes as long as there, and
# keeps those behind it waiting.
_MANY = 4
# For so many seconds: then all of them have other work. The first candidate, which is compared, has so many times as
# long once a process has begun with it: then it does not come to an end.
_PATIENCE, _ONCE_BEGUN = 5.0, 3.0
# Programs that wait to be compiled, for each process: enough that none of them is without work.
_PROGRAMS_EACH = 2
# Starts of processes after the first ones, however many candidates take one down.
_RESTARTS = 8
_SERVES = "ejkernel.ops.programs.tracing.tracer"
# Seconds that a process may trace or compile one candidate: others wait behind one that never ends.
_LONGEST_TASK = 120.0
# Bytes of programs that are kept for a second tuning of their calls: to trace a Mosaic kernel takes a second.
_MOST_KEPT = 256 << 20
# An executable that is to be made elsewhere.
_NOT_HERE = Delivery()


@dataclass
class _Wanted:
    """A call with the candidates that are traced for it, by the text of their cfgs."""

    text: str
    tasks: dict[str, TraceTask] = field(default_factory=dict)
    # Of its programs that are compiled, by themselves.
    programs: dict[bytes, CompileTask] = field(default_factory=dict)
    # Are its candidates waited for that no process has begun with? Not any more once that was in vain.
    is_awaited: bool = True


@final
class Tracers:
    """Some processes, and the candidates that wait for them."""

    def __init__(self, head: Mapping[str, Any], count: int, *, compiles: bool = False) -> None:
        self._head = head
        self._compiles = compiles
        self._calls: dict[str, _Wanted] = {}
        self._waiting = TaskOrder(most_programs=max(1, _PROGRAMS_EACH * count))
        self._changed = threading.Condition()
        self._closed = False
        self._restarts = _RESTARTS
        self._numbers = 0
        self._kept = 0
        # Why processes ended that should not have.
        self.failures: list[str] = []
        self._left = count
        # Processes that can be used by now.
        self._ready = 0
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
                    task = wanted.tasks[form] = TraceTask(self._numbers, name, json.loads(form))
                    self._numbers += 1
                    self._waiting.add(task)
            self._changed.notify_all()

    def call(self, key: tuple[str, str, str], objective: Objective) -> WantedCall | None:
        """The candidates of a call, which go before those of calls that were not asked for yet."""
        name = _name(key, objective)
        with self._changed:
            if name not in self._calls or not self._left:
                return None
            self._waiting.begin(name)
        return WantedCall(self, name)

    def compile(self, call: str, data: bytes, *, quickly: bool) -> Future[Delivery] | None:
        """The executable of an exported program of a call, once a process has compiled it; None where none does."""
        with self._changed:
            if not self._compiles or self._closed or not self._left:
                return None
            known = self._calls[call].programs
            if data not in known:
                known[data] = CompileTask(self._numbers, call, data, quickly)
                self._numbers += 1
                self._waiting.add(known[data])
                self._changed.notify_all()
            return known[data].coming

    def let_go(self, call: str) -> None:
        """A call is tuned: what was compiled for it, and what is still to be traced, is not needed any more."""
        with self._changed:
            wanted = self._calls[call]
            programs, wanted.programs = wanted.programs, {}
            for task in programs.values():
                self._waiting.remove(task)
                task.end(_NOT_HERE)
            self.stop_tracing(call)

    def stop_tracing(self, call: str) -> None:
        """A tuning takes no more candidates: those of it that no process has begun with need not be traced."""
        with self._changed:
            for task in self._calls[call].tasks.values():
                self.withdraw(task)

    def close(self) -> None:
        """Ends the processes."""
        with self._changed:
            self._closed = True
            self._give_up()
            self._changed.notify_all()
            # One that is still starting would be waited for.
            for process in self._processes:
                process.kill()
        for thread in self._threads:
            thread.join()

    def task(self, call: str, cfg: Any) -> TraceTask | None:
        """The task of a candidate, if it is one."""
        return self._calls[call].tasks.get(json.dumps(encode(cfg)))

    def wait_a_little(self, task: TraceTask, until: float, *, for_its_end: bool) -> None:
        """Waits until one of many processes has begun with a candidate, or has its program."""
        start = time.perf_counter()
        ends = {"done"} if for_its_end else {"done", "begun"}
        with self._changed:
            wanted = self._calls[task.call]
            while task.state not in ends and wanted.is_awaited and self._ready >= _MANY and not self._closed:
                now = time.perf_counter()
                patience = start + _PATIENCE * (_ONCE_BEGUN if task.state == "begun" else 1.0)
                if now >= until:
                    return
                wanted.is_awaited = now < patience
                self._changed.wait(max(0.0, min(until - now, patience - now, 1.0)))

    def withdraw(self, task: TraceTask) -> bool:
        """Takes back a candidate that no process has begun with."""
        with self._changed:
            if task.state != "waiting" or self._closed:
                return False
            self._waiting.remove(task)
            task.state = "done"
            return True

    def wait(self, task: TraceTask, until: float) -> None:
        """Waits for a candidate; `StillTracing` where it does not come, since the time or the whole tuning is over."""
        with self._changed:
            while task.state != "done" and self._left and not self._closed:
                left = until - time.perf_counter()
                if left <= 0:
                    raise StillTracing
                self._changed.wait(min(left, 1.0))
            if task.state != "done" and self._closed:
                raise StillTracing

    def taken(self, task: TraceTask) -> TracedElsewhere | None:
        """The program of a candidate, which is kept for a second tuning while there is room."""
        found = task.found
        if found is None or task.is_kept:
            return found
        with self._changed:
            task.is_kept = self._kept + len(found.data) <= _MOST_KEPT
            if task.is_kept:
                self._kept += len(found.data)
            else:
                task.found = None
        return found

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
                if not self._left:
                    self._give_up()
                self._changed.notify_all()

    def _give_up(self) -> None:
        """Leaves all programs to be compiled elsewhere, since no process goes on."""
        self._waiting.clear()
        for wanted in self._calls.values():
            for task in wanted.programs.values():
                task.end(_NOT_HERE)

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
        at_work: deque[TracerTask] = deque()
        known: set[str] = set()
        self._count_ready(1)
        try:
            since = 0.0
            while not self._closed:
                while len(at_work) < _AT_ONCE and (task := self._next(at_work)) is not None:
                    if not at_work:
                        since = time.perf_counter()
                        if not process.is_alive():
                            # It has ended while it had nothing to do, which is not this candidate's doing.
                            self._give_back([task])
                            raise WorkerGone
                    self._send(process, task, known)
                    at_work.append(task)
                if not at_work:
                    return False
                message = process.hear()
                if message is not None and message.verb in ("traced", "compiled", "refused"):
                    self._done(at_work.popleft(), message)
                    since = time.perf_counter()
                elif message is None:
                    self._end_if_stuck(process, at_work, since)
                else:
                    raise IsolationError(f"a process that traces cannot be used: {message.head.get('message')}")
        except WorkerGone as gone:
            return self._gone(process, at_work, *gone.args)
        finally:
            self._count_ready(-1)
            self._give_back(at_work)
        return False

    def _count_ready(self, more: int) -> None:
        with self._changed:
            self._ready += more

    def _end_if_stuck(self, process: WorkerProcess, at_work: deque[TracerTask], since: float) -> None:
        """Ends a process that does not come to an end with what it has."""
        if time.perf_counter() - since <= _LONGEST_TASK:
            return
        process.kill()
        task = at_work[0]
        if isinstance(task, CompileTask):
            # The worker tries it, and its watchdog says what came of it.
            with self._changed:
                task.end(_NOT_HERE)
            at_work.popleft()
        raise WorkerGone(f"it was at work for over {_LONGEST_TASK:g} s")

    def _send(self, process: WorkerProcess, task: TracerTask, known: set[str]) -> None:
        if isinstance(task, CompileTask):
            process.send("compile", [task.data], quickly=task.quickly)
            return
        if task.call not in known:
            known.add(task.call)
            process.send("call", name=task.call, text=self._calls[task.call].text)
        process.send("trace", name=task.call, cfg=task.cfg)

    def _next(self, at_work: Collection[TracerTask]) -> TracerTask | None:
        """The next task; a process that has none at work waits for it."""
        with self._changed:
            while not at_work and not self._waiting and not self._closed:
                self._changed.wait()
            return None if self._closed else self._waiting.next(at_work)

    def _done(self, task: TracerTask, message: Message) -> None:
        head = message.head
        with self._changed:
            if isinstance(task, CompileTask):
                made = message.verb == "compiled"
                # What a process refuses fails in the worker too, which says why.
                task.end(
                    Delivery(bytes(message.parts[0]), "", bool(head["for_speed"]), float(head["seconds"]))
                    if made
                    else _NOT_HERE
                )
            elif message.verb == "traced":
                task.found = TracedElsewhere(
                    bytes(message.parts[0]),
                    *(str(head["text"]), int(head["outputs"]), head["objective"], str(head["structure"])),
                    tuple(None if one is None else (str(one[0]), tuple(one[1])) for one in head["extra"]),
                    str(head["notes"]),
                    str(head["compiler_timing"]),
                )
            task.state = "done"
            self._changed.notify_all()

    def _gone(self, process: WorkerProcess, at_work: deque[TracerTask], why: str = "") -> bool:
        """A process has died, of the first of what it had; `why`: it was ended here."""
        words = why or process.last_words()
        with self._changed:
            # Once may be chance, or a kill from outside: another process tries it.
            if at_work and at_work[0].again:
                culprit = at_work.popleft()
                if isinstance(culprit, CompileTask):
                    # After kills from outside, as for want of memory beside so many others, the worker tries it.
                    killed = process.status() in FROM_OUTSIDE
                    ended = Delivery(why=f"the process that compiled it ended ({words})")
                    culprit.end(_NOT_HERE if killed else ended)
                else:
                    culprit.gone, culprit.state = f"the process that traced it ended ({words})", "done"
            elif at_work:
                at_work[0].again = True
            self._restarts -= 1
            self._changed.notify_all()
            return self._restarts >= 0

    def _give_back(self, at_work: Collection[TracerTask]) -> None:
        with self._changed:
            for task in at_work:
                # One that is not needed any more has ended.
                if task.state != "done":
                    self._waiting.add(task)
            self._changed.notify_all()


@final
@dataclass(frozen=True)
class WantedCall:
    """The candidates of one call, as a tuning takes them."""

    tracers: Tracers
    name: str

    def peek(self, cfg: Any, until: float) -> TracedElsewhere | None:
        """The program of a candidate, where it is there by now, or one of many processes is to trace it."""
        task = self.tracers.task(self.name, cfg)
        if task is None:
            return None
        self.tracers.wait_a_little(task, until, for_its_end=True)
        return task.found

    def take(self, cfg: Any) -> None:
        """Withdraws a candidate that the tuning traces itself, unless a process has begun with it."""
        task = self.tracers.task(self.name, cfg)
        if task is not None:
            self.tracers.withdraw(task)

    def program(self, cfg: Any, until: float) -> TracedElsewhere | None:
        """The program of a candidate, waited for where a process will have it; None: it is to be traced here."""
        task = self.tracers.task(self.name, cfg)
        if task is None:
            return None
        self.tracers.wait_a_little(task, until, for_its_end=False)
        if self.tracers.withdraw(task):
            return None
        self.tracers.wait(task, until)
        if task.gone:
            raise TracerGone(task.gone)
        return self.tracers.taken(task)

    def executable(self, data: bytes, *, quickly: bool) -> Future[Delivery] | None:
        """The executable of an exported program, once a process has compiled it."""
        return self.tracers.compile(self.name, data, quickly=quickly)

    def stop_tracing(self) -> None:
        """Withdraws the candidates that no process has begun with: the tuning takes no more."""
        self.tracers.stop_tracing(self.name)

    def let_go(self) -> None:
        """Drops what was compiled for the call, and what is still to be traced."""
        self.tracers.let_go(self.name)


def _name(key: Sequence[str], objective: Objective) -> str:
    return json.dumps([*key, objective])
