"""Is a candidate right? What every candidate must compute, the inputs that it is asked for, and the comparison."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import jax
import numpy as np

from ..timing import check, inputs
from ..timing.compile_pool import Built, CompilePool
from ..timing.inputs import FlatCall
from ..timing.program import CompiledProgram, forward, stage
from .candidates import CandidateSet
from .job import TuningJob
from .journal.observer import NoObserver, StepObserver
from .progress import Step

# The number under which a reference is compiled: no candidate's.
NUMBER = -1


def inputs_of(job: TuningJob, seed: int) -> tuple[FlatCall, tuple[Any, ...]]:
    """The job's call taken apart, and real arrays for it."""
    call, leaves, _ = drawn_inputs_of(job, seed)
    return call, leaves


def drawn_inputs_of(job: TuningJob, seed: int) -> tuple[FlatCall, tuple[Any, ...], Drawn]:
    """The same, and which of the arrays another process can draw for itself."""
    args, kwargs = job.args, job.kwargs
    if job.example is not None:
        args, kwargs = job.example(np.random.default_rng(seed))
    call = inputs.flatten_call(args, kwargs)
    fresh = job.fresh_floats and job.example is None
    made = inputs.concrete(call.leaves, np.random.default_rng(seed), fresh_floats=fresh)
    places = tuple(i for i, (leaf, given) in enumerate(zip(made, call.leaves, strict=True)) if leaf is not given)
    # As `concrete` draws them.
    return call, job.place(made), Drawn(int(np.random.default_rng(seed).integers(2**31)), places)


class Drawn(NamedTuple):
    """Arrays of a set that `draw` makes of a seed, by their places."""

    seed: int = 0
    places: tuple[int, ...] = ()


_NONE_DRAWN = Drawn()


@final
class Reference:
    """The kernel's own reference as one program, since every operation of it would else be compiled alone."""

    def __init__(self, fn: Callable[..., Any], call: FlatCall, leaves: Sequence[Any]) -> None:
        self.staged = stage(fn, call, leaves, "forward", name="reference")
        # What cannot be compiled may still run.
        self._run: Callable[..., Any] = forward(fn, call)
        self._pool: CompilePool | None = None
        # Is it still being compiled?
        self.is_coming = False

    @property
    def is_asked_for(self) -> bool:
        """Was it given to a pool?"""
        return self._pool is not None

    def begin(self, pool: CompilePool) -> None:
        """Has it compiled, and not for speed: it runs once for each set of inputs."""
        self._pool, self.is_coming = pool, True
        pool.give(NUMBER, lambda: self.staged.build(for_speed=False))

    def arrived(self, built: Built) -> None:
        """Takes it from the pool."""
        self.is_coming = False
        if not built.failed:
            self._run = built.outcome.call

    def is_there_by(self, end: float) -> bool:
        """Waits until then."""
        built = self._pool.late(NUMBER, end) if self._pool is not None and self.is_coming else None
        if built is not None:
            self.arrived(built)
        return not self.is_coming

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The right output for these inputs."""
        return jax.block_until_ready(self._run(*leaves))


@dataclass
class CheckCase:
    """One set of inputs, and what is right for it."""

    leaves: Sequence[Any]
    # The output and, under validate_backward, the gradients; empty until a candidate or a reference has shown them.
    expected: tuple[Any, ...] = ()
    drawn: Drawn = _NONE_DRAWN

    def answer(self, program: CompiledProgram) -> tuple[Any, ...]:
        """What a program makes of it: the output, and the gradients where it has them."""
        _poison(self.expected)
        out = jax.block_until_ready(program.call(*self.leaves))
        return tuple(out) if program.objective == "forward+backward" else (out,)

    def grade(self, answer: tuple[Any, ...], tolerance: float | None) -> tuple[float, str]:
        """The size of the error, and why it is too large; empty where it is not."""
        # Without a reference the first one that runs is right.
        expected = self.expected or answer
        # A reference gives the output alone.
        whole = len(expected) > 1
        worst, reason = check.compare(answer if whole else answer[0], expected if whole else expected[0], tolerance)
        if not reason:
            # The gradients are then those of the first one whose output is right.
            self.expected = expected + answer[len(expected) :]
        return worst, reason


@final
class Checker:
    """Runs programs on two sets of inputs; a candidate that fails or computes something else is out."""

    def __init__(
        self,
        job: TuningJob,
        candidates: CandidateSet,
        leaves: Sequence[Any],
        *,
        seed: int,
        reference: Reference | None = None,
        drawn: Drawn = _NONE_DRAWN,
        given: Sequence[CheckCase] = (),
        observer: StepObserver | None = None,
    ) -> None:
        self.job = job
        self.candidates = candidates
        self._leaves = leaves
        self._seed = seed
        self._reference = reference
        self._observer: StepObserver = observer or NoObserver()
        self._drawn = drawn
        self._cases = list(given)
        # The reference has answered, or there is none.
        self._answered = reference is None

    def sets(self) -> list[CheckCase]:
        """The inputs of the race, and another draw of them; what is the caller's own in every part stays one set."""
        if not self._cases:
            self._cases.append(CheckCase(self._leaves, drawn=self._drawn))
            if len(self.candidates) > 1:
                _, leaves, drawn = drawn_inputs_of(self.job, self._seed + 1)
                if any(a is not b for a, b in zip(leaves, self._leaves, strict=True)):
                    self._cases.append(CheckCase(leaves, drawn=drawn))
        return self._cases

    def cases(self) -> list[CheckCase]:
        """The same, with what the reference gives for each."""
        cases = self.sets()
        if self._reference is not None and not self._answered:
            self._answered = True
            for case in cases:
                case.expected = (self._reference(case.leaves),)
        return cases

    @property
    def inputs(self) -> list[Sequence[Any]]:
        """The sets of inputs that were made so far."""
        return [case.leaves for case in self._cases]

    def check(self, number: int) -> None:
        """Checks one candidate that was compiled."""
        candidates, cfg = self.candidates, self.candidates.cfg(number)
        self.job.watch(Step("checking", len(candidates.having("checked", "timed", "wrong")) + 1, len(candidates)))
        cases = self.cases()
        self._observer.trying(cfg, "check")
        try:
            worst, reason = self._graded(candidates.program(number), cases)
        # Whatever a candidate raises is the candidate's outcome.
        except Exception as error:
            candidates.fail(number, error, "runtime")
        else:
            # Infinity is not JSON, and the reason says it.
            error_size = worst if math.isfinite(worst) else None
            if reason:
                candidates.advance(number, "wrong", message=reason, error=error_size)
            else:
                candidates.advance(number, "checked", error=error_size)
        finally:
            self._observer.came_back(cfg, "check")

    def _graded(self, program: CompiledProgram, cases: Sequence[CheckCase]) -> tuple[float, str]:
        worst = 0.0
        for case in cases:
            error, reason = case.grade(case.answer(program), self.job.tolerance)
            worst = max(worst, error)
            if reason:
                return worst, reason
        return worst, ""


def _poison(expected: Any) -> None:
    """Fills freed memory with NaN: an output that a candidate leaves unwritten may else hold the last right answer."""
    for leaf in jax.tree_util.tree_leaves(expected):
        if hasattr(leaf, "dtype") and inputs.is_float(leaf):
            jax.block_until_ready(_nans(leaf.shape, leaf.dtype)).delete()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _nans(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.numpy.full(shape, np.nan, dtype)
