"""The field of a race: candidates traced, compiled and checked, and what became of each."""

from __future__ import annotations

import functools
import math
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ..core.record import Objective, Status, Trial
from ..timing import check, inputs
from ..timing.compiling import Built, CompilePool, workers_for
from ..timing.memory import free_memory, needed_memory
from ..timing.program import Program, Staged, first_line, stage
from .job import Job


@dataclass
class _Inputs:
    """One set of inputs, and what every candidate must make of it."""

    leaves: Sequence[Any]
    # The output and, under validate_backward, the gradients; empty until somebody has shown them.
    expected: tuple[Any, ...] = ()


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
        self._first: dict[str, int] = {}
        self._lock = threading.Lock()
        self.objective: Objective = "forward"
        self._tag = secrets.token_hex(4)
        # How many of the trials were given to the compiler.
        self._sent = 0
        self._checked: set[int] = set()
        self._input_sets: list[_Inputs] = []
        self.call, self.leaves = inputs_of(job, seed)

    def enter(self, cfgs: Sequence[Any]) -> range:
        """Adds candidates, for the next `compile`; their numbers."""
        self.trials += [Trial(cfg) for cfg in cfgs]
        return range(len(self.trials) - len(cfgs), len(self.trials))

    def compile(self, deadline: float) -> None:
        """Traces every new candidate on this thread while others lower and compile what is traced already.

        Kernels inside kernels are tuned now, before a device is claimed. Equal programs are compiled once, and nobody
        waits for a straggler.
        """
        fresh = range(self._sent, len(self.trials))
        self._sent = len(self.trials)
        with CompilePool(workers_for(len(fresh))) as pool:
            for number in fresh:
                self._trace(number, self.trials[number])
                if number in self._staged:
                    pool.give(number, functools.partial(self._build, number))
                # Once something is on its way, a deadline is a deadline.
                if self._staged and time.perf_counter() >= deadline:
                    break
            for built in pool.results(deadline, usable=bool(self.programs)):
                self._arrived(built)
        self._time_out()
        self._settle_twins()
        self._agree_on_objective()

    def _trace(self, number: int, trial: Trial) -> None:
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

    def _build(self, number: int) -> Program | int:
        """The program, or the number of the candidate that has the same; runs in a thread of the pool."""
        staged = self._staged[number]
        if staged.as_it_is is not None:
            return staged.build()
        lowered, text = staged.lower()
        with self._lock:
            twin = self._first.setdefault(text, number)
        return twin if twin != number else staged.compile(lowered)

    def _time_out(self) -> None:
        for number, trial in enumerate(self.trials):
            if number not in self.programs and number not in self._twins and trial.status == "ok":
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
            self.trials[first] = replace(self.trials[first], message=program.notes)
            self._twins.update(dict.fromkeys(rest, first))

    def prepare(self) -> None:
        """Makes both sets of inputs and what they should give: the user's code, so before a device is claimed."""
        self._sets()

    def check(self, deadline: float = math.inf) -> None:
        """Runs every program on two sets of inputs and drops those that fail or compute something else."""
        self.programs = dict(sorted(self.programs.items()))
        for number in [n for n in self.programs if n not in self._checked]:
            # One that is right there must be, however late.
            if self._checked & self.programs.keys() and time.perf_counter() >= deadline:
                message = "not checked when the time was up"
                self.trials[number] = replace(self.trials[number], status="timeout", message=message)
                del self.programs[number]
            else:
                self._check(number)

    def _check(self, number: int) -> None:
        self._checked.add(number)
        for trial_set in self._sets():
            if number in self.programs:
                self._check_on(trial_set, number)

    def _sets(self) -> list[_Inputs]:
        """The inputs of the race, and another draw of them; what is the caller's own in every part stays one set."""
        if not self._input_sets:
            self._input_sets.append(_Inputs(self.leaves))
            if len(self.trials) > 1:
                _, leaves = inputs_of(self.job, self.seed + 1)
                if any(a is not b for a, b in zip(leaves, self.leaves, strict=True)):
                    self._input_sets.append(_Inputs(leaves))
            if self.job.reference is not None:
                for given in self._input_sets:
                    args, kwargs = self.call.rebuild(given.leaves)
                    given.expected = (jax.block_until_ready(self.job.reference(*args, **kwargs)),)
        return self._input_sets

    def _check_on(self, given: _Inputs, number: int) -> None:
        program = self.programs[number]
        _poison(given.expected)
        try:
            out = jax.block_until_ready(program.call(*given.leaves))
        # Whatever a candidate raises is the candidate's outcome.
        except Exception as error:
            self._fail(number, error, "runtime")
            del self.programs[number]
            return
        parts = tuple(out) if program.objective == "forward+backward" else (out,)
        # Without a reference the first one that runs is right.
        expected = given.expected or parts
        # A reference gives the output alone.
        self._judge(number, *((parts[0], expected[0]) if len(expected) == 1 else (parts, expected)))
        if number in self.programs:
            # The gradients are then those of the first one whose output is right.
            given.expected = expected + parts[len(expected) :]

    def _judge(self, number: int, out: Any, expected: Any) -> None:
        worst, reason = check.compare(out, expected, self.job.tolerance)
        known = self.trials[number].error or 0.0
        # Infinity is not JSON, and the reason says it.
        self.trials[number] = replace(self.trials[number], error=max(worst, known) if math.isfinite(worst) else None)
        if reason:
            self.trials[number] = replace(self.trials[number], status="wrong", message=reason)
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
        self.trials[number] = replace(
            self.trials[number], status=status_of(error, status), message=first_line(error), compile_s=kept
        )


def inputs_of(job: Job, seed: int) -> tuple[inputs.Call, tuple[Any, ...]]:
    """The job's call taken apart, and real arrays for it."""
    args, kwargs = job.args, job.kwargs
    if job.example is not None:
        args, kwargs = job.example(np.random.default_rng(seed))
    call = inputs.take_apart(args, kwargs)
    fresh = job.fresh_floats and job.example is None
    return call, job.place(inputs.concrete(call.leaves, np.random.default_rng(seed), fresh_floats=fresh))


def status_of(error: BaseException, default: Status) -> Status:
    """What kind of failure this is."""
    text = str(error)
    memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
    return "memory" if memory else default


def _poison(expected: Any) -> None:
    """Fills freed memory with NaN: an output that a candidate leaves unwritten may else hold the last right answer."""
    for leaf in jax.tree_util.tree_leaves(expected):
        if hasattr(leaf, "dtype") and inputs.is_float(leaf):
            jax.block_until_ready(_nans(leaf.shape, leaf.dtype)).delete()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _nans(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.numpy.full(shape, np.nan, dtype)
