"""Does an answer agree with what is right, but for rounding?

The rule and its reasons are in docs/checking.md. Nothing of it knows the operation: nearly every segment of 16
neighbours must agree within its own scale, all of them together within half of that, every element within the scale
around it, and there may be no common factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import numpy as np

from ..core.record import Finding
from . import comparing
from .deviation import ELEMENT_UNITS, QUIET, SEGMENT, Deviations
from .rounding import Limits, limits_of

# A plain run that is off by over half of the values in more segments than that may compute something else.
_STRANGE = 0.5
# A plain run with a smaller common factor, in units, says nothing by it.
_SLIGHT = 0.25
# The share of segments that may be off: the first row of a causal attention's gradient is zero, and kernels that use
# the rounded output give noise there. 1/8 let more wrong variants pass in our trials, 1/32 changed little.
_FEW = 1 / 16
# An output's own noise raises the limit of an element up to here, and lowers it where there is none.
_NOISY = 2.0
# By how much the common factor of a plain run raises the limit of one.
_PLAIN_FACTOR = 2.0


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison; without a reason the answer is right."""

    # The largest difference over the root mean square of what is right.
    error: float = 0.0
    reason: str = ""
    finding: Finding | None = None


@dataclass(frozen=True)
class _Leaf:
    """An array that is right, or another value."""

    name: str
    want: Any
    # None: its values are equal or not.
    limits: Limits | None
    bias: float = 0.0
    wider: float = 0.0

    @property
    def is_measured(self) -> bool:
        want = self.want
        return hasattr(want, "dtype") and want.dtype != jax.dtypes.float0 and want.size > 0


def compare(answer: Any, right: Any, tolerance: float | None = None, **about: Any) -> Comparison:
    """One output against what is right; several go through a `Standard`, which keeps what they have in common."""
    return Standard([right], tolerance=tolerance, **about).compare([answer])


@final
class Standard:
    """The right answer for one set of inputs, with the numbers that every comparison needs, made once."""

    def __init__(
        self,
        right: Sequence[Any],
        *,
        plain: Sequence[Any] = (),
        tolerance: float | None = None,
        inputs: Iterable[Any] = (),
        on_device: bool | None = None,
    ) -> None:
        """`right` are the parts of an answer: the output, then the gradients where there are any.

        `plain` are the first parts as a plain computation in the dtypes of the inputs gives them: noise that it has,
        others may have too.
        """
        dtypes = tuple(inputs)
        self._structures = [jax.tree_util.tree_structure(part) for part in right]
        self._leaves = [_Leaf(*pair, _limits(pair[1], dtypes, tolerance)) for pair in _named(right)]
        self._places = [place for place, leaf in enumerate(self._leaves) if leaf.is_measured]
        arrays = [self._leaves[place].want for place in self._places]
        self._about = tuple(self._leaves[place].limits for place in self._places)
        self._device = comparing.place_of(arrays, on_device)
        self._wants = comparing.bring(arrays, self._device)
        # Is the plain run so far off that it may compute something else?
        self.strange = False
        self._scales = self._own_scales(self._plain_arrays(plain))

    def compare(self, answer: Sequence[Any]) -> Comparison:
        """Compares an answer with what is right."""
        return self.end(self.begin(answer))

    def begin(self, answer: Sequence[Any]) -> Any:
        """Has it compared, for `end`: a device works on, and the host need not wait."""
        if [jax.tree_util.tree_structure(part) for part in answer] != self._structures:
            return Comparison(math.inf, "another structure of outputs", Finding("form", None))
        gots = [leaf for part in answer for leaf in jax.tree_util.tree_leaves(part)]
        for leaf, got in zip(self._leaves, gots, strict=True):
            reason = _other_form(got, leaf.want)
            if reason:
                return Comparison(math.inf, f"{leaf.name}: {reason}", Finding("form", None, leaf.name))
        if not self._places:
            return Comparison()
        measured = comparing.bring([gots[place] for place in self._places], self._device)
        return comparing.numbers(measured, self._wants, self._scales, self._about, self._device)

    def end(self, begun: Any) -> Comparison:
        """The outcome of a comparison that was begun; raises errors of the computations before it on the device."""
        if isinstance(begun, Comparison):
            return begun
        error, nearest = 0.0, None
        for place, row in zip(self._places, np.asarray(begun).tolist(), strict=True):
            leaf = self._leaves[place]
            found = Deviations(*row)
            reason, finding = judge(found, leaf.limits, leaf.want.size, bias=leaf.bias, wider=leaf.wider)
            finding = replace(finding, output=leaf.name)
            # Without a scale for the difference, what is not finite is the reason.
            error = max(error, found.error if math.isfinite(found.error) else math.inf)
            if reason:
                return Comparison(math.inf if finding.ratio is None else error, f"{leaf.name}: {reason}", finding)
            if nearest is None or (finding.ratio or 0.0) > (nearest.ratio or 0.0):
                nearest = finding
        return Comparison(error, "", nearest)

    def _plain_arrays(self, plain: Sequence[Any]) -> list[Any] | None:
        """The plain run's arrays beside those that are compared; None where there is none of that form."""
        if not plain or [jax.tree_util.tree_structure(part) for part in plain] != self._structures[: len(plain)]:
            return None
        own = dict(enumerate(leaf for part in plain for leaf in jax.tree_util.tree_leaves(part)))
        found = [own.get(place) if self._leaves[place].limits else None for place in self._places]
        for n, place in enumerate(self._places):
            if found[n] is not None and _other_form(found[n], self._leaves[place].want):
                found[n] = None
        there = [n for n, array in enumerate(found) if array is not None]
        for n, array in zip(there, comparing.bring([found[n] for n in there], self._device), strict=True):
            found[n] = array
        return found if there else None

    def _own_scales(self, plains: list[Any] | None) -> list[Any]:
        scales, noises = comparing.scales(self._wants, plains, self._about, self._device)
        for n, plain in enumerate(plains or []):
            noise = noises[n]
            if plain is not None and noise is not None:
                bias = float(noise.bias)
                self._note(n, bias if bias >= _SLIGHT else 0.0, float(noise.wider))
                self.strange = self.strange or not float(noise.strange) <= _STRANGE
        return scales

    def _note(self, n: int, bias: float, wider: float) -> None:
        self._leaves[self._places[n]] = replace(self._leaves[self._places[n]], bias=bias, wider=wider)


