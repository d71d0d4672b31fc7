"""Programs of cfgs: each candidate is traced, lowered, told from its equals, and compiled in a pool of threads."""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import jax

from ..core.record import Objective, Trial
from ..timing.compile_pool import Built, CompilePool, workers_for
from ..timing.cost import free_memory, needed_memory
from ..timing.inputs import FlatCall
from ..timing.program import CompiledProgram, Cotangents, Staged, stage
from .builder import LocalBuilder, ProgramBuilder
from .candidates import CandidateSet
from .check import builders
from .job import TuningJob, is_abandoned
from .journal.observer import OWN, NoObserver, NoPriorResults, PriorResults, StepObserver
from .progress import Step
from .reference import NUMBERS as REFERENCES
from .reference import PLAIN, Reference
from .worker.export import EXPORTED
from .worker.tracing import StillTracing

# Programs of the check are compiled under this number and those below; candidates have numbers from 0 on.
_CHECKS = -3
# Letters of the hash that names a lowered text. A longer name belongs to a program with a callback: its text does not
# say which function is called, so no other program counts as equal.
_TEXT = 16


@final
class CandidateCompiler:
    """Traces and lowers on the calling thread, and compiles in the threads of a pool.

    More threads would not trace faster: Python's lock lets one of them work at a time.
    """

    def __init__(
        self,
        job: TuningJob,
        candidates: CandidateSet,
        call: FlatCall,
        leaves: Sequence[Any],
        *,
        seed: int,
        device: jax.Device,
        reference: Reference | None = None,
        builder: ProgramBuilder | None = None,
        prior: PriorResults | None = None,
        observer: StepObserver | None = None,
        cotangents: Cotangents | None = None,
    ) -> None:
        self.job = job
        self.candidates = candidates
        self._call = call
        self._leaves = leaves
        self._seed = seed
        self._device = device
        self._reference = reference
        self._builder: ProgramBuilder = builder or LocalBuilder()
        self._prior: PriorResults = prior or NoPriorResults()
        self._observer: StepObserver = observer or NoObserver()
        self._tag = secrets.token_hex(4)
        self._cotangents = cotangents or Cotangents(seed)
        # The number of candidates that the pool was opened for.
        self._expected = 0
        # Candidates that were compiled quickly, with the function that compiles each for speed, and what is timed then.
        self._quick: dict[int, Callable[[], Any]] = {}
        self._compiler_timing: dict[int, str] = {}
        # The candidate that was lowered first to each text.
        self._first: dict[str, int] = {}
        self._pool: CompilePool | None = None
        self._results: Iterator[Built | None] | None = None
        # Candidates that were given to the pool and have not come back.
        self._coming: set[int] = set()
        # Compilations that are kept back until `until` is called, since another tuning is being timed.
        self._holds = False
        self._held: list[Callable[[], None]] = []
        # Are programs of the check, which need the shapes of a candidate's outputs, on their way?
        self._checks_given = False
        # Are candidates compiled one at a time, so that a crash has one suspect?
        self._alone = False
        self._done = 0
        self._objectives: set[Objective] = set()
        self.objective: Objective = "forward"
        # Was the time for compiling up before all programs were there?
        self.late = False
        # Were candidates left untraced because the time for tracing was up?
        self._is_cut = False
        self._deadline = self._end = math.inf

    def begin(
        self,
        deadline: float = math.inf,
        end: float = math.inf,
        *,
        each: Callable[[int], None] = lambda number: None,
        ahead: bool = False,
    ) -> None:
        """Traces and lowers every candidate that has entered, and has each compiled from then on.

        Kernels inside kernels are tuned now, before a device is claimed. `each` is told the number of each. `ahead`:
        nothing is compiled before `until`, since another tuning is being timed.
        """
        self._holds = ahead
        fresh = self.candidates.having("entered")
        self._deadline, self._end = deadline, end
        self.open(len(fresh), any(self._prior.suspected(self.candidates.cfg(number)) for number in fresh))
        # Only tracing ahead may be abandoned. The tuning of an inner kernel, begun meanwhile, runs to its end.
        abandoned = is_abandoned.get() if ahead else None
        for number in fresh:
            if abandoned is not None and abandoned():
                break
            self.add(number)
            each(number)
            # The deadline counts once a program is there or being compiled; without one a tuning has no answer.
            if (self._coming - REFERENCES or self.candidates.running) and time.perf_counter() >= deadline:
                self._is_cut = True
                break
        if not ahead:
            self.until(deadline, end)

    def open(self, count: int, alone: bool = False) -> None:
        """Opens a pool of threads for so many candidates."""
        self._expected = count
        self._alone = alone or self._builder.one_by_one
        reference = self._reference
        asked = 0 if reference is None or reference.is_asked_for else len(reference.staged)
        self._pool = CompilePool(1 if self._alone else workers_for(count + asked))
        if reference is not None and asked:
            self._coming |= set(reference.staged)
            self._held.append(functools.partial(reference.begin, self._pool))
        if not self._holds:
            self._let_go()

    def _let_go(self) -> None:
        for give in self._held:
            give()
        self._held.clear()

    def until(self, deadline: float, end: float = math.inf, *, needed: Collection[int] = ()) -> None:
        """Starts compilations that were held back, and sets their deadline.

        A candidate that takes much longer than the others is not waited for; the heuristic cfg, and those in `needed`,
        are waited for longer. The first program that can be used is waited for beyond the deadline: until the end of
        the tuning, `end`, if there is a heuristic cfg to fall back on, else without a limit.
        """
        assert self._pool is not None
        self._holds = False
        self._let_go()
        self._deadline, self._end = deadline, end
        needed = self._coming & {*needed, *REFERENCES, *((0,) if self.job.heuristic_first else ())}
        latest = end if self.job.heuristic_first else math.inf
        usable = bool(self.candidates.running)
        self._results = self._pool.results(deadline, usable=usable, needed=needed, latest=latest)

    def add(self, number: int) -> None:
        """Traces and lowers one candidate, and has it compiled unless its outcome or its program is known."""
        cfg, start = self.candidates.cfg(number), time.perf_counter()
        barred = self._prior.barred(cfg)
        if barred is not None:
            self._take_known(number, barred)
            return
        try:
            staged = self._traced(number, cfg)
            # Another process was still tracing the candidate when the time was up.
            if staged is None:
                return
            lowered, text = (None, "") if staged.as_it_is is not None else self._lowered(staged, cfg)
        # Whatever a candidate raises is the candidate's outcome.
        except Exception as error:
            self.candidates.fail(number, error, "compile", compile_s=time.perf_counter() - start)
            return
        seconds = time.perf_counter() - start
        if lowered is None:
            self._objectives.add(staged.objective)
            self.candidates.advance(number, "traced")
            self._take_program(number, self._builder.build(staged, None), seconds)
            return
        name = text if len(text) == _TEXT else f"{OWN}{text[-_TEXT:]}"
        self.candidates.advance(number, "traced", name=name, compile_s=seconds)
        known = self._prior.known(cfg, name)
        first = self._first.setdefault(text, number)
        if known is not None:
            self._take_known(number, known)
        elif first != number:
            self.candidates.advance(number, "twin", twin=self.candidates.runs_as(first))
        else:
            self._objectives.add(staged.objective)
            self._give_checks(staged)
            build = functools.partial(self._build, cfg, name, staged, lowered)
            parts = self._parts_to_time(number, staged, lowered)
            if parts:
                self._quick[number], self._compiler_timing[number] = build, parts
                build = functools.partial(build, for_speed=False)
            self._give(number, build)

    def _parts_to_time(self, number: int, staged: Staged, lowered: Any) -> str:
        """A name for what the compiler would time, if the candidate is first compiled without that; else empty.

        A quick program shows whether the candidate can be among the fastest. The compiler of a GPU times ways to
        multiply, and took 21 s for one attention on an H200; without that 1.5 s, for a program that ran 1.25 times as
        long. The first candidate, the heuristic, is compiled for speed in any case, and before the others: side by side
        each would time the products that they share (9.5 s against 6.4).
        """
        if number == 0 or self._device.platform != "gpu" or self._builder.is_instant:
            return ""
        return self._builder.compiler_timing(staged, lowered)

    def is_quick(self, number: int) -> bool:
        """Was this compiled quickly, and not for speed?"""
        return number in self._quick

    def compiler_timing(self, number: int) -> str:
        """A name for what the compiler times of a candidate that was compiled quickly."""
        return self._compiler_timing[number]

    def compile_for_speed(self, numbers: Sequence[int], deadline: float) -> None:
        """Compiles these once more, side by side; one that is not there in time is out."""
        with CompilePool(workers_for(len(numbers))) as pool:
            for number in numbers:
                pool.give(number, self._quick.pop(number))
            for built in pool.results(deadline, usable=True):
                if built is not None and built.failed:
                    self.candidates.fail(built.number, built.outcome, "compile", samples_s=())
                elif built is not None:
                    seconds = (self.candidates.trial(built.number).compile_s or 0.0) + built.seconds
                    self.candidates.advance(
                        built.number,
                        "compiled",
                        program=built.outcome,
                        samples_s=(),
                        dropped_round=None,
                        compile_s=seconds,
                    )
        slow = [number for number in numbers if self.candidates.state(number) in ("checked", "timed")]
        self._time_out(slow, late=time.perf_counter() >= deadline)

    def undisturbed(self) -> AbstractContextManager[None]:
        """Holds back programs of later tunings, inside a `with` block."""
        return self._builder.undisturbed()

    def leave_quick(self, numbers: Sequence[int]) -> None:
        """Takes out candidates that there is no time to compile for speed."""
        for number in numbers:
            del self._quick[number]
        self._time_out(numbers, late=True)

    def _time_out(self, numbers: Sequence[int], *, late: bool) -> None:
        self.late = self.late or (late and bool(numbers))
        for number in numbers:
            self.candidates.advance(number, "timeout", samples_s=(), message="still compiling when the time was up")

    def _traced(self, number: int, cfg: Any) -> Staged | None:
        # Exported programs all have one name: the worker that compiles them gives each its own.
        name = EXPORTED if self._builder.is_instant else f"ejk_{self._tag}_{number}"
        on_its_way = self._coming - REFERENCES or self.candidates.running
        try:
            ready = self._builder.ready_made(cfg, name, self._deadline if on_its_way else math.inf)
        except StillTracing:
            self._is_cut = True
            return None
        if ready is not None:
            return ready
        fn = self.job.make_fn(cfg)
        staged = stage(fn, self._call, self._leaves, self.job.objective, name=name, cotangents=self._cotangents)
        return self._builder.traced(staged, cfg)

    def _lowered(self, staged: Staged, cfg: Any) -> tuple[Any, str]:
        self._observer.trying(cfg, "lower")
        try:
            return self._builder.lower(staged)
        finally:
            self._observer.came_back(cfg, "lower")

    def _take_known(self, number: int, trial: Trial) -> None:
        about = {name: getattr(trial, name) for name in ("message", "error", "compile_s", "samples_s")}
        self.candidates.advance(number, trial.status, known=True, **about)

    def _give_checks(self, staged: Staged) -> None:
        # A single candidate without a reference is right by definition, and needs no check.
        is_alone = max(self._expected, len(self.candidates)) == 1 and self._reference is None
        if self._checks_given or self._builder.is_instant or is_alone:
            return
        self._checks_given = True
        assert self._pool is not None
        plain = self._reference is not None and PLAIN in self._reference.staged
        made = builders(staged, self._leaves, self.job.tolerance, self._device, plain=plain)
        for place, build in enumerate(made):
            self._held.append(functools.partial(self._pool.give, _CHECKS - place, build))
        if not self._holds:
            self._let_go()

    def _give(self, number: int, build: Callable[[], Any]) -> None:
        if self._builder.is_instant:
            self.arrived(Built(number, build(), 0.0))
            return
        self._coming.add(number)
        if not self._alone:
            assert self._pool is not None
            self._held.append(functools.partial(self._pool.give, number, build))
            if not self._holds:
                self._let_go()
            return
        with CompilePool(1) as pool:
            pool.give(number, build)
            for built in pool.results(self._deadline, usable=bool(self.candidates.running), latest=self._end):
                self.arrived(built)

    def _build(self, cfg: Any, name: str, staged: Staged, lowered: Any, *, for_speed: bool = True) -> CompiledProgram:
        """Builds the program, in a thread of the pool."""
        # Waits before `trying`: a candidate that waits for another process is not blamed if this process dies.
        self._builder.await_parts(staged)
        self._observer.trying(cfg, "compile", name)
        try:
            return self._builder.build(staged, lowered, for_speed=for_speed)
        finally:
            self._observer.came_back(cfg, "compile")

    @property
    def pipelined(self) -> bool:
        """May a program be used before all have come? Not where some candidates have gradients and others none."""
        return len(self._objectives) == 1

    def is_coming(self, number: int) -> bool:
        """Is this candidate being compiled?"""
        return number in self._coming

    @property
    def coming(self) -> list[int]:
        """The candidates that are being compiled."""
        return sorted(self._coming - REFERENCES)

    @property
    def is_done(self) -> bool:
        """Has every program come that will?"""
        return self._results is None

    def has_news(self) -> bool:
        """Has a program come that was not taken yet?"""
        return self._pool is not None and self._pool.has_news()

    def take(self) -> bool:
        """Waits for the next program to come; no more come after False."""
        if self._results is None:
            return False
        for built in self._results:
            self.arrived(built)
            return True
        self._all_arrived()
        return False

    def finish(self) -> None:
        """Waits for every program that will come."""
        while self.take():
            pass

    def arrived(self, built: Built | None) -> None:
        """Takes a program from the pool."""
        if built is None:
            return
        number = built.number
        self._coming.discard(number)
        if number < 0:
            # A failure of a program of the check is told where the check compiles it again.
            if number in REFERENCES and self._reference is not None:
                self._reference.arrived(built)
            return
        self._done += 1
        self.job.watch(Step("compiling", self._done, len(self.candidates)))
        seconds = (self.candidates.trial(number).compile_s or 0.0) + built.seconds
        if built.failed:
            self.candidates.fail(number, built.outcome, "compile", compile_s=seconds)
            return
        self._take_program(number, built.outcome, seconds)

    def _take_program(self, number: int, program: CompiledProgram, seconds: float) -> None:
        needed = needed_memory(program.executable) if program.executable is not None else 0
        free = free_memory(self._device)
        if free is not None and needed > free:
            message = f"needs {needed / 2**20:,.0f} MiB where {free / 2**20:,.0f} are free"
            self.candidates.advance(number, "memory", message=message, compile_s=seconds)
            return
        self.candidates.advance(number, "compiled", program=program, message=program.notes, compile_s=seconds)

    def _all_arrived(self) -> None:
        self._results = None
        self.late = self._is_cut or time.perf_counter() >= self._deadline
        message = "still compiling when the others were done, or when the time was up"
        for number in self.candidates.having("entered", "traced"):
            self.candidates.advance(number, "timeout", message=message)
        self._agree_on_objective()
        # The next batch does not wait for stragglers of this one.
        self._coming.clear()

    def _agree_on_objective(self) -> None:
        """Fails the candidates without gradients where others have them: times of different work are not comparable."""
        programs = self.candidates.running
        if any(program.objective == "forward+backward" for program in programs.values()):
            self.objective = "forward+backward"
            for number in [n for n, program in programs.items() if program.objective == "forward"]:
                self.candidates.advance(number, "compile", message=programs[number].notes)

    def await_reference(self) -> bool:
        """Waits for the reference as long as candidates could still be timed afterwards; False if it did not come."""
        while self._coming & REFERENCES and self.take():
            pass
        if self._reference is None:
            return True
        # With a heuristic cfg to fall back on, the reference has a deadline too.
        latest = (self._deadline + self._end) / 2 if self.job.heuristic_first else math.inf
        if math.isinf(latest) or self._reference.is_there_by(latest):
            return True
        self.finish()
        self.late = True
        message = "the reference was still being compiled when the time was up"
        for number in self.candidates.running:
            self.candidates.advance(number, "timeout", message=message)
        return False

    def close(self) -> None:
        """Lets the compiling threads go."""
        if self._pool is not None:
            self._pool.leave(for_good=True)
