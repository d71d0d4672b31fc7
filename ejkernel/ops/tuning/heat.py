"""One field in worker processes: who takes one down is out, another one takes its place, and the race goes on."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from ..core.errors import IsolationError, SettingError
from ..core.record import Record, Status, Trial
from ..timing.memory import host_memory
from . import wire
from .field import Field
from .process import LOOK_SECONDS, Gone, WorkerProcess
from .wire import Message
from .witness import Doing

# A compilation may take so many times as long as a run.
_COMPILE_TIMES = 5.0
# What a worker gets to say goodbye once its time is up.
_GRACE_SECONDS = 2.0
# Of the memory that is free when it starts.
_MEMORY_SHARE = 0.9
# A process that dies this often while no candidate is at work will not do better.
_UNEXPLAINED = 3


@dataclass(frozen=True)
class Isolation:
    """Limits of the process that candidates run in."""

    # The longest that one candidate may take for one turn: a check, a warm-up, a sample; five times that to compile.
    run_seconds: float = 60.0
    # Host memory of the process; None: nine tenths of what is free when it starts.
    memory_bytes: int | None = None
    # Modules to import there, such as those that register foreign functions.
    imports: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuses what means nothing."""
        if not self.run_seconds > 0:
            raise SettingError(f"run_seconds={self.run_seconds!r} is no limit; use a positive number of seconds")
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise SettingError(f"memory_bytes={self.memory_bytes!r} is no limit; use a positive number, or None")
        if isinstance(self.imports, str):
            raise SettingError(f"imports={self.imports!r} must be a list of module names, such as [{self.imports!r}]")

    @property
    def memory_limit(self) -> float:
        """Bytes that a process which starts now may hold."""
        return self.memory_bytes or (host_memory() or math.inf) * _MEMORY_SHARE


@dataclass(frozen=True)
class _Ended:
    """Why we ended a worker; the number of who has to answer for it, where that is known."""

    status: Literal["timeout", "memory", "deadline"]
    message: str
    number: int | None = None


