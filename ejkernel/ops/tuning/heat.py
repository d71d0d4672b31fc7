"""A field in worker processes: who takes one down is out, another one takes its place, and the race goes on."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax

from ..core.errors import IsolationError, SettingError
from ..core.record import Record, Status, Trial
from ..timing.memory import host_memory
from . import wire
from .field import Field
from .process import LOOK_SECONDS, Gone, WorkerProcess
from .wire import Message
from .witness import Doing, Rounds

# A compilation may take so many times as long as a run.
_COMPILE_TIMES = 5.0
# What a worker gets to say goodbye once its time is up.
_GRACE_SECONDS = 2.0
# Of the memory that is free when it starts.
_MEMORY_SHARE = 0.9
# Where there is a deadline: so many times as long as another one needed, and at least so many seconds, is a hang.
_HOPELESS_TIMES = 100.0
_HOPELESS_SECONDS = 5.0
# A process that dies this often while no candidate is at work will not do better.
_UNEXPLAINED = 3


@dataclass(frozen=True)
class Isolation:
    """Limits of the process that candidates run in."""

    # The longest that one candidate may take for one turn: a check, a warm-up, a sample; five times that to compile.
    # Under a deadline also 100 times what another one needed, if that is over five seconds.
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


class _Turn(NamedTuple):
    """What somebody is at, since when, and since when by the worker's own clock: messages may wait."""

    doing: Doing
    since: float
    began: float


