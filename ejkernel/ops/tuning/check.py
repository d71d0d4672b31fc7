"""Is a candidate right? What every candidate must compute, the inputs that it is asked for, and the comparison."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import jax
import numpy as np

from .. import _jax
from ..timing import check, inputs
from ..timing.check import Comparison, Standard, worst_of
from ..timing.inputs import FlatCall
from ..timing.program import CompiledProgram, Staged, own_program, run_own_program
from .candidates import CandidateSet
from .job import TuningJob
from .journal.observer import NoObserver, StepObserver
from .progress import Step
from .reference import Reference


def inputs_of(job: TuningJob, seed: int) -> tuple[FlatCall, tuple[Any, ...]]:
    """The job's call taken apart, and real arrays for it."""
    call, leaves, _ = drawn_inputs_of(job, seed)
    return call, leaves


def drawn_inputs_of(job: TuningJob, seed: int, *, shapes: bool = False) -> tuple[FlatCall, tuple[Any, ...], Drawn]:
    """Inputs as `inputs_of` gives them, and which of the arrays another process can draw for itself.

    `shapes`: arrays that the other process draws are only shapes here.
    """
    args, kwargs = job.args, job.kwargs
    if job.example is not None:
        args, kwargs = job.example(np.random.default_rng(seed))
    call = inputs.flatten_call(args, kwargs)
    fresh = job.fresh_floats and job.example is None
    made = (
        inputs.shapes_of_drawn(call.leaves, fresh_floats=fresh)
        if shapes and job.place is tuple
        else inputs.concrete(call.leaves, np.random.default_rng(seed), fresh_floats=fresh)
    )
    places = tuple(i for i, (leaf, given) in enumerate(zip(made, call.leaves, strict=True)) if leaf is not given)
    # As `concrete` draws them.
    return call, job.place(made), Drawn(int(np.random.default_rng(seed).integers(2**31)), places)


class Drawn(NamedTuple):
    """Arrays of a set that `draw` makes of a seed, by their places."""

    seed: int = 0
    places: tuple[int, ...] = ()


_NONE_DRAWN = Drawn()


@dataclass(frozen=True)
class Begun:
    """A candidate's answer on its way through the comparison."""

    standard: Standard | None
    compared: Any
    # Parts of it that are not known to be right or wrong yet.
    new: tuple[Any, ...] = ()

    @property
    def is_wrong(self) -> bool:
        """Is the answer known to be wrong already?"""
        return isinstance(self.compared, Comparison) and bool(self.compared.reason)


