"""Limits on how far rounding may take an output from what is right, by dtype."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

# Rounding between the steps of a computation, and of the output itself. A product in TF32 is right for float32, so its
# step counts between. Where sums of products are added in another order, float64 is off by less than 2^-40.
_STEPS = {
    "float64": (2.0**-32, 2.0**-53),
    "float32": (2.0**-11, 2.0**-24),
    "float16": (2.0**-11, 2.0**-11),
    "bfloat16": (2.0**-8, 2.0**-8),
}
# Types of 8 bits and fewer: what is between is kept in at least 5 bits of mantissa, or sums of a few values have no
# right digit.
_NARROW = 2.0**-6
# Of a tolerance of 0: below every difference that float64 can have, and large enough to be squared in float32.
_NOTHING = 2.0**-60

# Right variants of kernels are off by 0.1 to 1.3 units in the median of segments, and by at most 5.
_SEGMENT_UNITS = 4.0
# All segments together: 1.3 units at most in right variants, 2.5 where 64 sums were rounded to the output's dtype.
_WHOLE_SHARE = 0.55
# A common factor: one step of a scalar passes (2), TF32 that cuts digits off does (1.5), a mean over 1024 of 1000 does
# not (3 in bfloat16).
_BIAS_UNITS = 2.5


@dataclass(frozen=True)
class Limits:
    """Limits of the error of one array; a hashable value, since a compiled comparison depends on it."""

    # Of the values around: rounding between the steps.
    unit: float
    # Of the value itself: rounding of the output.
    step: float
    # Of any value: a device may take what is smaller for zero.
    least: float
    # Root mean square of a segment's error over that of its values.
    segment: float
    # The same of all segments together, and the common factor; in units.
    whole: float
    bias: float


def limits_of(dtype: Any, inputs: Iterable[Any] = (), tolerance: float | None = None) -> Limits:
    """The limits for an output of this inexact dtype of a call with inputs of those; a tolerance is a segment's."""
    names = frozenset(real.name for real in map(_real, inputs) if real is not None)
    real = _real(dtype)
    assert real is not None
    return _limits(real.name, names, tolerance)


def _real(dtype: Any) -> np.dtype[Any] | None:
    """The floating-point type that values of this one are made of."""
    if jax.numpy.issubdtype(dtype, np.complexfloating):
        return np.empty(0, dtype).real.dtype
    return np.dtype(dtype) if jax.numpy.issubdtype(dtype, np.floating) else None


@functools.lru_cache(maxsize=256)
def _limits(name: str, inputs: frozenset[str], tolerance: float | None) -> Limits:
    step, least = _steps(name)[1], _least(name)
    if tolerance is not None:
        unit = max(float(tolerance) / _SEGMENT_UNITS, _NOTHING)
        least = least if tolerance > 0 else 0.0
        return Limits(unit, min(step, unit), least, _SEGMENT_UNITS * unit, _SEGMENT_UNITS, _SEGMENT_UNITS)
    unit = max(_steps(each)[0] for each in (name, *inputs))
    segment = max(_SEGMENT_UNITS * unit, (_SEGMENT_UNITS - 1) * unit + step)
    return Limits(unit, step, least, segment, _WHOLE_SHARE * segment / unit, _BIAS_UNITS)


def _steps(name: str) -> tuple[float, float]:
    if name in _STEPS:
        return _STEPS[name]
    mantissa = int(jax.numpy.finfo(name).nmant)
    # Powers of two alone are scales, exact wherever they are multiplied.
    return (_NARROW if mantissa else 0.0), 2.0 ** -(mantissa + 1)


def _least(name: str) -> float:
    info = jax.numpy.finfo(name)
    # Values below the smallest normal one are zero to many a device, where float32 is the type that it computes in.
    return float(info.tiny if name in ("float64", "float32", "bfloat16") else info.smallest_subnormal)
