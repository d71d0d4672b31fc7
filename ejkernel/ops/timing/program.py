"""What is timed: a candidate's forward pass, or forward and backward as one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..core.record import Objective
from .inputs import Call, is_float, random_like

# A computation that looks at values while it is traced; the others are no reason to run it without jit.
UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
# What JAX says where a function was compiled beforehand.
_COMPILED = "lowered and compiled for a particular signature"
# What JAX raises where a function has no derivative, or not one of this kind.
UNDIFFERENTIABLE = (TypeError, ValueError, NotImplementedError)


@dataclass(frozen=True)
class Program:
    """Something to call with concrete arrays again and again; `notes` says where it is less than was asked for."""

    call: Callable[..., Any]
    objective: Objective
    notes: str = ""


def forward(fn: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """The function of the call's arrays alone."""

    def run(*leaves: Any) -> Any:
        args, kwargs = call.rebuild(leaves)
        return fn(*args, **kwargs)

    return run


def forward_and_backward(run: Callable[..., Any], floats: Sequence[int]) -> Callable[..., Any]:
    """Output and gradients of these arrays, as a function of all arrays and the outputs' cotangents."""

    def both(leaves: Sequence[Any], cotangents: Any) -> Any:
        def of_floats(*values: Any) -> Any:
            whole = list(leaves)
            for place, value in zip(floats, values, strict=True):
                whole[place] = value
            return run(*whole)

        out, pull = jax.vjp(of_floats, *(leaves[i] for i in floats))
        return out, pull(jax.tree_util.tree_map(_cotangent, out, cotangents))

    return both


def _cotangent(out: Any, given: Any) -> Any:
    return given if is_float(out) else np.zeros(out.shape, jax.dtypes.float0)


def compiled(fn: Callable[..., Any], call: Call, leaves: Sequence[Any], objective: Objective, seed: int) -> Program:
    """The program, ready to run; compile it in a clean room."""
    run = forward(fn, call)
    notes = ""
    if objective == "forward+backward":
        try:
            return Program(_with_gradients(run, call, leaves, seed), "forward+backward")
        except UNTRACEABLE:
            # The forward pass, below, will find and say the same.
            pass
        except UNDIFFERENTIABLE as error:
            notes = f"cannot be differentiated, timed forward: {first_line(error)}"
    try:
        return Program(jax.jit(run).lower(*leaves).compile(), "forward", notes)
    except (*UNTRACEABLE, TypeError) as error:
        if not isinstance(error, UNTRACEABLE) and _COMPILED not in str(error):
            raise
        return Program(run, "forward", f"cannot be jitted, timed as it is: {first_line(error)}")


def _with_gradients(run: Callable[..., Any], call: Call, leaves: Sequence[Any], seed: int) -> Callable[..., Any]:
    floats = [i for i, leaf in enumerate(call.leaves) if is_float(leaf)]
    if not floats:
        raise TypeError("no argument is a floating-point array")
    both = jax.jit(forward_and_backward(run, floats))
    # Random, never ones: the gradient of a sum lets the compiler drop work. Arguments, not constants: those it folds.
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(run, *leaves)
    cotangents = jax.tree_util.tree_map(lambda out: random_like(out, rng) if is_float(out) else 0, shapes)
    program = both.lower(tuple(leaves), cotangents).compile()
    return lambda *values: program(values, cotangents)


def first_line(error: BaseException) -> str:
    """An error as one line of a record."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
