"""The runner with a worker process, which may die: candidates are exported here, and run there."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, final

import jax
import numpy as np

from ... import _jax
from ...core.device import default_device
from ...core.errors import NotExportedError
from ...core.record import Record, Trial
from ...timing.program import CotangentShapes
from ...timing.race import conclude
from ..candidates import CandidateSet
from ..check import Checker, drawn_inputs_of
from ..compile import CandidateCompiler
from ..job import TuningJob
from ..journal.observer import NoObserver, PriorResults, StepObserver
from ..reference import NUMBER, Reference
from ..runner import Rows, finished, told_with_gain
from .delivered import Delivery
from .export import ExportingBuilder, PortableProgram, export
from .limits import Isolation
from .process import WorkerProcess, tell_ahead, worker_for
from .session import WorkerSession
from .tracing import ReadyMade, TracingCall, tracing_in_force

# What of this process's settings a program depends on; whatever else does is in the program.
_SETTINGS = ("jax_enable_x64", "jax_platforms", "jax_num_cpu_devices")


def worker_settings(device: jax.Device, isolation: Isolation) -> dict[str, Any]:
    """Settings that workers for one device are started with: those of this thread."""
    settings = {name: _jax.setting(name) for name in _SETTINGS}
    return {
        "platform": device.platform,
        "device": jax.local_devices(backend=device.platform).index(device),
        "settings": {name: value for name, value in settings.items() if value is not None},
        "imports": isolation.imports,
    }


def starter(device: jax.Device, isolation: Isolation) -> Callable[[], WorkerProcess]:
    """Starts workers for one device with the settings of this thread."""
    settings = worker_settings(device, isolation)
    return lambda: worker_for(**settings)


@final
class WorkerRunner:
    """Exports programs here, and has them compiled, checked and timed in workers."""

    def __init__(
        self,
        job: TuningJob,
        isolation: Isolation,
        *,
        demanded: bool,
        warmup: int,
        iters: int,
        seed: int,
        observer: StepObserver | None = None,
        prior: PriorResults | None = None,
    ) -> None:
        device = default_device()
        self.job = job
        self.seed = seed
        self._demanded = demanded
        self._observer: StepObserver = observer or NoObserver()
        self.candidates = CandidateSet(observer)
        # Tracing needs shapes alone: the worker draws the arrays that candidates run on.
        call, leaves, drawn = drawn_inputs_of(job, seed, shapes=True)
        self._builder = ExportingBuilder(export_platform(device), isolation.imports, elsewhere=_elsewhere(job))
        portable: dict[int, PortableProgram] = {}
        if job.reference is not None:
            reference = Reference(job.reference, call, leaves, platform=device.platform)
            # A reference that cannot be exported runs here, and its outputs are sent.
            with contextlib.suppress(NotExportedError):
                portable = {
                    n: export(one, self._builder.platform, isolation.imports) for n, one in reference.staged.items()
                }
        self._structure = portable[NUMBER].structure if portable else None
        here = None
        if job.reference is not None and not portable:
            call, leaves, drawn = drawn_inputs_of(job, seed)
            here = Reference(job.reference, call, leaves, platform=device.platform)
        self._compiler = CandidateCompiler(
            *(job, self.candidates, call, leaves),
            seed=seed,
            device=device,
            reference=here,
            builder=self._builder,
            prior=prior,
            observer=observer,
            cotangents=CotangentShapes(),
        )
        self._checker = Checker(
            job, self.candidates, leaves, seed=seed, reference=here, drawn=drawn, shapes=here is None
        )
        self._settings = worker_settings(device, isolation)
        self.session = WorkerSession(
            *(job, self.candidates, self._checker.cases, starter(device, isolation), isolation),
            warmup=warmup,
            iters=iters,
            seed=seed,
            beside_others=tracing_in_force.get() is not None,
            observer=observer,
        )
        self.session.references = portable
        self.session.compiled_elsewhere = self._delivered
        # Candidates that were exported, and are not compared by the structure of their outputs yet.
        self._fresh: list[int] = []
        # Are exported programs kept back, since another tuning is being measured?
        self._holds = False
        # Is the worker still to be told to compile the programs of the check ahead?
        self._prepares = True
        # Programs are sent as they are exported, unless the outputs of the reference have to go before them.
        self._sends_at_once = here is None

    @property
    def lost(self) -> Sequence[Trial]:
        """The candidates that took a worker down."""
        return self.session.lost

    def compile(self, deadline: float, end: float = math.inf) -> None:
        """Exports the candidates.

        A candidate that cannot be exported is a `NotExportedError`, unless a worker is demanded or one has run already.
        """
        if not self._fresh:
            self.begin(deadline, end)
        compiler, fresh = self._compiler, self._fresh
        self._fresh = []
        compiler.until(deadline, end)
        compiler.finish()
        if compiler.await_reference():
            self._checker.cases()
            self._refuse_other_structures(fresh)

    def begin(self, deadline: float, end: float = math.inf, *, ahead: bool = False) -> None:
        """Exports. `ahead`: the worker that measures an earlier tuning compiles the programs, which are sent later.

        A second worker was tried: on an H200 two of them did not find memory for their references beside the
        program's own.
        """
        self._fresh = self.candidates.having("entered")
        self._holds = ahead
        self._compiler.begin(deadline, end, each=self._exported, ahead=ahead)
        if self._call is not None:
            # Processes beside the worker trace no further candidates of this call, and compile its programs instead.
            self._call.stop_tracing()

    @property
    def _call(self) -> TracingCall | None:
        """The candidates of this call that processes beside the worker trace and compile; None where none do."""
        return None if self._builder.elsewhere is None else self._builder.elsewhere.call

    def _exported(self, number: int) -> None:
        if self._builder.refused and not self._demanded and not self.candidates.having("checked", "timed"):
            raise NotExportedError(self._builder.refused[0])
        if not self._sends_at_once or self.candidates.state(number) != "compiled":
            return
        if not self._holds:
            self.session.add(number)
            return
        program = self.candidates.program(number).portable
        if self._prepares:
            self._prepares = False
            self._prepare_ahead(program)
        if self._compiled_elsewhere(number, program) is None and number:
            tell_ahead("ahead", [program.data], self._settings)

    def _prepare_ahead(self, program: PortableProgram) -> None:
        """Has the worker that will most likely serve compile the programs of the check ahead, beside candidates."""
        case = self._checker.sets()[0]
        drawn = [case.leaves[place] for place in case.drawn.places]
        floats = [leaf for leaf in program.extra if hasattr(leaf, "dtype")]
        tell_ahead(
            "prepare",
            [program.data, *(one.data for one in self.session.references.values())],
            self._settings,
            outputs=program.outputs,
            objective=program.objective,
            tolerance=self.job.tolerance,
            dtypes=[np.dtype(leaf.dtype).name for leaf in (*case.leaves, *floats)],
            draws=[[[np.dtype(x.dtype).name, list(x.shape)] for x in group] for group in (drawn, floats) if group],
        )

    def _compiled_elsewhere(self, number: int, program: PortableProgram) -> Future[Delivery] | None:
        """The executable that a process beside the worker makes; None where the worker compiles it.

        The heuristic, which is the first, is compiled for speed: where that times its parts, only the worker can do it,
        since it has the device.
        """
        # Only the compiler of a GPU times parts of a program.
        quickly = bool(program.compiler_timing) and self._settings["platform"] == "gpu"
        if self._call is None or (quickly and number == 0):
            return None
        return self._call.executable(program.data, quickly=quickly)

    def _delivered(self, number: int, program: PortableProgram) -> Future[Delivery] | None:
        """The executable that the worker waits for; None where it compiles the program itself.

        The heuristic, without which nothing is known to be faster, waits for no other process: it is compiled ahead, or
        by the worker, which has nothing else to compile.
        """
        if number == 0 and not self._holds:
            return None
        coming = self._compiled_elsewhere(number, program)
        return coming if number or coming is None or coming.done() else None

    def _refuse_other_structures(self, numbers: Sequence[int]) -> None:
        """Compares structures of outputs with the reference's, or the first candidate's: a worker has flat arrays."""
        expected = self._checker.cases()[0].expected
        if self._structure is None and expected:
            self._structure = jax.tree_util.tree_structure(expected[0])
        for number in numbers:
            if self.candidates.runs(number):
                found = self.candidates.program(number).portable.structure
                self._structure = found if self._structure is None else self._structure
                if found != self._structure:
                    self.candidates.advance(number, "wrong", message="another structure of outputs")

    def check(self, deadline: float) -> None:
        """Does nothing: a worker checks candidates before their first round."""

    def time_briefly(
        self, numbers: Sequence[int], *, rounds: int, kept: int | None, deadline: float, seed: int
    ) -> Rows:
        """Has candidates checked and timed in a worker."""
        found = self.session.run(numbers, looks=rounds, kept=kept, deadline=deadline, seed=seed)
        if found is None:
            rows: Rows = self.session.rows
        else:
            samples = {trial.cfg: trial.samples_s for trial in found.trials}
            most = max(map(len, samples.values()), default=0)
            # No candidate joins later, so the first sample of each is of the first round.
            rows = [{number: own[r] for number, own in samples.items() if len(own) > r} for r in range(most)]
            for trial in found.trials:
                self._take_over(trial)
        for number in numbers:
            samples_s = tuple(row[number] for row in rows if number in row)
            # `kept` is the best of earlier batches, run again for comparison: it keeps its earlier samples.
            if samples_s and number != kept and self.candidates.state(number) in ("checked", "timed"):
                self.candidates.advance(number, "timed", samples_s=samples_s, dropped_round=len(samples_s))
        return rows

    def note_seconds(self, number: int, seconds: float, ratio: float) -> None:
        """Tells the observer a candidate's seconds, and its ratio to the best."""
        cfg, name = self.candidates.cfg(number), self.candidates.program_name(number)
        self._observer.dropped(cfg, name, seconds=seconds, ratio=ratio, clock=self.session.clock)

    def race(self, record: Record, numbers: Sequence[int], *, deadline: float, heuristic: int | None) -> Record:
        """Has candidates raced in a worker; if the time is up first, the rounds so far decide."""
        kept = heuristic if heuristic in numbers else None
        tell = told_with_gain(self.job.watch, kept)

        def told(row: Mapping[int, float]) -> None:
            # Of a first look the heuristic's times alone are told, since the others are compiled once more.
            if len(numbers) == 1 or set(row) != {kept}:
                tell(row, len(numbers))

        found = self.session.run(numbers, kept=kept, deadline=deadline, seed=self.seed, told=told)
        clock = f"{self.session.clock or 'wall'} (in a worker process)"
        record = replace(record, objective=self._compiler.objective, clock=clock)
        if found is None:
            return self._by_what_is_known(record, numbers, heuristic, deadline)
        for trial in found.trials:
            if trial.cfg in numbers:
                self._take_over(trial, timed=True)
        if found.winner is None:
            return self._by_what_is_known(record, numbers, heuristic, deadline)
        places = [trial.cfg for trial in found.trials]
        return replace(
            record,
            trials=self.candidates.trials(),
            winner=places[found.winner],
            runner_up=None if found.runner_up is None else places[found.runner_up],
            heuristic=heuristic,
            tied=tuple(places[place] for place in found.tied),
            gain=found.gain,
            conditions=found.conditions,
            cost=found.cost,
            # Candidates that were not exported in time were not raced, perhaps the heuristic cfg among them.
            stop="deadline" if self._compiler.late else found.stop,
        )

    def close(self) -> None:
        """Lets the worker go."""
        self._compiler.close()
        self.session.close()
        if self._call is not None:
            self._call.let_go()

    def _take_over(self, found: Trial, *, timed: bool = False) -> None:
        """Takes over what a worker says of a candidate, which it knows by number."""
        number = found.cfg
        about: dict[str, Any] = {"message": found.message or self.candidates.trial(number).message}
        about |= {name: getattr(found, name) for name in ("error", "check", "compile_s")}
        if found.status != "ok":
            # A candidate that a first look has timed keeps its samples if the time is up.
            if self.candidates.runs(number) and not (
                found.status == "timeout" and self.candidates.state(number) == "timed"
            ):
                self.candidates.advance(number, found.status, samples_s=found.samples_s, **about)
        elif timed and found.samples_s and self.candidates.state(number) in ("checked", "timed"):
            lane: dict[str, Any] = {"samples_s": found.samples_s, "dropped_round": found.dropped_round}
            self.candidates.advance(number, "timed", **lane, **about)

    def _by_what_is_known(
        self, record: Record, numbers: Sequence[int], heuristic: int | None, deadline: float
    ) -> Record:
        """A record from the rounds that were run before the time was up or no candidate was left; else a first look."""
        numbers = [number for number in numbers if self.candidates.runs(number)]
        places = {number: place for place, number in enumerate(numbers)}
        rounds = self.session.rows or self._first_look(numbers)
        rows = [{places[n]: s for n, s in row.items() if n in places} for row in rounds]
        protected = None if heuristic is None else places.get(heuristic)
        outcome = conclude(len(numbers), [row for row in rows if row], protected=protected)
        late = self._compiler.late or bool(numbers) or time.perf_counter() >= deadline
        return finished(record, self.candidates, numbers, outcome, heuristic=heuristic, late=late)

    def _first_look(self, numbers: Sequence[int]) -> Rows:
        """Samples of the best candidate so far alone, which then wins: seconds of two batches do not compare."""
        return [{number: s} for number in numbers[:1] for s in self.candidates.trial(number).samples_s]


def _elsewhere(job: TuningJob) -> ReadyMade | None:
    """The candidates of the job that other processes trace; None where none do."""
    tracing, key = tracing_in_force.get(), job.about.get("key")
    if tracing is None or not isinstance(key, Mapping):
        return None
    call = tracing.call((key["device"], key["op_id"], key["call_key"]), job.objective)
    return None if call is None else ReadyMade(call)


def export_platform(device: jax.Device) -> str:
    """The name of a device's platform in `jax.export`: a GPU is `cuda` or `rocm` there."""
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in str(device.client.platform_version).lower() else "cuda"
