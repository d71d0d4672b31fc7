"""Compiles in a worker what the checks of the next tuning need, while this one is measured.

On an H200 a tuning waited a second for such programs, which depend on shapes alone: those that draw its inputs, that
compare answers, and the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ...core.device import default_device
from ...timing.inputs import compile_draw
from ..check import builders_of
from .ahead_compiler import AheadCompiler
from .executables import loaded


def prepare(head: Mapping[str, Any], parts: Sequence[bytes], ahead: AheadCompiler) -> None:
    """Has all of it compiled; the first part is a candidate's program, the others are the reference's."""
    # On a thread that compiles, where what it raises is left to the tuning: the thread that listens has to go on.
    ahead.also(functools.partial(_prepare, head, parts, ahead))


def _prepare(head: Mapping[str, Any], parts: Sequence[bytes], ahead: AheadCompiler) -> None:
    program, *references = parts
    for data in references:
        ahead.give(data, at_once=True)
    for group in head["draws"]:
        shapes = [jax.ShapeDtypeStruct(tuple(shape), np.dtype(name)) for name, shape in group]
        ahead.also(functools.partial(compile_draw, shapes))
    ahead.also(functools.partial(_comparisons, ahead, dict(head), program, len(references) > 1))


def _comparisons(ahead: AheadCompiler, head: Mapping[str, Any], program: bytes, plain: bool) -> None:
    found = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in loaded(program).out_avals]
    outputs = head["outputs"]
    answer = (found,) if head["objective"] == "forward" else (found[:outputs], found[outputs:])
    dtypes = [np.dtype(name) for name in head["dtypes"]]
    for build in builders_of(answer, dtypes, head["tolerance"], default_device(), plain=plain):
        # Each is one program: side by side.
        ahead.also(build)
