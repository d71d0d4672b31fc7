"""The field of a race: candidates traced, compiled and checked, and what became of each."""

from __future__ import annotations

import functools
import math
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from ..core.record import Objective, Record, Status, Trial
from ..timing.compile_pool import Built, CompilePool, workers_for
from ..timing.memory import free_memory, needed_memory
from ..timing.program import CompiledProgram, Staged, first_line, stage
from .check_case import CheckCase, inputs_of
from .job import TuningJob
from .journal.observer import OWN
from .progress import Step
from .reference import NUMBER as REFERENCE
from .reference import Reference

# The hash in a lowered text's name; what stands before it is its own, where the text does not tell which function runs.
_TEXT = 16


class CandidateSet:
    """The candidates of a job on their way to the start; `programs` holds those that may run."""

    def __init__(
        self,
        job: TuningJob,
        cfgs: Sequence[Any],
        *,
        seed: int,
        device: jax.Device,
        pipelined: bool | None = None,
        twice: bool | None = None,
    ) -> None:
        self.job = job
        self.seed = seed
        self.device = device
        # Are candidates run while others compile? Not where both need the same cores.
        self.pipelined = device.platform != "cpu" if pipelined is None else pipelined
        # Is another draw of the inputs checked too? None: where there is more than one candidate when it is asked.
        self._twice = twice
        # What each candidate's program is called in a journal.
        self.texts: dict[int, str] = {}
        self.trials = [Trial(cfg) for cfg in cfgs]
        self.programs: dict[int, CompiledProgram] = {}
        self._staged: dict[int, Staged] = {}
        # Candidates whose lowered program is another one's: measured once.
        self._twins: dict[int, int] = {}
        self._first: dict[str, int] = {}
        self._lock = threading.Lock()
        self._pool: CompilePool | None = None
        # Programs to come, once they are compiled; None when all are there.
        self._results: Iterator[Built | None] | None = None
        self._coming: set[int] = set()
        self._unlowered: set[int] = set()
        self._done = 0
        self._reference: Reference | None = None
        self._compile_until = self._end = math.inf
        # Was the time for compiling up before all were there?
        self.late = False
        self._rank: dict[int, int] = {}
        self.objective: Objective = "forward"
        # Candidates that an earlier tuning settled.
        self._known: set[int] = set()
        self._tag = secrets.token_hex(4)
        # How many of the trials were given to the compiler.
        self._sent = 0
        self._checked: set[int] = set()
        self._exams: list[CheckCase] = []
        self.call, self.leaves = inputs_of(job, seed)

    def enter(self, cfgs: Sequence[Any]) -> range:
        """Adds candidates, for the next `compile`; their numbers."""
        self.trials += [Trial(cfg) for cfg in cfgs]
        return range(len(self.trials) - len(cfgs), len(self.trials))

    def compile(self, deadline: float, end: float = math.inf) -> None:
        """Traces every new candidate on this thread while others lower and compile what is traced already.

        Kernels inside kernels are tuned now, before a device is claimed. Equal programs are compiled once, and nobody
        waits for a straggler. A pipelined field is back once all are lowered: the compiler then leaves Python to us,
        and `check` takes what comes. The first one that can be used is waited for beyond the deadline: until `end`, the
        tuning's own, where there is a heuristic cfg to fall back on; else one there must be, however late.
        """
        fresh = range(self._sent, len(self.trials))
        self._sent = len(self.trials)
        self._compile_until, self._end = deadline, end
        # Should one of these have ended a process, the next death shows which.
        wary = any(self.job.past.suspected(self.trials[number].cfg) for number in fresh)
        jobs = len(fresh) + (self.job.reference is not None and self._reference is None)
        self._pool = CompilePool(1 if wary or self.job.workshop.one_by_one else workers_for(jobs))
        self._stage_reference(self._pool)
        for number in fresh:
            self._trace(number, self.trials[number])
            if number in self._staged:
                self._coming.add(number)
                self._unlowered.add(number)
                self._pool.give(number, functools.partial(self._build, number))
            # Once something is on its way, a deadline is a deadline.
            if self._staged and time.perf_counter() >= deadline:
                break
        # Candidates with and without gradients are told apart when all are there.
        pipelined = self.pipelined and len({staged.objective for staged in self._staged.values()}) == 1
        needed = self._coming & {REFERENCE, *((0,) if self.job.heuristic_first else ())}
        latest = end if self.job.heuristic_first else math.inf
        self._results = self._pool.results(deadline, usable=bool(self.programs), needed=needed, latest=latest)
        for built in self._results:
            self._arrived(built)
            if pipelined and self._coming and not self._unlowered:
                return
        self._all_arrived()

    def _stage_reference(self, pool: CompilePool) -> None:
        if self.job.reference is None or self._reference is not None:
            return
        self._reference = Reference(self.job.reference, self.call, self.leaves)
        self._coming.add(REFERENCE)
        self._reference.begin(pool)

    def close(self) -> None:
        """Lets the compiling threads go."""
        if self._pool is not None:
            self._pool.leave()

    def _all_arrived(self) -> None:
        self._results = None
        self.late = time.perf_counter() >= self._compile_until
        self._time_out()
        self._settle_twins()
        self._agree_on_objective()
        # Whoever is left behind is not waited for by the next batch.
        self._coming.clear()
        self._unlowered.clear()

    def _trace(self, number: int, trial: Trial) -> None:
        start = time.perf_counter()
        barred = self.job.past.barred(trial.cfg)
        if barred is not None:
            self.trials[number] = barred
            return
        try:
            staged = stage(
                self.job.make_fn(trial.cfg),
                self.call,
                self.leaves,
                self.job.objective,
                seed=self.seed,
                name=f"ejk_{self._tag}_{number}",
            )
            self._staged[number] = self.job.workshop.traced(staged)
        # Whatever a candidate raises is the candidate's outcome.
        except Exception as error:
            self._fail(number, error, "compile", seconds=time.perf_counter() - start)

    def _build(self, number: int) -> CompiledProgram | int | Trial:
        """The program, or the number of the candidate that has the same, or what is known; in a thread of the pool."""
        staged, cfg = self._staged[number], self.trials[number].cfg
        if staged.as_it_is is not None:
            self._is_lowered(number)
            return self.job.workshop.build(staged, None)
        self.job.witness.starts(cfg, "compile")
        try:
            found, lowered = self._lower(number, staged)
            return found if lowered is None else self.job.workshop.build(staged, lowered)
        finally:
            self.job.witness.ends(cfg, self.texts.get(number, ""))

    def _lower(self, number: int, staged: Staged) -> tuple[int | Trial, Any]:
        """Who has the same program, or what is known of it, and the lowered program where it is to be compiled."""
        try:
            lowered, text = staged.lower()
            self.texts[number] = text if len(text) == _TEXT else f"{OWN}{text[-_TEXT:]}"
            known = self.job.past.known(self.trials[number].cfg, self.texts[number])
            if known is not None:
                return known, None
            with self._lock:
                twin = self._first.setdefault(text, number)
                # Of equal programs the earliest counts, whichever thread was faster.
                self._rank[twin] = min(self._rank.get(twin, twin), number)
                if twin != number:
                    self._coming.discard(number)
            return twin, lowered if twin == number else None
        finally:
            self._is_lowered(number)

    def _is_lowered(self, number: int) -> None:
        self._unlowered.discard(number)
        if not self._unlowered and self._pool is not None:
            self._pool.wake()

    def _time_out(self) -> None:
        for number, trial in enumerate(self.trials):
            out = number not in self.programs and number not in self._twins and number not in self._known
            if out and trial.status == "ok":
                message = "still compiling when the others were done, or when the time was up"
                self.trials[number] = replace(trial, status="timeout", message=message)

    def _agree_on_objective(self) -> None:
        """Where some candidates have gradients, those without cannot win."""
        if not any(program.objective == "forward+backward" for program in self.programs.values()):
            return
        self.objective = "forward+backward"
        for number in [n for n, program in self.programs.items() if program.objective == "forward"]:
            notes = self.programs.pop(number).notes
            self.trials[number] = replace(self.trials[number], status="compile", message=notes)

    def _arrived(self, built: Built | None) -> None:
        if built is None:
            return
        number = built.number
        self._coming.discard(number)
        if number == REFERENCE and self._reference is not None:
            self._reference.arrived(built)
            return
        self._done += 1
        self.job.watch(Step("compiling", self._done, len(self.trials)))
        if built.failed:
            self._fail(number, built.outcome, "compile", seconds=built.seconds)
            return
        if isinstance(built.outcome, Trial):
            self.trials[number] = built.outcome
            self._known.add(number)
            return
        self.trials[number] = replace(self.trials[number], compile_s=built.seconds)
        if isinstance(built.outcome, int):
            self._twins[number] = built.outcome
            return
        program: CompiledProgram = built.outcome
        needed = needed_memory(program.executable) if program.executable is not None else 0
        free = free_memory(self.device)
        if free is not None and needed > free:
            message = f"needs {needed / 2**20:,.0f} MiB where {free / 2**20:,.0f} are free"
            self._out(number, replace(self.trials[number], status="memory", message=message))
            return
        self.trials[number] = replace(self.trials[number], message=program.notes)
        self.programs[number] = program

    def _settle_twins(self) -> None:
        equal: dict[int, list[int]] = {}
        for number, compiled in self._twins.items():
            equal.setdefault(compiled, [compiled]).append(number)
        self._twins.clear()
        for compiled, numbers in equal.items():
            if compiled not in self.programs:
                for number in numbers:
                    own = self.trials[number]
                    self.trials[number] = replace(self.trials[compiled], cfg=own.cfg, compile_s=own.compile_s)
                continue
            # The earliest of equal programs runs for all, whichever thread was faster.
            first, *rest = sorted(numbers)
            self.programs[first] = program = self.programs.pop(compiled)
            # Those that come later find it there.
            self._first = {text: first if number == compiled else number for text, number in self._first.items()}
            if first != compiled:
                self.trials[first] = replace(
                    self.trials[first], message=program.notes, error=self.trials[compiled].error
                )
                self._checked |= {first} if compiled in self._checked else set()
            self._twins.update(dict.fromkeys(rest, first))

    def prepare(self) -> None:
        """Makes both sets of inputs and what they should give: the user's code, so before a device is claimed."""
        while REFERENCE in self._coming and self._results is not None:
            try:
                self._arrived(next(self._results))
            except StopIteration:
                self._all_arrived()
        # Where there is a heuristic cfg to fall back on, a deadline is one for the reference too; later than this
        # nobody could be timed any more.
        latest = (self._compile_until + self._end) / 2 if self.job.heuristic_first else math.inf
        if self._reference is not None and math.isfinite(latest) and not self._reference.is_there_by(latest):
            self._without_reference()
        else:
            self.sets()

    def _without_reference(self) -> None:
        self.late = True
        message = "the reference was still being compiled when the time was up"
        for number in self.programs:
            self.trials[number] = replace(self.trials[number], status="timeout", message=message)
        self.programs.clear()

    def check(self, deadline: float = math.inf) -> None:
        """Runs every program on two sets of inputs and drops those that fail or compute something else."""
        if self._results is not None:
            self._check_those_there(deadline)
            for built in self._results:
                self._arrived(built)
                self._check_those_there(deadline)
            self._all_arrived()
        self.programs = dict(sorted(self.programs.items()))
        for number in [n for n in self.programs if n not in self._checked]:
            # One that is right there must be, however late.
            if self._checked & self.programs.keys() and time.perf_counter() >= deadline:
                message = "not checked when the time was up"
                self.trials[number] = replace(self.trials[number], status="timeout", message=message)
                del self.programs[number]
            else:
                self._check(number)

    def _check_those_there(self, deadline: float) -> None:
        """Checks what has arrived until something new does; without a reference the earliest that runs comes first."""
        while self._pool is not None and not self._pool.has_news() and time.perf_counter() < deadline:
            there = sorted((self._rank.get(n, n), n) for n in self.programs if n not in self._checked)
            still = min((self._rank.get(n, n) for n in list(self._coming)), default=math.inf)
            if not there or (not self._checked & self.programs.keys() and there[0][0] > still):
                return
            self._check(there[0][1])

    def _check(self, number: int) -> None:
        self._checked.add(number)
        self.job.watch(Step("checking", len(self._checked), len(self.trials)))
        cfg = self.trials[number].cfg
        self.job.witness.starts(cfg, "check")
        for exam in self.sets():
            if number in self.programs:
                self._check_on(exam, number)
        self.job.witness.ends(cfg)

    def sets(self) -> list[CheckCase]:
        """The inputs of the race, and another draw of them; what is the caller's own in every part stays one set."""
        if not self._exams:
            self._exams.append(CheckCase(self.leaves))
            if len(self.trials) > 1 if self._twice is None else self._twice:
                _, leaves = inputs_of(self.job, self.seed + 1)
                if any(a is not b for a, b in zip(leaves, self.leaves, strict=True)):
                    self._exams.append(CheckCase(leaves))
            for given, known in zip(self._exams, self.job.expected, strict=False):
                given.expected = (known,)
            if self._reference is not None:
                for given in self._exams:
                    given.expected = (self._reference(given.leaves),)
        return self._exams

    def _check_on(self, exam: CheckCase, number: int) -> None:
        try:
            answer = exam.answer(self.programs[number])
        # Whatever a candidate raises is the candidate's outcome.
        except Exception as error:
            self.drop(number, error)
            return
        worst, reason = exam.grade(answer, self.job.tolerance)
        known = self.trials[number].error or 0.0
        # Infinity is not JSON, and the reason says it.
        self.trials[number] = replace(self.trials[number], error=max(worst, known) if math.isfinite(worst) else None)
        if reason:
            self._out(number, replace(self.trials[number], status="wrong", message=reason))
            del self.programs[number]

    def drop(self, number: int, error: BaseException) -> None:
        """Out, for what it raised when it ran."""
        self._fail(number, error, "runtime")
        del self.programs[number]

    def runs_as(self, number: int) -> int:
        """The candidate whose program stands for this one."""
        return self._twins.get(number, number)

    def share_with_twins(self) -> None:
        """Gives equal programs what was measured for one of them."""
        for number, twin in self._twins.items():
            shared, cfg = self.trials[twin], self.trials[number].cfg
            message = f"the same program as {shared.cfg!r}" + (f": {shared.message}" if shared.message else "")
            compiled = self.trials[number].compile_s
            self.trials[number] = replace(shared, cfg=cfg, compile_s=compiled, message=message)

    def _fail(self, number: int, error: BaseException, status: Status, seconds: float | None = None) -> None:
        kept = self.trials[number].compile_s if seconds is None else seconds
        status, message = status_of(error, status), first_line(error)
        self._out(number, replace(self.trials[number], status=status, message=message, compile_s=kept))

    def _out(self, number: int, trial: Trial) -> None:
        self.trials[number] = trial
        self.job.witness.failed(trial, self.texts.get(number, ""))


def found_meanwhile(record: Record, field: CandidateSet, cfg: Any) -> Record:
    """The record of a tuning that another process was faster with."""
    found = Trial(cfg, "skipped", "found by another process meanwhile")
    return replace(record, stop="settled", trials=(*field.trials, found), winner=len(field.trials))


def status_of(error: BaseException, default: Status) -> Status:
    """What kind of failure this is."""
    if isinstance(error, MemoryError):
        return "memory"
    text = str(error)
    # Registers and shared memory are what a program has, whatever the device has free.
    if default == "compile" and ("ptxas" in text or "shared memory" in text.lower()):
        return default
    return "memory" if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower() else default
