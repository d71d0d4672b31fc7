"""The verdict on the numbers of a comparison: right or wrong, by which test, and how far from its limit."""

from __future__ import annotations

import math

import numpy as np

from ..core.record import Finding
from .deviation import ELEMENT_UNITS, QUIET, SEGMENT, Numbers
from .rounding import Limits

# The share of segments that may be off: the first row of a causal attention's gradient is zero, and kernels that use
# the rounded output give noise there. 1/8 let more wrong variants pass in our trials, 1/32 changed little.
_FEW = 1 / 16
# An output's own noise raises the limit of an element up to here, and lowers it where there is none.
_NOISY = 2.0
# By how much the common factor of a plain run raises the limit of one.
_PLAIN_FACTOR = 2.0


def judge(
    found: Numbers, limits: Limits | None, size: int, *, bias: float = 0.0, wider: float = 0.0
) -> tuple[str, Finding]:
    """The reason that an array is wrong, empty where it is right, and the test that decided or came nearest.

    `bias` is the common factor of a plain run, `wider` the share of segments that its noise widens.
    """
    if limits is None:
        if found.unlike:
            return f"{found.unlike:.0f} of {size} values differ, and they must be equal", Finding("equal", None)
        return "", Finding("equal", 0.0)
    # Written so that NaN is wrong, here and below.
    if found.unlike != 0:
        return (
            f"{found.unlike:.0f} of {size} values are NaN or infinite on one side alone, or not the same there",
            Finding("finite", None),
        )
    allowed = _allowed(found, limits, bias)
    ratios = {test: _ratio(value, most) for test, (value, most) in allowed.items()}
    test = max(ratios, key=lambda name: ratios[name])
    ratio = ratios[test]
    finding = Finding(test, ratio if math.isfinite(ratio) else None, widened=wider)
    if ratio <= 1:
        return "", finding
    said = _said(test, found, limits, allowed[test][1])
    if wider:
        said += f" (wider already in {wider:.0%} of the segments, where a plain run is noisy too)"
    return said, finding


def _allowed(found: Numbers, limits: Limits, bias: float) -> dict[str, tuple[float, float]]:
    """Each test's number and its limit."""
    # A few segments may be noisier than many are.
    few = 1 + 1 / math.sqrt(max(found.segments, 1.0))
    level = min(max(found.level, QUIET), _NOISY)
    return {
        # Not `max`, which may leave NaN out.
        "segments": (float(np.maximum(found.rows, found.columns)), _FEW),
        "whole": (found.level, limits.whole * few),
        "element": (found.element, ELEMENT_UNITS * level),
        "factor": (found.bias, limits.bias + _PLAIN_FACTOR * bias),
    }


def _ratio(value: float, most: float) -> float:
    return value / most if math.isfinite(value) and math.isfinite(most) else math.inf


def _said(test: str, found: Numbers, limits: Limits, most: float) -> str:
    unit = limits.unit
    if test == "segments":
        axis, share = ("rows", found.rows) if found.rows >= found.columns else ("columns", found.columns)
        return (
            f"{share:.1%} of the segments of {SEGMENT} neighbours along {axis} are off by over {limits.segment:.2g} "
            f"of the size of their values; {_FEW:.1%} may be"
        )
    if test == "whole":
        return f"off by {found.level * unit:.2g} of the size of the values on the whole; {most * unit:.2g} is allowed"
    if test == "element":
        if not math.isfinite(found.element):
            return "an element differs where all values around it are zero"
        return (
            f"an element is off by {found.element * unit:.2g} of the size of the values around it; "
            f"{most * unit:.2g} is allowed"
        )
    return f"off by a common factor of {found.bias * unit:.2g}; {most * unit:.2g} is allowed"