def builders(
    parts: Sequence[Any],
    device: jax.Device,
    *,
    inputs: Iterable[Any] = (),
    tolerance: float | None = None,
    plain: bool = False,
) -> list[Callable[[], Any]]:
    """Functions that compile the programs which comparisons of such answers need; none where the host compares.

    They may be called on any thread.

    `plain`: there will be a plain run of the output.
    """
    dtypes = tuple(inputs)
    leaves = [_Leaf(*pair, _limits(pair[1], dtypes, tolerance)) for pair in _named(parts)]
    shapes = [leaf.want for leaf in leaves if leaf.is_measured]
    if not shapes or not comparing.is_large(sum(shape.size for shape in shapes), device):
        return []
    about = tuple(leaf.limits for leaf in leaves if leaf.is_measured)
    outputs = len(jax.tree_util.tree_leaves(parts[0]))
    plains = [plain and place < outputs and leaf.limits is not None for place, leaf in enumerate(leaves)]
    measured = [has for has, leaf in zip(plains, leaves, strict=True) if leaf.is_measured]
    return comparing.builders(shapes, about, device, plain=measured)


def worst_of(found: Sequence[Comparison]) -> Comparison:
    """The comparison that is wrong, or came nearest to it, of those on several sets of inputs."""
    wrong = [one for one in found if one.reason]
    if wrong:
        return wrong[0]
    nearest = max(found, key=lambda one: one.finding.ratio or 0.0 if one.finding else 0.0)
    return replace(nearest, error=max(one.error for one in found))


def _named(parts: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for name, part in zip(("output", "gradient"), parts, strict=False):
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            yield f"{name}{jax.tree_util.keystr(path)}", leaf


def _limits(want: Any, inputs: tuple[Any, ...], tolerance: float | None) -> Limits | None:
    if not hasattr(want, "dtype") or not jax.numpy.issubdtype(want.dtype, np.inexact):
        return None
    return limits_of(want.dtype, inputs, tolerance)


def _other_form(got: Any, want: Any) -> str:
    """The difference in type, shape or dtype, if there is one; values that are no arrays must be equal."""
    if not hasattr(want, "dtype") or not hasattr(got, "dtype"):
        if hasattr(want, "dtype") != hasattr(got, "dtype"):
            return f"{type(got).__qualname__} instead of {type(want).__qualname__}"
        return "" if got == want else f"{got!r} instead of {want!r}"
    if np.shape(got) != np.shape(want) or got.dtype != want.dtype:
        return f"{got.dtype}{list(np.shape(got))} instead of {want.dtype}{list(np.shape(want))}"
    return ""


def judge(
    found: Deviations, limits: Limits | None, size: int, *, bias: float = 0.0, wider: float = 0.0
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


def _allowed(found: Deviations, limits: Limits, bias: float) -> dict[str, tuple[float, float]]:
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


def _said(test: str, found: Deviations, limits: Limits, most: float) -> str:
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