class Heat:
    """Has programs of a field that was written down for other processes checked and timed, batch by batch."""

    def __init__(
        self, field: Field, start: Callable[[], WorkerProcess], isolation: Isolation, *, warmup: int, iters: int
    ) -> None:
        self.field = field
        self.isolation = isolation
        self.warmup = warmup
        self.iters = iters
        # What was timed in this run so far, by number; those who died are left out when it is sent.
        self.clock = ""
        self.rounds: list[list[tuple[int, float]]] = []
        # Who was checked and is right, and who took a worker down.
        self.right: set[int] = set()
        self.lost: list[Trial] = []
        self._start = start
        self._worker: WorkerProcess | None = None
        # The programs that the worker has.
        self._sent: set[int] = set()
        self._objective = ""
        self._deadline = math.inf
        self._under_way: dict[int, _Turn] = {}
        # Killed once from outside while at work: by the system for want of memory, or by anybody. Twice is no accident.
        self._struck: set[int] = set()
        # With one at a time nobody else can have done it.
        self._one_by_one = False
        self._unexplained = 0
        self._memory_limit = math.inf
        # The shortest check of all.
        self._quickest = math.inf

    def run(
        self,
        numbers: Sequence[int],
        *,
        looks: int | None = None,
        kept: int | None = None,
        past: Rounds | None = None,
        deadline: float = math.inf,
        seed: int | None = None,
    ) -> Record | None:
        """What the last worker found, its cfgs being numbers; None where what was timed so far has to do.

        A race, or no more rounds than it takes for a first look. Whoever is kept stays for all of them.
        """
        self._begin(numbers, past or Rounds(), deadline)
        self._refuse_other_structures()
        while runners := [number for number in numbers if number in self.field.programs]:
            if self._worker is None and self.right and time.perf_counter() >= deadline:
                return None
            try:
                worker = self._worker = self._worker or self._new()
                self._send(worker, runners, looks, kept, self.field.seed if seed is None else seed)
                return self._follow(worker)
            except Gone as gone:
                ended = gone.args[0] if gone.args else None
                status, words = worker.status(), worker.last_words()
                self._end()
                if isinstance(ended, _Ended) and ended.status == "deadline":
                    self._leave_behind(ended)
                    return None
                self._bury(ended, status, words)
            # An interrupt, or a worker that cannot be used: nobody is left behind.
            except BaseException:
                self._end()
                raise
        return None

    def close(self) -> None:
        """Done with the worker."""
        # One that still compiles something is of no use to the next tuning.
        if self._worker is not None and not self._under_way:
            self._worker.leave()
            self._worker = None
        self._end()

    def _begin(self, numbers: Sequence[int], past: Rounds, deadline: float) -> None:
        known = {repr(self._cfg(number)): number for number in numbers}
        rows = ([(known[repr(cfg)], s) for cfg, s in row if repr(cfg) in known] for row in past.rounds)
        self.rounds = [row for row in rows if row]
        self.clock = past.clock or self.clock
        self._deadline = deadline
        # Another batch has other reasons.
        self._one_by_one, self._unexplained = False, 0

    def _new(self) -> WorkerProcess:
        self._memory_limit = self.isolation.memory_limit
        self._sent, self._objective = set(), ""
        return self._start()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _refuse_other_structures(self) -> None:
        """Flat arrays have no structure, so it is compared here: with the reference's, else with the first one's."""
        expected = self.field.sets()[0].expected
        want = jax.tree_util.tree_structure(expected[0]) if expected else None
        for number in sorted(self.field.programs):
            found = self.field.programs[number].portable.structure
            want = found if want is None else want
            if found != want:
                self._out(number, "wrong", "another structure of outputs")

    def _send(
        self, worker: WorkerProcess, runners: Sequence[int], looks: int | None, kept: int | None, seed: int
    ) -> None:
        programs = self.field.programs
        if self._objective != self.field.objective:
            self._send_field(worker)
        # Without a reference the first that is right says what is right, in every worker.
        standard = sorted(self.right & programs.keys())[:1]
        numbers = [n for n in dict.fromkeys([*standard, *sorted(runners)]) if n not in self._sent]
        distinct = list(dict.fromkeys(programs[number].portable.data for number in numbers))
        rounds = [[pair for pair in row if pair[0] in programs] for row in self.rounds]
        worker.send(
            "run",
            distinct,
            numbers=numbers,
            which=[distinct.index(programs[number].portable.data) for number in numbers],
            runners=list(runners),
            looks=looks,
            kept=kept if kept in runners else None,
            seed=seed,
            seconds=None if math.isinf(self._deadline) else max(self._deadline - time.perf_counter(), 1e-3),
            clock=self.clock,
            rounds=[row for row in rounds if row],
            one_by_one=self._one_by_one,
        )
        self._sent |= set(numbers)

    def _send_field(self, worker: WorkerProcess) -> None:
        """What all programs have in common."""
        portable = next(iter(self.field.programs.values())).portable
        parts: list[bytes] = []
        sets, expected = [], []
        for given in self.field.sets():
            about, arrays = wire.pack([*given.leaves, *portable.extra])
            sets.append(about)
            parts += arrays
        for given in self.field.sets():
            if given.expected:
                about, arrays = wire.pack(jax.tree_util.tree_leaves(given.expected[0]))
                expected.append(about)
                parts += arrays
        worker.send(
            "field",
            parts,
            outputs=portable.outputs,
            objective=self.field.objective,
            sets=sets,
            expected=expected,
            tolerance=self.field.job.tolerance,
            warmup=self.warmup,
            iters=self.iters,
            seed=self.field.seed,
        )
        self._sent, self._objective = set(), self.field.objective

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
        head, witness = message.head, self.field.job.witness
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
            self._under_way[number] = _Turn(head["doing"], time.perf_counter(), head["at"])
            witness.starts(self._cfg(number), head["doing"])
        elif message.verb == "ends":
            turn = self._under_way.pop(number, None)
            if turn is not None and turn.doing == "check" and number in self.field.programs:
                self.right.add(number)
                self._quickest = min(self._quickest, head["at"] - turn.began)
            witness.ends(self._cfg(number))
        elif message.verb == "failed":
            self._under_way.pop(number, None)
            self._out(number, head["status"], head["message"], error=head["error"], compile_s=head["compile_s"])

    def _only_compiling(self) -> None:
        """A check or a run is one candidate's alone: the next one's beginning is its end."""
        self._under_way = {n: turn for n, turn in self._under_way.items() if turn.doing == "compile"}

    def _look_after(self, worker: WorkerProcess, now: float) -> _Ended | None:
        """Why this worker has to end: it takes too much, or too long."""
        held = worker.memory()
        if held > self._memory_limit:
            allowed = self._memory_limit / 2**20
            return _Ended("memory", f"the process held {held / 2**20:,.0f} MiB where {allowed:,.0f} are allowed")
        running = any(turn.doing != "compile" for turn in self._under_way.values())
        for number, (doing, since, _) in self._under_way.items():
            limit = self._limit(doing)
            # Once the others run, nobody waits for one that still compiles.
            if now - since > limit and (doing != "compile" or not running):
                return _Ended("timeout", f"did not end within {limit:g} s ({doing}){self._compared(limit)}", number)
        if self.right and now > self._deadline + _GRACE_SECONDS:
            return _Ended("deadline", "still at work when the time was up")
        return None

    def _limit(self, doing: Doing) -> float:
        if doing == "compile":
            return self.isolation.run_seconds * _COMPILE_TIMES
        if math.isinf(self._deadline) or math.isinf(self._quickest):
            return self.isolation.run_seconds
        return min(self.isolation.run_seconds, max(_HOPELESS_SECONDS, _HOPELESS_TIMES * self._quickest))

    def _compared(self, limit: float) -> str:
        shortened = limit < self.isolation.run_seconds
        return f" where another one took {self._quickest:.2g} s" if shortened else ""

    def _leave_behind(self, ended: _Ended) -> None:
        for number in self._under_way:
            trial = self.field.trials[number]
            # What an earlier look has timed stays known.
            if not trial.samples_s:
                self.field.trials[number] = replace(trial, status="timeout", message=ended.message)
                self.field.programs.pop(number, None)
        self._under_way.clear()

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
            number = max(suspects, key=lambda n: suspects[n].since)
            doing = suspects[number].doing
            if ended is not None:
                self._lose(number, "memory", f"{ended.message} ({doing})")
            elif status == -signal.SIGKILL and number not in self._struck:
                self._struck.add(number)
            else:
                self._lose(number, "crash", f"the process died ({doing}; {words})")

    def _lose(self, number: int, status: Status, message: str) -> None:
        trial = self._settle(number, status, message)
        self.lost.append(trial)
        self.field.job.witness.lost(trial, self.field.texts.get(number, ""))

    def _out(self, number: int, status: Status, message: str, **found: Any) -> None:
        trial = self._settle(number, status, message, **found)
        self.field.job.witness.failed(trial, self.field.texts.get(number, ""))

    def _settle(self, number: int, status: Status, message: str, **found: Any) -> Trial:
        trial = replace(self.field.trials[number], status=status, message=message, **found)
        self.field.trials[number] = trial
        self.field.programs.pop(number, None)
        self.right.discard(number)
        return trial

    def _cfg(self, number: int) -> Any:
        return self.field.trials[number].cfg
