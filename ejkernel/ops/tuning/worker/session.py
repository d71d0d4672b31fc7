"""One tuning's conversation with its worker processes: what is sent, what is heard, and what a death means.

The parent exports programs and sends each as soon as it is there; a worker compiles, checks and times them, and tells
every step before it takes it. So a worker may die at any moment: of a candidate, of a kill from outside, or because the
watchdog ends it for time or memory. The candidate that was at work is out, a new worker gets all programs that are
left, and what was running, a look or a race, begins afresh there. Where several candidates were at work, they are
compiled one by one first. A candidate is out at its second death by a kill from outside, or in a worker that also
compiled programs of later tunings. The parent does not die of a candidate, and a worker dies with its parent. Three
deaths with no candidate at work, or three before a worker is ready, are an `IsolationError`: then the worker itself
cannot be used.
"""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, final

import jax

from ...core.errors import IsolationError
from ...core.record import Finding, Record, Status, Trial
from ..candidates import CandidateSet
from ..check import CheckCase
from ..job import TuningJob, program_end
from ..journal.observer import NoObserver, StepObserver
from ..progress import Step
from ..reference import NUMBER, PLAIN
from . import protocol
from .delivered import Delivery
from .export import PortableProgram
from .limits import Isolation
from .process import BIRTHS, POLL_SECONDS, KilledAtBirth, WorkerGone, WorkerProcess
from .protocol import Message
from .watchdog import KillReason, Watchdog

# A worker that is ended takes two to five seconds to be replaced on an H200, with what it had compiled ahead.
_LAST_COMPILATIONS = 2.0


