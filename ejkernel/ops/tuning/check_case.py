"""A set of inputs, what every candidate must make of it, and whether one does."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..timing import check, inputs
from ..timing.program import CompiledProgram
from .job import TuningJob


def inputs_of(job: TuningJob, seed: int) -> tuple[inputs.FlatCall, tuple[Any, ...]]:
    """The job's call taken apart, and real arrays for it."""
    args, kwargs = job.args, job.kwargs
    if job.example is not None:
        args, kwargs = job.example(np.random.default_rng(seed))
    call = inputs.flatten_call(args, kwargs)
    fresh = job.fresh_floats and job.example is None
    return call, job.place(inputs.concrete(call.leaves, np.random.default_rng(seed), fresh_floats=fresh))


@dataclass
class CheckCase:
    """One set of inputs, and what is right for it."""

    leaves: Sequence[Any]
    # The output and, under validate_backward, the gradients; empty until somebody has shown them.
    expected: tuple[Any, ...] = ()

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


def _poison(expected: Any) -> None:
    """Fills freed memory with NaN: an output that a candidate leaves unwritten may else hold the last right answer."""
    for leaf in jax.tree_util.tree_leaves(expected):
        if hasattr(leaf, "dtype") and inputs.is_float(leaf):
            jax.block_until_ready(_nans(leaf.shape, leaf.dtype)).delete()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _nans(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.numpy.full(shape, np.nan, dtype)
