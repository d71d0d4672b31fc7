"""A field in worker processes: who takes one down is out, another one takes its place, and the race goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from ...core.errors import IsolationError
from ...core.record import Record, Status, Trial
from ..candidates import CandidateSet
from ..journal.observer import Rounds
from ..progress import Step
from . import protocol
from .limits import Isolation
from .process import LOOK_SECONDS, WorkerGone, WorkerProcess
from .protocol import Message
from .watchdog import KillReason, Watchdog


class WorkerBatch:
    """Has programs of a field that was written down for other processes checked and timed, batch by batch."""

    def __init__(
        self, field: CandidateSet, start: Callable[[], WorkerProcess], isolation: Isolation, *, warmup: int, iters: int
    ) -> None:
        self.field = field
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
        self._vigil = Watchdog(isolation)
        # Hears the seconds of each round.
        self._told: Callable[[Mapping[int, float]], None] = lambda row: None

    def run(
        self,
        numbers: Sequence[int],
        *,
        looks: int | None = None,
        kept: int | None = None,
        past: Rounds | None = None,
        deadline: float = math.inf,
        seed: int | None = None,
        told: Callable[[Mapping[int, float]], None] = lambda row: None,
    ) -> Record | None:
        """What the last worker found, its cfgs being numbers; None where what was timed so far has to do.

        A race, or no more rounds than it takes for a first look. Whoever is kept stays for all of them.
        """
        self._begin(numbers, past or Rounds(), deadline)
        self._told = told
        # Without anybody to compare, what is right may not be known either.
        if numbers:
            self._refuse_other_structures()
        while runners := [number for number in numbers if number in self.field.programs]:
            if self._worker is None and self.right and time.perf_counter() >= deadline:
                return None
            try:
                worker = self._worker = self._worker or self._new()
                self._send(worker, runners, looks, kept, self.field.seed if seed is None else seed)
                return self._follow(worker)
            except WorkerGone as gone:
                ended: KillReason | None = gone.args[0] if gone.args else None
                status, words = worker.status(), worker.last_words()
                self._end()
                if ended is not None and ended.status == "deadline":
                    self._leave_behind(ended)
                    return None
                verdict = self._vigil.blame(ended, status, words)
                if verdict is not None:
                    self._lose(*verdict)
            # An interrupt, or a worker that cannot be used: nobody is left behind.
            except BaseException:
                self._end()
                raise
        return None

    def close(self) -> None:
        """Done with the worker."""
        # One that still compiles something is of no use to the next tuning.
        if self._worker is not None and not self._vigil.at_work:
            self._worker.leave()
            self._worker = None
        self._end()

    def _begin(self, numbers: Sequence[int], past: Rounds, deadline: float) -> None:
        known = {repr(self._cfg(number)): number for number in numbers}
        rows = ([(known[repr(cfg)], s) for cfg, s in row if repr(cfg) in known] for row in past.rounds)
        self.rounds = [row for row in rows if row]
        self.clock = past.clock or self.clock
        self._deadline = deadline
        self._vigil.begin(deadline)

    def _new(self) -> WorkerProcess:
        self._vigil.new_worker()
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
            one_by_one=self._vigil.one_by_one,
        )
        self._sent |= set(numbers)

    def _send_field(self, worker: WorkerProcess) -> None:
        """What all programs have in common."""
        portable = next(iter(self.field.programs.values())).portable
        parts: list[bytes] = []
        sets, expected = [], []
        for given in self.field.sets():
            about, arrays = protocol.pack([*given.leaves, *portable.extra])
            sets.append(about)
            parts += arrays
        for given in self.field.sets():
            if given.expected:
                about, arrays = protocol.pack(jax.tree_util.tree_leaves(given.expected[0]))
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
                # A round that was cut short ends nobody's turn but this does.
                self._vigil.rest()
                return Record.loads(message.parts[0].decode())
            if message is not None:
                self._note(message)
            if message is None or time.perf_counter() - looked > LOOK_SECONDS:
                looked = time.perf_counter()
                ended = self._vigil.look(worker.memory(), usable=bool(self.right))
                if ended is not None:
                    worker.kill()
                    raise WorkerGone(ended)

    def _note(self, message: Message) -> None:
        head, witness = message.head, self.field.job.witness
        if message.verb == "broken":
            raise IsolationError(f"the worker process cannot be used: {head['message']}")
        if message.verb == "timed":
            if head["clock"] != self.clock:
                self.rounds, self.clock = [], head["clock"]
            self.rounds.append([(number, seconds) for number, seconds in head["found"]])
            self._vigil.rest()
            witness.timed([(self._cfg(number), seconds) for number, seconds in self.rounds[-1]], self.clock)
            self._told(dict(self.rounds[-1]))
            return
        number = head["number"]
        if message.verb == "starts":
            self._vigil.starts(number, head["doing"], head["at"])
            witness.starts(self._cfg(number), head["doing"])
        elif message.verb == "ends":
            if self._vigil.ends(number, head["at"]) == "check" and number in self.field.programs:
                self.right.add(number)
                self.field.job.watch(Step("checking", len(self.right), len(self.field.trials)))
            witness.ends(self._cfg(number))
        elif message.verb == "failed":
            self._vigil.at_work.pop(number, None)
            self._out(number, head["status"], head["message"], error=head["error"], compile_s=head["compile_s"])

    def _leave_behind(self, ended: KillReason) -> None:
        for number in self._vigil.at_work:
            trial = self.field.trials[number]
            # What an earlier look has timed stays known.
            if not trial.samples_s:
                self.field.trials[number] = replace(trial, status="timeout", message=ended.message)
                self.field.programs.pop(number, None)
        self._vigil.at_work.clear()

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
