"""A track whose candidates run in a process that may die."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import jax

from ... import _jax
from ...core.device import default_device
from ...core.errors import NotExportedError
from ...core.record import Record, Trial
from ...timing.race import race
from ..candidates import CandidateSet
from ..job import TuningJob
from ..runner import Rows, finished, told_with_gain
from .batch import WorkerBatch
from .export import ExportingBuilder
from .limits import Isolation
from .process import WorkerProcess, worker_for

# What of this process's settings a program depends on; whatever else does is in the program.
_SETTINGS = ("jax_enable_x64", "jax_platforms", "jax_num_cpu_devices")


def starter(device: jax.Device, isolation: Isolation) -> Callable[[], WorkerProcess]:
    """Starts workers for one device with the settings of this thread."""
    settings = {name: _jax.setting(name) for name in _SETTINGS}
    index = jax.local_devices(backend=device.platform).index(device)
    return lambda: worker_for(
        platform=device.platform,
        device=index,
        settings={name: value for name, value in settings.items() if value is not None},
        imports=isolation.imports,
    )


@final
class WorkerRunner:
    """Programs are written down here, and compiled, checked and timed in workers."""

    def __init__(
        self, job: TuningJob, isolation: Isolation, *, demanded: bool, warmup: int, iters: int, seed: int
    ) -> None:
        device = default_device()
        self._demanded = demanded
        self._workshop = ExportingBuilder(_export_platform(device), isolation.imports)
        job = replace(job, workshop=self._workshop, past=job.past.elsewhere())
        self.field = CandidateSet(job, (), seed=seed, device=device, pipelined=False)
        self._heat = WorkerBatch(self.field, starter(device, isolation), isolation, warmup=warmup, iters=iters)

    @property
    def lost(self) -> Sequence[Trial]:
        """Who took a worker down."""
        return self._heat.lost

    def compile(self, deadline: float, end: float = math.inf) -> None:
        """Written down; a `NotExportedError` where somebody cannot be, need not be, and nobody has run yet."""
        self.field.compile(deadline, end)
        if self._workshop.refused and not self._demanded and not self._heat.right:
            raise NotExportedError(self._workshop.refused[0])
        self.field.prepare()

    def check(self, deadline: float) -> None:
        """In the worker, before the first round."""

    def look(self, numbers: Sequence[int], *, rounds: int, kept: int | None, deadline: float, seed: int) -> Rows:
        """Checked and timed in a worker."""
        found = self._heat.run(numbers, looks=rounds, kept=kept, deadline=deadline, seed=seed)
        if found is None:
            return [dict(row) for row in self._heat.rounds]
        samples = {trial.cfg: trial.samples_s for trial in found.trials}
        for trial in found.trials:
            # Who ran along keeps what it was known by.
            if trial.cfg != kept:
                self._settle(trial, ())
        most = max(map(len, samples.values()), default=0)
        # Nobody joins later: the first samples of all are of the first round.
        return [{number: own[r] for number, own in samples.items() if len(own) > r} for r in range(most)]

    def race(self, record: Record, numbers: Sequence[int], *, deadline: float, heuristic: int | None) -> Record:
        """Raced in a worker; where the time is up before that, by the rounds that are known."""
        kept = heuristic if heuristic in numbers else None
        job = self.field.job
        tell = told_with_gain(job.watch, kept)
        found = self._heat.run(
            numbers, kept=kept, past=job.past.rounds, deadline=deadline, told=lambda row: tell(row, len(numbers))
        )
        clock = f"{self._heat.clock or 'wall'} (in a worker process)"
        record = replace(record, objective=self.field.objective, clock=clock)
        if found is None:
            return self._by_what_is_known(record, numbers, heuristic, deadline)
        for trial in found.trials:
            # What a first look has timed stays known where no time was left.
            timed_before = trial.status == "timeout" and self.field.trials[trial.cfg].samples_s
            if trial.cfg in numbers and not timed_before:
                self._settle(trial, trial.samples_s)
        if found.winner is None:
            return self._by_what_is_known(record, numbers, heuristic, deadline)
        self.field.share_with_twins()
        places = [trial.cfg for trial in found.trials]
        return replace(
            record,
            trials=tuple(self.field.trials),
            winner=places[found.winner],
            runner_up=None if found.runner_up is None else places[found.runner_up],
            heuristic=heuristic,
            tied=tuple(places[place] for place in found.tied),
            gain=found.gain,
            # Who was not written down in time was not raced: the heuristic cfg may be among them.
            stop="deadline" if self.field.late else found.stop,
        )

    def close(self) -> None:
        """Lets the worker go."""
        self.field.close()
        self._heat.close()

    def _settle(self, found: Trial, samples: tuple[float, ...]) -> None:
        """What a worker says of a number, as a trial of this field."""
        mine = self.field.trials[found.cfg]
        message = found.message or mine.message
        self.field.trials[found.cfg] = replace(found, cfg=mine.cfg, message=message, samples_s=samples)
        if found.status != "ok":
            self.field.programs.pop(found.cfg, None)

    def _by_what_is_known(
        self, record: Record, numbers: Sequence[int], heuristic: int | None, deadline: float
    ) -> Record:
        """What the rounds say that were run until the time was up, or until nobody was left; else a first look."""
        field = self.field
        numbers = [number for number in numbers if number in field.programs]
        places = {number: place for place, number in enumerate(numbers)}
        rounds = [dict(row) for row in self._heat.rounds] or _first_looks(field, numbers)
        rows = [{places[n]: s for n, s in row.items() if n in places} for row in rounds]
        outcome = race(
            len(numbers),
            lambda order: {},
            protected=None if heuristic is None else places.get(heuristic),
            earlier=[row for row in rows if row],
            out_of_time=lambda: True,
        )
        late = field.late or bool(numbers) or time.perf_counter() >= deadline
        record = finished(record, field, numbers, outcome, heuristic=heuristic, late=late)
        right = sorted(self._heat.right & set(numbers))
        if record.winner is not None or not right:
            return record
        trials = list(record.trials)
        trials[right[0]] = replace(trials[right[0]], status="ok", message="right, and not timed when the time was up")
        return replace(record, trials=tuple(trials), winner=right[0], stop="deadline")


def _first_looks(field: CandidateSet, numbers: Sequence[int]) -> Rows:
    """The best so far comes first and wins by what is known of it: batches do not compare by their seconds alone."""
    return [{number: s} for number in numbers[:1] for s in field.trials[number].samples_s]


def _export_platform(device: jax.Device) -> str:
    """As exporting calls it, which tells apart what JAX calls a GPU."""
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in str(device.client.platform_version).lower() else "cuda"
