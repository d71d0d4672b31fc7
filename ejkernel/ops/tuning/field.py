"""The field of a race: candidates traced, compiled and checked, and what became of each."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ..core.record import Objective, Status, Trial
from ..timing import check, inputs
from ..timing.compiling import Built, compile_all, workers_for
from ..timing.memory import free_memory, needed_memory
from ..timing.program import Program, Staged, first_line, stage
from .job import Job


class Field:
    """The candidates of a job on their way to the start; `programs` holds those that may run."""

    def __init__(self, job: Job, cfgs: Sequence[Any], *, seed: int, device: jax.Device) -> None:
        self.job = job
        self.seed = seed
        self.device = device
        self.trials = [Trial(cfg) for cfg in cfgs]
        self.programs: dict[int, Program] = {}
        self._staged: dict[int, Staged] = {}
        # Candidates whose lowered program is another one's: measured once.
        self._twins: dict[int, int] = {}
        self._tag = secrets.token_hex(4)
        self.call, self.leaves = self._inputs(seed)

    def _inputs(self, seed: int) -> tuple[inputs.Call, tuple[Any, ...]]:
        job = self.job
        args, kwargs = job.args, job.kwargs
        if job.example is not None:
            args, kwargs = job.example(np.random.default_rng(seed))
        call = inputs.take_apart(args, kwargs)
        fresh = job.fresh_floats and job.example is None
        return call, job.place(inputs.concrete(call.leaves, np.random.default_rng(seed), fresh_floats=fresh))

    def trace(self) -> None:
        """Traces every candidate on this thread: kernels inside kernels are tuned now, before a device is claimed."""
        for number, trial in enumerate(self.trials):
            start = time.perf_counter()
            try:
                self._staged[number] = stage(
                    self.job.make_fn(trial.cfg),
                    self.call,
                    self.leaves,
                    self.job.objective,
                    seed=self.seed,
                    name=f"ejk_{self._tag}_{number}",
                )
            # Whatever a candidate raises is the candidate's outcome.
            except Exception as error:
                self._fail(number, error, "compile", seconds=time.perf_counter() - start)
        self._agree_on_objective()

    def _agree_on_objective(self) -> None:
        """Where some candidates have gradients, those without cannot win."""
        self.objective: Objective = "forward"
        if not any(s.objective == "forward+backward" for s in self._staged.values()):
            return
        self.objective = "forward+backward"
        for number in [n for n, s in self._staged.items() if s.objective == "forward"]:
            notes = self._staged.pop(number).notes
            self.trials[number] = replace(self.trials[number], status="compile", message=notes)

    def compile(self, deadline: float) -> None:
        """Lowers and compiles in threads; equal programs once, and nobody waits for a straggler."""
        first: dict[str, int] = {}
        lock = threading.Lock()

        def build(number: int) -> Program | int:
            staged = self._staged[number]
            if staged.as_it_is is not None:
                return staged.build()
            lowered, text = staged.lower()
            with lock:
                twin = first.setdefault(text, number)
            return twin if twin != number else staged.compile(lowered)

        jobs = [(number, lambda number=number: build(number)) for number in self._staged]
        workers = workers_for(self.device.platform, len(jobs))
        for built in compile_all(jobs, workers=workers, deadline=deadline):
            self._arrived(built)
        for number in self._staged:
            if number not in self.programs and number not in self._twins and self.trials[number].status == "ok":
                self.trials[number] = replace(
                    self.trials[number], status="timeout", message="still compiling when the others were done"
                )
        self._give_up_twins_of_failures()

    def _arrived(self, built: Built) -> None:
        number = built.number
        if built.failed:
            self._fail(number, built.outcome, "compile", seconds=built.seconds)
            return
        self.trials[number] = replace(self.trials[number], compile_s=built.seconds)
        if isinstance(built.outcome, int):
            self._twins[number] = built.outcome
            return
        program: Program = built.outcome
        needed = needed_memory(program.executable) if program.executable is not None else 0
        free = free_memory(self.device)
        if free is not None and needed > free:
            message = f"needs {needed / 2**20:,.0f} MiB where {free / 2**20:,.0f} are free"
            self.trials[number] = replace(self.trials[number], status="memory", message=message)
            return
        self.trials[number] = replace(self.trials[number], message=program.notes)
        self.programs[number] = program

    def _give_up_twins_of_failures(self) -> None:
        for number, twin in list(self._twins.items()):
            # The earlier one of two equal programs runs for both, whichever thread was faster.
            if twin > number and twin in self.programs:
                self.programs[number] = self.programs.pop(twin)
                del self._twins[number]
                self._twins[twin] = number
        for number, twin in list(self._twins.items()):
            if twin not in self.programs:
                self.trials[number] = replace(
                    self.trials[twin], cfg=self.trials[number].cfg, compile_s=self.trials[number].compile_s
                )
                del self._twins[number]

    def check(self) -> None:
        """Runs every program on two sets of inputs and drops those that fail or compute something else."""
        self.programs = dict(sorted(self.programs.items()))
        self._check_on(self.leaves)
        if len(self.programs) > 1:
            _, leaves = self._inputs(self.seed + 1)
            # Inputs that are the caller's own in every part are the same again.
            if any(a is not b for a, b in zip(leaves, self.leaves, strict=True)):
                self._check_on(leaves)

    def _check_on(self, leaves: Sequence[Any]) -> None:
        expected = None
        if self.job.reference is not None:
            args, kwargs = self.call.rebuild(leaves)
            expected = jax.device_get(jax.block_until_ready(self.job.reference(*args, **kwargs)))
        for number in list(self.programs):
            program = self.programs[number]
            _poison(expected)
            try:
                out = jax.device_get(jax.block_until_ready(program.call(*leaves)))
            # Whatever a candidate raises is the candidate's outcome.
            except Exception as error:
                self._fail(number, error, "runtime")
                del self.programs[number]
                continue
            # With gradients the program returns (output, gradients); a reference gives the output alone.
            paired = program.objective == "forward+backward" and self.job.reference is not None
            judged = out[0] if paired else out
            if expected is None:
                expected = judged
            self._judge(number, judged, expected)

    def _judge(self, number: int, out: Any, expected: Any) -> None:
        worst, reason = check.compare(out, expected, self.job.tolerance)
        known = self.trials[number].error or 0.0
        # Infinity is not JSON, and the reason says it.
        self.trials[number] = replace(self.trials[number], error=max(worst, known) if math.isfinite(worst) else None)
        if reason:
            self.trials[number] = replace(self.trials[number], status="wrong", message=reason)
            del self.programs[number]

    def share_with_twins(self) -> None:
        """Gives equal programs what was measured for one of them."""
        for number, twin in self._twins.items():
            shared, cfg = self.trials[twin], self.trials[number].cfg
            message = f"the same program as {shared.cfg!r}"
            compiled = self.trials[number].compile_s
            self.trials[number] = replace(shared, cfg=cfg, compile_s=compiled, message=message)

    def _fail(self, number: int, error: BaseException, status: Status, seconds: float | None = None) -> None:
        kept = self.trials[number].compile_s if seconds is None else seconds
        self.trials[number] = replace(
            self.trials[number], status=status_of(error, status), message=first_line(error), compile_s=kept
        )


def status_of(error: BaseException, default: Status) -> Status:
    """What kind of failure this is."""
    text = str(error)
    memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    return "memory" if memory else default


def _poison(expected: Any) -> None:
    """Fills freed memory with NaN: an output that a candidate leaves unwritten may else hold the last right answer."""
    if expected is None:
        return
    floats = [x for x in jax.tree_util.tree_leaves(expected) if hasattr(x, "dtype") and inputs.is_float(x)]
    junk = [jax.numpy.full(x.shape, np.nan, x.dtype) for x in floats]
    jax.block_until_ready(junk)
    for array in junk:
        array.delete()