@dataclass
class CheckCase:
    """One set of inputs, and what is right for it."""

    leaves: Sequence[Any]
    tolerance: float | None = None
    # The output and, under validate_backward, the gradients; empty until a reference or a candidate has given them.
    expected: tuple[Any, ...] = ()
    drawn: Drawn = _NONE_DRAWN
    # The output of the reference as it was written, where `expected` is more exact.
    plain: tuple[Any, ...] = ()
    # Is a plain output that differs by much noise, or another computation?
    is_noise: Callable[[Any, Any], bool] = lambda right, plain: True
    _standard: Standard | None = field(default=None, repr=False)

    def refer(self, reference: Reference) -> None:
        """Takes what is right from a reference."""
        right, plain = reference(self.leaves)
        self.expected = (right,)
        if plain is not None:
            self.plain = (plain,)
            self.is_noise = functools.partial(reference.is_noise, self.leaves)

    def begin(self, program: CompiledProgram) -> Begun:
        """Runs a program on these inputs and begins the comparison of its answer, without waiting for the device."""
        _poison(self.expected)
        out = program.call(*self.leaves)
        answer = tuple(out) if program.objective == "forward+backward" else (out,)
        if not self.expected:
            # Without a reference the answer of the first candidate that runs is right.
            return Begun(None, Comparison(), jax.block_until_ready(answer))
        standard, new = self._standard, answer[len(self.expected) :]
        if standard is None or new:
            # A reference gives the output alone: gradients are those of the first candidate with a right output.
            standard = self.standard(new)
        return Begun(standard, standard.begin(answer), new)

    def end(self, begun: Begun) -> Comparison:
        """The outcome of a comparison that was begun."""
        found = begun.compared if begun.standard is None else begun.standard.end(begun.compared)
        assert isinstance(found, Comparison)
        return found

    def adopt(self, begun: Begun) -> None:
        """Takes an answer that passed on every set of inputs as the right one, for parts that no reference gives."""
        if begun.new:
            self.expected += begun.new
            self._standard = begun.standard

    def standard(self, more: tuple[Any, ...] = ()) -> Standard:
        """The right answer, made ready for comparisons; `more` are parts that are not known to be right."""
        made = self._made(more)
        if made.strange and not self.is_noise(self.expected[0], self.plain[0]):
            # The two forms of the reference disagree: the one that the kernel's author wrote counts.
            self.expected, self.plain = self.plain, ()
            made = self._made(more)
        if not more:
            self._standard = made
        return made

    def _made(self, more: tuple[Any, ...]) -> Standard:
        return Standard(
            (*self.expected, *more),
            plain=self.plain,
            tolerance=self.tolerance,
            inputs=[leaf.dtype for leaf in self.leaves],
        )


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
        shapes: bool = False,
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
        # Are inputs that another process can draw left to it?
        self._shapes = shapes
        self._cases = list(given)
        # The reference has answered, or there is none.
        self._answered = reference is None

    def sets(self) -> list[CheckCase]:
        """The inputs of the race, and another draw of them; inputs without random parts are one set."""
        if not self._cases:
            self._cases.append(CheckCase(self._leaves, self.job.tolerance, drawn=self._drawn))
            if len(self.candidates) > 1:
                _, leaves, drawn = drawn_inputs_of(self.job, self._seed + 1, shapes=self._shapes)
                if any(a is not b for a, b in zip(leaves, self._leaves, strict=True)):
                    self._cases.append(CheckCase(leaves, self.job.tolerance, drawn=drawn))
        return self._cases

    def cases(self) -> list[CheckCase]:
        """The cases of `sets`, each with the answer of the reference."""
        cases = self.sets()
        if self._reference is not None and not self._answered:
            self._answered = True
            for case in cases:
                case.refer(self._reference)
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
            found = self._compared(candidates.program(number), cases)
        # Whatever a candidate raises is the candidate's outcome.
        except Exception as error:
            candidates.fail(number, error, "runtime")
        else:
            # Infinity is not JSON, and the reason says it.
            size = found.error if math.isfinite(found.error) else None
            if found.reason:
                candidates.advance(number, "wrong", message=found.reason, error=size, check=found.finding)
            else:
                candidates.advance(number, "checked", error=size, check=found.finding)
        finally:
            self._observer.came_back(cfg, "check")

    def _compared(self, program: CompiledProgram, cases: Sequence[CheckCase]) -> Comparison:
        """Runs a candidate on all sets before it reads an outcome: each wait is long while others compile."""
        begun: list[tuple[CheckCase, Begun]] = []
        for case in cases:
            begun.append((case, case.begin(program)))
            if begun[-1][1].is_wrong:
                break
        found = worst_of([case.end(one) for case, one in begun])
        if not found.reason:
            for case, one in begun:
                case.adopt(one)
        return found


def builders(
    staged: Staged, leaves: Sequence[Any], tolerance: float | None, device: jax.Device, *, plain: bool
) -> list[Callable[[], Any]]:
    """Functions that compile, on any thread, the programs that checks of a candidate like this one need.

    `plain`: the reference runs as it was written too.
    """
    if staged.traced is None:
        return []
    out = staged.traced.out_info
    parts = tuple(out) if staged.objective == "forward+backward" else (out,)
    return builders_of(parts, [leaf.dtype for leaf in leaves], tolerance, device, plain=plain)


def builders_of(
    parts: tuple[Any, ...], dtypes: Sequence[Any], tolerance: float | None, device: jax.Device, *, plain: bool
) -> list[Callable[[], Any]]:
    """Functions that compile the programs of a check, by the shapes of an answer and by the inputs' dtypes."""
    made = check.builders(parts, device, inputs=dtypes, tolerance=tolerance, plain=plain)
    # What is known before the first answer, and after it.
    known = [_floats(parts[:count]) for count in range(1, len(parts) + 1)]
    return made + [functools.partial(own_program, _nans, device, (floats,)) for floats in known if floats]


def _poison(expected: Any) -> None:
    """Fills freed memory with NaN: an output that a candidate leaves unwritten may else hold the last right answer."""
    leaves = [leaf for leaf in _floats(expected) if isinstance(leaf, jax.Array)]
    if not leaves:
        return
    devices = list({device for leaf in leaves for device in leaf.devices()})
    made = run_own_program(_nans, devices[0], (leaves,)) if len(devices) == 1 else _nans_of_many(leaves)
    # An accelerator does one thing after the other, and gives memory away in that order: no need to wait.
    for spoilt in jax.block_until_ready(made) if _jax.default_platform() == "cpu" else made:
        spoilt.delete()


def _floats(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree_util.tree_leaves(tree) if hasattr(leaf, "dtype") and inputs.is_float(leaf)]


def _nans(arrays: list[Any], static: Any = ()) -> list[Any]:
    # Computed from them: a CPU takes memory for constants from another place than for what its threads compute.
    return [array * jax.numpy.asarray(np.nan, array.dtype) for array in arrays]


_nans_of_many = jax.jit(_nans)
