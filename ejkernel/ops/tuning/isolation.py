"""A tuning whose candidates run in a process that may die."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from .. import _jax
from ..core.device import default_device
from ..core.errors import NotExportedError
from ..core.record import Record
from .field import Field, found_meanwhile
from .heat import Heat, Isolation
from .job import Job
from .process import WorkerProcess, worker_for
from .race import race
from .workshop import Elsewhere

# What of this process's settings a program depends on; whatever else does is in the program.
_SETTINGS = ("jax_enable_x64", "jax_platforms", "jax_num_cpu_devices")
# Gives the record of a race.
Finish = Callable[..., Record]


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


def tune_elsewhere(
    job: Job,
    record: Record,
    cfgs: Sequence[Any],
    isolation: Isolation,
    *,
    demanded: bool,
    warmup: int,
    iters: int,
    seed: int,
    deadline: float,
    finish: Finish,
) -> Record:
    """The tuning of a job whose candidates run in workers; a `NotExportedError` where they cannot and need not."""
    device = default_device()
    workshop = Elsewhere(_export_platform(device), isolation.imports)
    job = replace(job, workshop=workshop, past=job.past.elsewhere())
    field = Field(job, cfgs, seed=seed, device=device, pipelined=False)
    field.compile(deadline)
    if workshop.refused and not demanded:
        raise NotExportedError(workshop.refused[0])
    field.prepare()
    with job.turn(deadline - time.perf_counter()):
        settled = job.settled()
        if settled is not None:
            return found_meanwhile(record, field, settled[0])
        start = starter(device, isolation)
        heat = Heat(field, start, isolation, warmup=warmup, iters=iters, deadline=deadline)
        found = heat.run()
    record = replace(record, objective=field.objective, clock=f"{heat.clock or 'wall'} (in a worker process)")
    if found is None:
        return _out_of_time(heat, record, finish)
    return _merged(field, record, found)


def _merged(field: Field, record: Record, found: Record) -> Record:
    """A worker's record, whose cfgs are numbers, as one of this field."""
    numbers = [trial.cfg for trial in found.trials]
    for trial in found.trials:
        mine = field.trials[trial.cfg]
        field.trials[trial.cfg] = replace(trial, cfg=mine.cfg, message=trial.message or mine.message)
    field.share_with_twins()
    return replace(
        record,
        trials=tuple(field.trials),
        winner=None if found.winner is None else numbers[found.winner],
        runner_up=None if found.runner_up is None else numbers[found.runner_up],
        heuristic=0 if field.job.heuristic_first else None,
        tied=tuple(numbers[place] for place in found.tied),
        gain=found.gain,
        stop=found.stop,
    )


def _out_of_time(heat: Heat, record: Record, finish: Finish) -> Record:
    """What the rounds say that were run until the time was up, or until nobody was left."""
    field = heat.field
    numbers = sorted(field.programs)
    places = {number: place for place, number in enumerate(numbers)}
    earlier = [{places[n]: s for n, s in row if n in places} for row in heat.rounds]
    outcome = race(len(numbers), lambda order: {}, earlier=[row for row in earlier if row], out_of_time=lambda: True)
    right = sorted(heat.right & field.programs.keys())
    record = finish(record, field.job, field, numbers, outcome, late=bool(numbers))
    if record.winner is not None or not right:
        return record
    trials = list(record.trials)
    trials[right[0]] = replace(trials[right[0]], status="ok", message="right, and not timed when the time was up")
    return replace(record, trials=tuple(trials), winner=right[0], stop="deadline")


def _export_platform(device: jax.Device) -> str:
    """As exporting calls it, which tells apart what JAX calls a GPU."""
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in str(device.client.platform_version).lower() else "cuda"
