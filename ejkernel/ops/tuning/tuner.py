"""The tuner: compiles the candidates, checks that they agree, races them and keeps a record of it all."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Generic

import jax
import numpy as np

from .. import _jax
from ..core.codec import describe
from ..core.errors import SettingError, TuningError
from ..core.invocation import Cfg
from ..core.record import Objective, Record, Status, Trial
from ..timing import check, inputs
from ..timing.clock import Clock, WallClock
from ..timing.program import Program, compiled, first_line
from .job import Job, distinct
from .race import Lane, Outcome, race


class Tuner(Generic[Cfg]):
    """Finds the fastest of some candidates that compute the same thing."""

    def __init__(
        self,
        warmup: int = 1,
        iters: int = 3,
        *,
        seed: int = 0,
        clock: Clock | None = None,
        seconds: float | None = None,
    ) -> None:
        _whole(warmup, "warmup", 0)
        _whole(iters, "iters", 1)
        if seconds is not None and not seconds > 0:
            raise SettingError(f"seconds={seconds!r} is no budget; use a positive number, or None for no limit")
        self.warmup = warmup
        self.iters = iters
        self.seed = seed
        self.seconds = seconds
        self.clock: Clock = clock or WallClock()
        self._last = threading.local()

    @property
    def record(self) -> Record | None:
        """What this thread's latest `measure`, `autotune` or `tune` left behind."""
        return getattr(self._last, "record", None)

    def measure(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """Median seconds of `iters` runs after `warmup` runs; array leaves are arguments, all else is constant."""
        objective: Objective = "forward+backward" if getattr(fn, "_ejk_validate_backward", False) else "forward"
        with _jax.clean_room():
            call = inputs.take_apart(args, kwargs)
            leaves = inputs.concrete(call.leaves, np.random.default_rng(self.seed))
            start = time.perf_counter()
            program = compiled(fn, call, leaves, objective, self.seed)
            compile_s = time.perf_counter() - start
            for _ in range(self.warmup):
                jax.block_until_ready(program.call(*leaves))
            samples = tuple(self.clock.time(program.call, leaves, 1) for _ in range(self.iters))
        trial = Trial(None, message=program.notes, compile_s=compile_s, samples_s=samples)
        self._last.record = Record(
            objective=program.objective, clock=self.clock.name, seed=self.seed, trials=(trial,), winner=0
        )
        return median(samples)

    def autotune(
        self,
        make_fn: Callable[[Cfg], Callable[..., Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        candidates: Iterable[Cfg],
        *,
        reference: Callable[..., Any] | None = None,
    ) -> Cfg:
        """The fastest candidate whose output agrees with the reference's, else with the first one that runs."""
        record = self.tune(Job(make_fn, args, kwargs, tuple(candidates), reference=reference))
        return record.cfg  # type: ignore[no-any-return]

    def tune(self, job: Job) -> Record:
        """The same for a whole job; a `TuningError` where no candidate can be used."""
        cfgs = distinct([*job.candidates, *job.seeds])
        if not cfgs:
            raise TuningError("there is nothing to tune: no candidates were given")
        limits = [s for s in (job.seconds, self.seconds) if s is not None]
        budget = min(limits, default=None)
        deadline = math.inf if budget is None else time.perf_counter() + budget
        record = Record(
            **dict(job.about), objective=job.objective, clock=self.clock.name, seed=self.seed, budget_s=budget
        )
        with job.room():
            record = self._run(job, record, cfgs, deadline)
        self._last.record = record
        if record.winner is None:
            reasons = [f"{describe(t.cfg)}: {t.status}: {t.message}" for t in record.trials]
            raise TuningError("no candidate can be used:\n  " + "\n  ".join(reasons), reasons)
        return record

    def _run(self, job: Job, record: Record, cfgs: Sequence[Any], deadline: float) -> Record:
        args, kwargs = job.args, job.kwargs
        if job.example is not None:
            args, kwargs = job.example(np.random.default_rng(self.seed))
        call = inputs.take_apart(args, kwargs)
        fresh = job.fresh_floats and job.example is None
        leaves = job.place(inputs.concrete(call.leaves, np.random.default_rng(self.seed), fresh_floats=fresh))
        trials: list[Trial] = []
        programs: dict[int, Program] = {}
        for i, cfg in enumerate(cfgs):
            trial, program = self._compile(job, cfg, call, leaves, late=bool(programs) and _late(deadline))
            trials.append(trial)
            if program is not None:
                programs[i] = program
        objective = _one_objective(programs, trials)
        with job.turn():
            settled = job.settled()
            if settled is not None:
                trials.append(Trial(settled[0], "skipped", "found by another process meanwhile"))
                return replace(record, stop="settled", trials=tuple(trials), winner=len(trials) - 1)
            self._check(job, call, leaves, programs, trials)
            told_against = 0 if job.heuristic_first else None
            lanes = {
                i: Lane(self._timer(program, leaves), least=self.iters if i == told_against else 1)
                for i, program in programs.items()
            }
            outcome = race(
                list(lanes.values()),
                warmup=self.warmup,
                rounds=self.iters,
                seed=self.seed,
                now=time.perf_counter,
                deadline=deadline,
            )
        return _finish(replace(record, objective=objective), job, trials, lanes, outcome, late=_late(deadline))

    def _timer(self, program: Program, leaves: Sequence[Any]) -> Callable[[int], float]:
        return lambda calls: self.clock.time(program.call, leaves, calls)

    def _compile(
        self, job: Job, cfg: Any, call: inputs.Call, leaves: Sequence[Any], *, late: bool
    ) -> tuple[Trial, Program | None]:
        if late:
            return Trial(cfg, "skipped", "not compiled before the deadline"), None
        start = time.perf_counter()
        try:
            program = compiled(job.make_fn(cfg), call, leaves, job.objective, self.seed)
        # Whatever a candidate raises is the candidate's outcome.
        except Exception as error:
            return Trial(cfg, _status(error, "compile"), first_line(error), time.perf_counter() - start), None
        return Trial(cfg, "ok", program.notes, time.perf_counter() - start), program

    def _check(
        self, job: Job, call: inputs.Call, leaves: Sequence[Any], programs: dict[int, Program], trials: list[Trial]
    ) -> None:
        """Drops every program that fails or computes something else."""
        expected = None
        if job.reference is not None:
            args, kwargs = call.rebuild(leaves)
            expected = jax.device_get(jax.block_until_ready(job.reference(*args, **kwargs)))
        for i in list(programs):
            try:
                out = jax.device_get(jax.block_until_ready(programs[i].call(*leaves)))
            # As above.
            except Exception as error:
                trials[i] = replace(trials[i], status=_status(error, "runtime"), message=first_line(error))
                del programs[i]
                continue
            # With gradients the program returns (output, gradients); a reference gives the output alone.
            paired = programs[i].objective == "forward+backward"
            judged = out[0] if paired and job.reference is not None else out
            if expected is None:
                expected = judged
            worst, reason = check.compare(judged, expected, job.tolerance)
            # Infinity is not JSON, and the reason says it.
            trials[i] = replace(trials[i], error=worst if math.isfinite(worst) else None)
            if reason:
                trials[i] = replace(trials[i], status="wrong", message=reason)
                del programs[i]


def _finish(
    record: Record, job: Job, trials: list[Trial], lanes: dict[int, Lane], outcome: Outcome, *, late: bool
) -> Record:
    for i, lane in lanes.items():
        trials[i] = replace(trials[i], samples_s=tuple(lane.samples), dropped_round=lane.dropped_round)
        if lane.failure is not None:
            trials[i] = replace(trials[i], status=_status(lane.failure, "runtime"), message=first_line(lane.failure))
    places = list(lanes)
    order = [places[n] for n in outcome.order]
    heuristic = 0 if job.heuristic_first else None
    return replace(
        record,
        trials=tuple(trials),
        winner=order[0] if order else None,
        runner_up=order[1] if len(order) > 1 else None,
        heuristic=heuristic,
        tied=tuple(places[n] for n in outcome.tied),
        gain=_gain(trials, heuristic, order),
        stop="failed" if not order else "deadline" if late else "finished",
    )


def _gain(trials: Sequence[Trial], heuristic: int | None, order: Sequence[int]) -> tuple[float, float, float] | None:
    if heuristic is None or not order or not trials[heuristic].samples_s or heuristic not in order:
        return None
    pairs = zip(trials[heuristic].samples_s, trials[order[0]].samples_s, strict=False)
    ratios = sorted(a / b for a, b in pairs)
    middle = median(ratios)
    # An interval for the median from the order of the paired ratios: about 95% by the normal approximation.
    half = math.ceil(0.98 * math.sqrt(len(ratios)))
    low = ratios[max(0, len(ratios) // 2 - half)]
    high = ratios[min(len(ratios) - 1, len(ratios) // 2 + half)]
    return middle, low, high


def _one_objective(programs: dict[int, Program], trials: list[Trial]) -> Objective:
    """What all programs have in common; where some have gradients, those without cannot win."""
    if not any(p.objective == "forward+backward" for p in programs.values()):
        return "forward"
    for i in [i for i, program in programs.items() if program.objective == "forward"]:
        trials[i] = replace(trials[i], status="compile", message=programs.pop(i).notes)
    return "forward+backward"


def _late(deadline: float) -> bool:
    return time.perf_counter() >= deadline


def _status(error: Exception, default: Status) -> Status:
    text = str(error)
    memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    return "memory" if memory else default


def _whole(value: Any, name: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(f"{name}={value!r} is not a whole number of at least {least}")