@final
class WorkerSession:
    """Has exported programs compiled, checked and timed by workers, run after run."""

    def __init__(
        self,
        job: TuningJob,
        candidates: CandidateSet,
        cases: Callable[[], Sequence[CheckCase]],
        start: Callable[[], WorkerProcess],
        isolation: Isolation,
        *,
        warmup: int,
        iters: int,
        seed: int,
        beside_others: bool = False,
        observer: StepObserver | None = None,
    ) -> None:
        self.job = job
        self.candidates = candidates
        self._cases = cases
        self._start = start
        # `beside_others`: do other processes compile while the worker does?
        self._settings = {"warmup": warmup, "iters": iters, "seed": seed, "beside_others": beside_others}
        self._observer: StepObserver = observer or NoObserver()
        # From a candidate's number and program to its executable, where another process compiles that.
        self.compiled_elsewhere: Callable[[int, PortableProgram], Future[Delivery] | None] = lambda number, program: (
            None
        )
        # Programs of the reference, by number, where workers compute what is right; else the cases hold it.
        self.references: Mapping[int, PortableProgram] = {}
        # The clock of the current run, and the seconds of its rounds so far, by number.
        self.clock = ""
        self.rows: list[dict[int, float]] = []
        # Candidates that ended a worker.
        self.lost: list[Trial] = []
        self.watchdog = Watchdog(isolation)
        self._worker: WorkerProcess | None = None
        # The programs that the worker has, and the arrays beside the call's that it has for them.
        self._sent: set[int] = set()
        # Executables that other processes make for the worker.
        self._coming: list[Future[Delivery]] = []
        self._extra: Sequence[Any] = ()
        self._deadline = self._end_of_all = math.inf
        # Told the seconds of each round.
        self._told: Callable[[Mapping[int, float]], None] = lambda row: None

    def add(self, number: int) -> None:
        """Sends a program as soon as it is there: the worker compiles it while others are exported."""
        if self._worker is None:
            # With the cotangents of this program known from the start, a new worker draws its arrays once.
            self._extra = self.candidates.program(number).portable.extra
        self._send_programs(self._worker or self._new(), [number])

    def run(
        self,
        numbers: Sequence[int],
        *,
        looks: int | None = None,
        kept: int | None = None,
        deadline: float = math.inf,
        seed: int = 0,
        told: Callable[[Mapping[int, float]], None] = lambda row: None,
    ) -> Record | None:
        """The record of the worker that came to the end, with numbers for cfgs; None where the time was up first.

        After None `rows` has the rounds so far. With `looks` there are no more rounds than that, else it is a race; the
        candidate `kept` is never dropped.
        """
        self._deadline, self._told, self.rows = deadline, told, []
        end = program_end.get()
        self.watchdog.begin(deadline, end)
        self._end_of_all = deadline if end is None else max(deadline, end)
        births = 0
        while runners := [number for number in numbers if self.candidates.runs(number)]:
            if self._worker is None and self._has_no_time():
                return None
            worker = self._worker or self._new()
            try:
                self._send_run(worker, runners, looks, kept, seed)
                self._await(worker)
                return self._follow(worker)
            except KilledAtBirth:
                births += 1
                self._end()
                if births >= BIRTHS:
                    raise
            except WorkerGone as gone:
                ended: KillReason | None = gone.args[0] if gone.args else None
                status, words = worker.status(), worker.last_words()
                self._end()
                if ended is not None and ended.status == "deadline":
                    self._leave_behind(ended)
                    return None
                blame = self.watchdog.blame(ended, status, words, beside=worker.compiles_ahead)
                if blame is not None:
                    self._lose(*blame)
                # Times of the dead process do not compare with those of the next one.
                self.rows = []
            # On an interrupt, or if no worker can be used, the worker is ended all the same.
            except BaseException:
                self._end()
                raise
        return None

    def close(self) -> None:
        """Lets the worker go, for the next tuning; one that still works is ended."""
        try:
            self._let_compile()
        # An interrupt: the worker is ended all the same.
        except BaseException:
            self._end()
            raise
        # A worker that still compiles may hold the compiler's lock, and would send steps with this tuning's numbers.
        if self._worker is not None and not self.watchdog.at_work:
            self._worker.leave()
            self._worker = None
        self._end()

    def _let_compile(self) -> None:
        """Waits a moment for compilations that nothing waits for any more: another worker takes longer to start."""
        until = min(time.perf_counter() + _LAST_COMPILATIONS, self._end_of_all)
        # A worker without a run has reported no compilation: it is not waited for, since it may be needed at once.
        while self._worker is not None and self.watchdog.at_work and time.perf_counter() < until:
            try:
                message = self._worker.hear()
            except WorkerGone:
                return
            if message is not None and message.verb in ("back", "failed"):
                self.watchdog.at_work.pop(message.head.get("number", -1), None)

    def _new(self) -> WorkerProcess:
        self.watchdog.new_worker()
        self._sent, self._coming = set(), []
        self._worker = self._start()
        self._send_tuning(self._worker)
        return self._worker

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _send_tuning(self, worker: WorkerProcess, *, again: bool = False) -> None:
        """Sends the parts of the tuning that all programs have in common; `again`: of the same one, with cotangents."""
        parts: list[bytes] = []
        sets, expected = [], []
        for case in self._cases():
            about, arrays = protocol.pack(case.leaves, drawn=case.drawn.places, seed=case.drawn.seed)
            # Cotangents are drawn with the tuning's own seed; integers have none.
            floats = [i for i, leaf in enumerate(self._extra) if hasattr(leaf, "dtype")]
            more, beside = protocol.pack(self._extra, drawn=floats, seed=self._settings["seed"], group="cotangents")
            sets.append([*about, *more])
            parts += [*arrays, *beside]
        for case in self._cases():
            if case.expected and not self.references:
                about, arrays = protocol.pack(jax.tree_util.tree_leaves(case.expected[0]))
                expected.append(about)
                parts += arrays
        worker.send(
            "tuning",
            parts,
            sets=sets,
            expected=expected,
            tolerance=self.job.tolerance,
            one_by_one=self.watchdog.one_by_one,
            count=len(self.candidates),
            again=again,
            **self._settings,
        )
        if self.references:
            exact, plain = (self.references.get(number) for number in (NUMBER, PLAIN))
            worker.send("reference", [one.data for one in (plain, exact) if one is not None])

    def _send_programs(self, worker: WorkerProcess, numbers: Sequence[int]) -> None:
        programs = {number: self.candidates.program(number).portable for number in numbers}
        extra = next((program.extra for program in programs.values() if len(program.extra)), ())
        if len(extra) and not len(self._extra):
            # This is the first program with gradients: the tuning is sent again with its cotangents, then the earlier
            # programs.
            self._extra, known = extra, sorted(self._sent)
            self._sent = set()
            self._send_tuning(worker, again=True)
            self._send_programs(worker, [number for number in known if self.candidates.runs(number)])
        for number, program in programs.items():
            arguments = None if len(program.extra) else -len(self._extra) or None
            about = {name: getattr(program, name) for name in ("outputs", "objective", "compiler_timing")}
            coming = self.compiled_elsewhere(number, program)
            name = None if coming is None else hashlib.sha256(program.data).hexdigest()
            worker.send("program", [program.data], number=number, arguments=arguments, compiled_as=name, **about)
            if coming is not None:
                self._coming.append(coming)
                coming.add_done_callback(functools.partial(_deliver, worker, name))
        self._sent |= set(numbers)

    def _send_run(
        self, worker: WorkerProcess, runners: Sequence[int], looks: int | None, kept: int | None, seed: int
    ) -> None:
        # Without a reference the first that is right says what is right, in every worker.
        standard = self.candidates.having("checked", "timed")[:1]
        needed = dict.fromkeys([*standard, *sorted(runners)])
        self._send_programs(worker, [number for number in needed if number not in self._sent])
        worker.send(
            "run",
            runners=list(runners),
            looks=looks,
            kept=kept if kept in runners else None,
            seed=seed,
            seconds=None if math.isinf(self._deadline) else max(self._deadline - time.perf_counter(), 1e-3),
        )

    def _await(self, worker: WorkerProcess) -> None:
        """Waits until the worker can be used, or the time is up."""
        if not worker.ready(lambda: self._too_late() is not None):
            worker.kill()
            raise WorkerGone(self._too_late())

    def _follow(self, worker: WorkerProcess) -> Record:
        polled = 0.0
        self.watchdog.hears()
        while True:
            message = worker.hear()
            if message is not None:
                self.watchdog.hears()
                record = self._understand(message)
                if record is not None:
                    return record
            elif not all(coming.done() for coming in self._coming):
                # The worker waits for executables of other processes: its silence is no hang.
                self.watchdog.hears()
            if message is None or time.perf_counter() - polled > POLL_SECONDS:
                polled = time.perf_counter()
                ended = self.watchdog.poll(
                    worker.memory(), usable=self._is_one_right(), falls_back=self.job.heuristic_first
                )
                if ended is not None:
                    worker.kill()
                    raise WorkerGone(ended)

    def _understand(self, message: Message) -> Record | None:
        """Takes in what a worker says; the record, where that is the end of a run."""
        try:
            if message.verb == "done":
                self.watchdog.rest()
                return Record.loads(message.parts[0].decode())
            self._note(message)
        # A candidate can write anything into the pipe.
        except (KeyError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise IsolationError(
                f"the worker process cannot be used: its message {message.verb[:20]!r} is none ({type(error).__name__})"
            ) from error
        return None

    def _note(self, message: Message) -> None:
        head = message.head
        if message.verb == "broken":
            raise IsolationError(f"the worker process cannot be used: {head['message']}")
        if message.verb == "timed":
            if head["clock"] != self.clock:
                self.rows, self.clock = [], head["clock"]
            self.rows.append(dict(head["found"]))
            self.watchdog.rest()
            self._told(self.rows[-1])
            return
        number = head["number"]
        if message.verb == "trying":
            self.watchdog.starts(number, head["doing"], head["at"])
        elif message.verb == "back":
            if self.watchdog.ends(number, head["at"]) == "check" and self.candidates.state(number) == "compiled":
                self.candidates.advance(number, "checked")
                right = len(self.candidates.having("checked", "timed"))
                self.job.watch(Step("checking", right, len(self.candidates)))
        elif message.verb == "dropped":
            about = {name: head[name] for name in ("seconds", "ratio", "clock")}
            self._observer.dropped(self.candidates.cfg(number), self.candidates.program_name(number), **about)
        elif message.verb == "failed":
            self.watchdog.at_work.pop(number, None)
            if self.candidates.runs(number):
                about = {name: head[name] for name in ("message", "error", "compile_s")}
                check = None if head["check"] is None else Finding(**head["check"])
                self.candidates.advance(number, head["status"], check=check, **about)

    def _is_one_right(self) -> bool:
        return bool(self.candidates.having("checked", "timed"))

    def _too_late(self) -> KillReason | None:
        return self.watchdog.too_late(usable=self._is_one_right(), falls_back=self.job.heuristic_first)

    def _has_no_time(self) -> bool:
        """Is it too late for another worker? Never, while no candidate is right and no heuristic cfg can serve."""
        now = time.perf_counter()
        return now >= self._deadline if self._is_one_right() else self.job.heuristic_first and now >= self._end_of_all

    def _leave_behind(self, ended: KillReason) -> None:
        for number in self.watchdog.at_work:
            # A candidate that an earlier look has timed keeps its samples.
            if self.candidates.state(number) in ("compiled", "checked"):
                self.candidates.advance(number, "timeout", message=ended.message)
        self.watchdog.at_work.clear()

    def _lose(self, number: int, status: Status, message: str) -> None:
        if self.candidates.runs(number):
            self.candidates.advance(number, status, message=message, lost=True)
            self.lost.append(self.candidates.trial(number))


def _deliver(worker: WorkerProcess, name: str | None, coming: Future[Delivery]) -> None:
    """Sends an executable to the worker, on the thread that completed the future."""
    found = coming.result()
    # A worker that has ended would keep the executable in its queue.
    if worker.is_alive():
        about = {"why": found.why, "for_speed": found.for_speed, "seconds": found.seconds}
        worker.send("executable", [found.data], name=name, **about)