class Heat:
    """Checks and races the programs of a field that was written down for other processes."""

    def __init__(
        self,
        field: Field,
        start: Callable[[], WorkerProcess],
        isolation: Isolation,
        *,
        warmup: int,
        iters: int,
        deadline: float = math.inf,
    ) -> None:
        self.field = field
        self.job = field.job
        self.isolation = isolation
        self.warmup = warmup
        self.iters = iters
        self.deadline = deadline
        self._start = start
        past = self.job.past.rounds
        numbers = {repr(trial.cfg): number for number, trial in enumerate(field.trials)}
        # What was timed so far, by number; those who died are left out when it is sent.
        self.clock = past.clock
        self.rounds = [[(numbers[repr(cfg)], s) for cfg, s in row] for row in past.rounds]
        # Who was checked and is right.
        self.right: set[int] = set()
        self._under_way: dict[int, tuple[Doing, float]] = {}
        # Killed once from outside while at work: by the system for want of memory, or by anybody. Twice is no accident.
        self._struck: set[int] = set()
        # With one at a time nobody else can have done it.
        self._one_by_one = False
        self._unexplained = 0
        self._memory_limit = math.inf

    def run(self) -> Record | None:
        """What the last worker found, its cfgs being numbers; None where what was timed so far has to do."""
        self._refuse_other_structures()
        while self.field.programs:
            self._memory_limit = self.isolation.memory_limit
            worker = self._start()
            with contextlib.ExitStack() as held:
                held.callback(worker.end)
                try:
                    self._send(worker)
                    found = self._follow(worker)
                except Gone as gone:
                    ended = gone.args[0] if gone.args else None
                    if isinstance(ended, _Ended) and ended.status == "deadline":
                        self._leave_behind(ended)
                        return None
                    self._bury(ended, worker.status(), worker.last_words())
                    continue
                # One that still compiles something is of no use to the next tuning.
                if not self._under_way:
                    held.pop_all()
                    worker.leave()
                return found
        return None

    def _refuse_other_structures(self) -> None:
        """Flat arrays have no structure, so it is compared here: with the reference's, else with the first one's."""
        expected = self.field.sets()[0].expected
        want = jax.tree_util.tree_structure(expected[0]) if expected else None
        for number in sorted(self.field.programs):
            found = self.field.programs[number].portable.structure
            want = found if want is None else want
            if found != want:
                self._out(number, "wrong", "another structure of outputs")

    def _send(self, worker: WorkerProcess) -> None:
        numbers = sorted(self.field.programs)
        portable = [self.field.programs[number].portable for number in numbers]
        distinct = list(dict.fromkeys(one.data for one in portable))
        parts, sets, expected = list(distinct), [], []
        for given in self.field.sets():
            about, arrays = wire.pack([*given.leaves, *portable[0].extra])
            sets.append(about)
            parts += arrays
        for given in self.field.sets():
            if given.expected:
                about, arrays = wire.pack(jax.tree_util.tree_leaves(given.expected[0]))
                expected.append(about)
                parts += arrays
        rounds = [[pair for pair in row if pair[0] in self.field.programs] for row in self.rounds]
        worker.send(
            "tune",
            parts,
            programs=len(distinct),
            numbers=numbers,
            which=[distinct.index(one.data) for one in portable],
            outputs=portable[0].outputs,
            objective=self.field.objective,
            sets=sets,
            expected=expected,
            tolerance=self.job.tolerance,
            heuristic_first=self.job.heuristic_first and numbers[0] == 0,
            warmup=self.warmup,
            iters=self.iters,
            seed=self.field.seed,
            seconds=None if math.isinf(self.deadline) else max(self.deadline - time.perf_counter(), 1e-3),
            clock=self.clock,
            rounds=[row for row in rounds if row],
            one_by_one=self._one_by_one,
        )

    def _follow(self, worker: WorkerProcess) -> Record:
        looked = 0.0
        while True:
            message = worker.hear()
            if message is not None and message.verb == "done":
                return Record.loads(message.parts[0].decode())
            if message is not None:
                self._note(message)
            if message is None or time.perf_counter() - looked > LOOK_SECONDS:
                looked = time.perf_counter()
                ended = self._look_after(worker, looked)
                if ended is not None:
                    worker.kill()
                    raise Gone(ended)

    def _note(self, message: Message) -> None:
        head, witness = message.head, self.job.witness
        if message.verb == "broken":
            raise IsolationError(f"the worker process cannot be used: {head['message']}")
        if message.verb == "timed":
            if head["clock"] != self.clock:
                self.rounds, self.clock = [], head["clock"]
            self.rounds.append([(number, seconds) for number, seconds in head["found"]])
            self._only_compiling()
            witness.timed([(self._cfg(number), seconds) for number, seconds in self.rounds[-1]], self.clock)
            return
        number = head["number"]
        if message.verb == "starts":
            if head["doing"] != "compile":
                self._only_compiling()
            self._under_way[number] = head["doing"], time.perf_counter()
            witness.starts(self._cfg(number), head["doing"])
        elif message.verb == "ends":
            doing, _ = self._under_way.pop(number, ("", 0.0))
            if doing == "check" and number in self.field.programs:
                self.right.add(number)
            witness.ends(self._cfg(number))
        elif message.verb == "failed":
            self._under_way.pop(number, None)
            self._out(number, head["status"], head["message"], error=head["error"], compile_s=head["compile_s"])

    def _only_compiling(self) -> None:
        """A check or a run is one candidate's alone: the next one's beginning is its end."""
        self._under_way = {n: at for n, at in self._under_way.items() if at[0] == "compile"}

    def _look_after(self, worker: WorkerProcess, now: float) -> _Ended | None:
        """Why this worker has to end: it takes too much, or too long."""
        held = worker.memory()
        if held > self._memory_limit:
            allowed = self._memory_limit / 2**20
            return _Ended("memory", f"the process held {held / 2**20:,.0f} MiB where {allowed:,.0f} are allowed")
        running = any(doing != "compile" for doing, _ in self._under_way.values())
        for number, (doing, since) in self._under_way.items():
            limit = self.isolation.run_seconds * (_COMPILE_TIMES if doing == "compile" else 1.0)
            # Once the others run, nobody waits for one that still compiles.
            if now - since > limit and (doing != "compile" or not running):
                return _Ended("timeout", f"did not end within {limit:g} s ({doing})", number)
        if self.right and now > self.deadline + _GRACE_SECONDS:
            return _Ended("deadline", "still at work when the time was up")
        return None

    def _leave_behind(self, ended: _Ended) -> None:
        for number in self._under_way:
            self.field.trials[number] = replace(self.field.trials[number], status="timeout", message=ended.message)
            self.field.programs.pop(number, None)

    def _bury(self, ended: _Ended | None, status: int, words: str) -> None:
        """Finds out who did it."""
        suspects, self._under_way = self._under_way, {}
        if ended is not None and ended.number is not None:
            self._lose(ended.number, "timeout", ended.message)
        elif not suspects:
            self._unexplained += 1
            if self._unexplained >= _UNEXPLAINED:
                raise IsolationError(f"the worker process dies while no candidate is at work ({words})")
        elif len(suspects) > 1 and not self._one_by_one:
            self._one_by_one = True
        else:
            # One by one the latest to begin is the only one, unless an earlier one still compiles.
            number = max(suspects, key=lambda n: suspects[n][1])
            doing, _ = suspects[number]
            if ended is not None:
                self._lose(number, "memory", f"{ended.message} ({doing})")
            elif status == -signal.SIGKILL and number not in self._struck:
                self._struck.add(number)
            else:
                self._lose(number, "crash", f"the process died ({doing}; {words})")

    def _lose(self, number: int, status: Status, message: str) -> None:
        trial = self._settle(number, status, message)
        self.job.witness.lost(trial, self.field.texts.get(number, ""))

    def _out(self, number: int, status: Status, message: str, **found: Any) -> None:
        trial = self._settle(number, status, message, **found)
        self.job.witness.failed(trial, self.field.texts.get(number, ""))

    def _settle(self, number: int, status: Status, message: str, **found: Any) -> Trial:
        trial = replace(self.field.trials[number], status=status, message=message, **found)
        self.field.trials[number] = trial
        self.field.programs.pop(number, None)
        self.right.discard(number)
        return trial

    def _cfg(self, number: int) -> Any:
        return self.field.trials[number].cfg
