"""Distance of an array from what is right, in units of rounding: one formula, by numpy or in a program on the device.

Values are judged by their surroundings, since rounding depends on them: a segment is 16 neighbours of one row or of one
column, and the scale of an element is the larger root mean square of its two segments. The numbers that come out say
how many segments are off, how far the worst element is, and whether there is a common factor; `check` compares them
with limits. Squares neither overflow nor vanish in float32: everything is scaled by the power of two that puts the
largest right value at 2^20, so that values 2^-70 as large and differences 2^40 times as large still count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from .rounding import Limits

# Neighbours in a segment. 32 let 18% more of the wrong variants pass in our trials, 8 reject more of the right ones.
SEGMENT = 16
# An element is off by up to 10 units of its scale in right outputs (9 million elements of an attention's gradient), and
# by 8 times what its neighbours are.
ELEMENT_UNITS = 12.0
# In an output without noise an element of half that stands out.
QUIET = 0.5
_TOP = 20
# A plain run's noise counts up to 2^24 times the largest right value: that much divided by the unit can be squared.
_MOST_NOISE = 2.0 ** (_TOP + 24)


class Scales(NamedTuple):
    """Parts of a right array that every comparison with it needs; made once."""

    # Two powers of two, since their product may lie beyond float32.
    factors: tuple[Any, Any]
    # Mean squares of segments along rows and along columns, raised to the noise of a plain run where that is larger.
    rows: Any
    columns: Any
    # Mean square of all.
    power: Any


class Noise(NamedTuple):
    """The noise of a right array, as a plain run shows it."""

    # Its common factor, in units.
    bias: Any
    # The share of segments with a scale that it raises.
    wider: Any
    # The share of segments where it is off by over half of the values; all, where other values are not finite. Where
    # it is large the two do not compute the same.
    strange: Any


class Deviations(NamedTuple):
    """Findings of a comparison; the order is that of the array that comes from the device."""

    # Values that are finite on one side alone, or not the same where they are not; of integers, those that differ.
    unlike: float = 0.0
    # Shares of segments that are off by more than the limit.
    rows: float = 0.0
    columns: float = 0.0
    # The noise of all segments together, in units, and how many there are.
    level: float = 0.0
    segments: float = 0.0
    # Of the elements that stand out, off by over 6 units and more than their neighbours, the one that is off the most,
    # in units of its scale; 0 where there is none.
    element: float = 0.0
    # The common factor, in units.
    bias: float = 0.0
    # The largest difference over the root mean square of all that is right.
    error: float = 0.0


def scales_of(xp: Any, want: Any, plain: Any, limits: Limits) -> tuple[Scales, Noise]:
    """The scales of a right array, and what a plain run (None: there is none) says of it."""
    wide = _wide(want)
    want = want.astype(wide)
    finite = xp.isfinite(want)
    kept = _view(xp.where(finite, want, 0))
    top = xp.maximum(xp.max(xp.abs(kept)), wide(limits.least or 1.0))
    shift = _TOP - xp.frexp(top)[1]
    factors = xp.ldexp(wide(1), shift // 2), xp.ldexp(wide(1), shift - shift // 2)
    kept = _scaled(xp, kept, factors)
    if plain is None:
        (rows,), (columns,) = (_means(xp, [kept * kept], axis) for axis in (2, 1))
        (power,), _ = _gathered(xp, [rows * _weights(xp, kept.shape)])
        nothing = xp.zeros((), wide)
        return Scales(factors, rows, columns, power), Noise(nothing, nothing, nothing)
    plain = plain.astype(wide)
    known = xp.isfinite(plain)
    off = _view(xp.where(finite & known, plain, xp.where(finite, want, 0)))
    off = xp.clip(_scaled(xp, off, factors) - kept, -_MOST_NOISE, _MOST_NOISE)
    rows, noise, both = _means(xp, [kept * kept, off * off, off * kept], 2)
    columns, across = _means(xp, [kept * kept, off * off], 1)
    unit = wide(limits.unit**2)
    weights = _weights(xp, kept.shape)
    some = (noise > 0) | (rows > 0)
    sums, _ = _gathered(xp, [rows * weights, both * weights, noise > rows / 4, noise > unit * rows, some, rows >= 0])
    power, common, strange, wider, among, count = sums
    strange = xp.where(xp.any(known != finite), 1, strange / xp.maximum(among, 1))
    scales = Scales(factors, xp.maximum(rows, noise / unit), xp.maximum(columns, across / unit), power)
    return scales, Noise(_over(xp, xp.abs(common), power) / wide(limits.unit), wider / count, strange)


def numbers_of(xp: Any, got: Any, want: Any, scales: Scales, limits: Limits) -> Any:
    """The `Numbers` of one array of floats, as an array."""
    wide = _wide(want)
    got, want = got.astype(wide), want.astype(wide)
    off, unlike = got - want, None
    # On the host one test tells that nothing of this is needed.
    if xp is not np or not np.isfinite(off).all():
        finite = xp.isfinite(want)
        same = (got == want) | (xp.isnan(got) & xp.isnan(want))
        unlike = _view((xp.isfinite(got) != finite) | ~(finite | same))
        off, want = (xp.where(finite, x, 0) for x in (off, want))
    off, want = (_scaled(xp, _view(x), scales.factors) for x in (off, want))
    least = _scaled(xp, wide(limits.least), scales.factors)
    square = off * off
    rows, both = _means(xp, [square, off * want], 2)
    (columns,) = _means(xp, [square], 1)
    some, bad = _over_limit(rows, scales.rows, limits, least)
    part = _over(xp, xp.maximum(rows - least * least, 0), scales.rows)
    noise = xp.where(some, xp.minimum(part, wide(limits.segment**2)), 0)
    (among, over, noise, common), _ = _gathered(xp, [some, bad, noise, both * _weights(xp, want.shape)])
    shares = [over / xp.maximum(among, 1), xp.zeros((), wide)]
    # A vector has no columns.
    if want.shape[1] > 1:
        (across, beyond), _ = _gathered(xp, _over_limit(columns, scales.columns, limits, least))
        shares[1] = beyond / xp.maximum(across, 1)
    level = xp.sqrt(noise / xp.maximum(among, 1)) / wide(limits.unit)
    element = _elements(xp, off, want, (rows, columns), scales, limits, least)
    counted, (largest, element) = _gathered(xp, [] if unlike is None else [unlike], [square, element])
    unlike = counted[0] if counted else xp.zeros((), wide)
    bias = _over(xp, xp.abs(common), scales.power) / wide(limits.unit)
    # Where a device takes all values for zero, they have no common factor.
    bias = xp.where(scales.power <= least * least, 0, bias)
    error = _over(xp, xp.sqrt(largest), xp.sqrt(scales.power))
    return xp.stack([unlike, *shares, level, among, element, bias, error]).astype(np.float32)


def _over_limit(found: Any, scale: Any, limits: Limits, least: Any) -> tuple[Any, Any]:
    """Masks of the segments that count, and of those that are off by more than they may be."""
    some = (scale > 0) | (found > 0)
    # Written so that NaN is over the limit.
    return some, some & ~(found <= found.dtype.type(limits.segment**2) * scale + least * least)


def _elements(xp: Any, off: Any, want: Any, found: tuple[Any, Any], scales: Scales, limits: Limits, least: Any) -> Any:
    """The error of each element that stands out, in units of its scale; 0 for the others."""
    wide = off.dtype.type
    beyond = xp.maximum(xp.abs(off) - wide(2 * limits.step) * xp.abs(want) - least, 0)
    scale = xp.maximum(_spread(xp, scales.rows, 2, want.shape[2]), _spread(xp, scales.columns, 1, want.shape[1]))
    unit = wide(limits.unit**2) * scale
    out = ~(beyond * beyond <= wide((ELEMENT_UNITS * QUIET) ** 2) * unit)
    # Most often there is none, and the host need not look at the neighbours of each.
    if xp is np and not out.any():
        return np.zeros((1, 1, 1), wide)
    others = (_without_itself(xp, mean, off, axis) for axis, mean in ((2, found[0]), (1, found[1])))
    # What its neighbours are off by as well is noise, up to a limit that the level alone can raise.
    alone = ~(beyond * beyond <= wide(ELEMENT_UNITS**2) * xp.minimum(xp.maximum(*others), unit))
    return xp.where(out & alone, _over(xp, beyond, xp.sqrt(unit)), 0)


def differing(xp: Any, got: Any, want: Any) -> Any:
    """The `Numbers` of an array with values that are equal or not, such as integers."""
    count = xp.sum(got != want).astype(np.float32)
    return xp.stack([count, *[xp.zeros((), np.float32)] * (len(Deviations._fields) - 1)])


def _wide(x: Any) -> Any:
    return np.float64 if x.dtype == np.float64 else np.float32


def _scaled(xp: Any, x: Any, factors: tuple[Any, Any]) -> Any:
    both = factors[0] * factors[1]
    # One factor does where it is a number.
    if xp is np and np.isfinite(both) and both > 0:
        return x * both
    return x * factors[0] * factors[1]


def _view(x: Any) -> Any:
    """The array as batch, rows and columns; axes of 1 would make segments of one element.

    Rows are along the longest axis but the last. The gradient of a causal attention's first query is nothing but noise
    in all heads: its neighbours are the next queries, and not the other heads.
    """
    shape = [n for n in x.shape if n != 1]
    if len(shape) > 2 and shape[-2] < max(shape[:-1]):
        axes = list(range(len(shape)))
        axes.insert(len(shape) - 2, axes.pop(shape[:-1].index(max(shape[:-1]))))
        x, shape = x.reshape(shape).transpose(axes), [shape[axis] for axis in axes]
    rows = shape[-2] if len(shape) > 1 else 1
    return x.reshape(-1, rows, shape[-1] if shape else 1)


def _means(xp: Any, arrays: list[Any], axis: int) -> list[Any]:
    """The means of the segments along an axis, of all of these arrays in one pass."""
    n = arrays[0].shape[axis]
    length = min(SEGMENT, n)
    parts = -(-n // length)
    pads = [(0, parts * length - n if place == axis else 0) for place in range(3)]
    shape = (*arrays[0].shape[:axis], parts, length, *arrays[0].shape[axis + 1 :])
    padded = [xp.pad(x, pads) if parts * length != n else x for x in arrays]
    sums, _ = _reduced(xp, [x.reshape(shape) for x in padded], [], (axis + 1,))
    return [x / _counts(xp, n, axis) for x in sums]


def _counts(xp: Any, n: int, axis: int, *, each: bool = False) -> Any:
    """The number of values of the segments along an axis, or those of each element: the last one may be short."""
    length = min(SEGMENT, n)
    if n % length == 0:
        return np.float32(length)
    last = n // length
    place = xp.arange(n) // length if each else xp.arange(last + 1)
    shape = [-1 if other == axis else 1 for other in range(3)]
    return xp.where(place == last, np.float32(n - last * length), np.float32(length)).reshape(shape)


def _weights(xp: Any, shape: tuple[int, ...]) -> Any:
    """The weight of each segment along rows in a mean of all."""
    return _counts(xp, shape[2], 2) / np.float32(np.prod(shape, dtype=np.int64))


def _gathered(xp: Any, sums: Any, tops: Any = ()) -> tuple[list[Any], list[Any]]:
    """The sums of all values of some arrays, and the largest of others, in one pass."""
    wide = next((x.dtype for x in (*sums, *tops) if x.dtype == np.float64), np.dtype(np.float32))
    sums = [x.astype(wide) for x in sums]
    # In two steps: a running sum of very many values in float32 loses small ones.
    return _reduced(xp, *_reduced(xp, sums, list(tops), (2,)), (0, 1))


def _reduced(xp: Any, sums: list[Any], tops: list[Any], axes: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    if xp is np:
        return [x.sum(axes) for x in sums], [x.max(axes) for x in tops]
    both = (*sums, *tops)
    if not both:
        return [], []
    # Largest values are of numbers that are not negative.
    starts = tuple(np.zeros((), x.dtype) for x in both)

    def combine(one: Any, other: Any) -> Any:
        added = [a + b for a, b in zip(one[: len(sums)], other, strict=False)]
        kept = [xp.maximum(a, b) for a, b in zip(one[len(sums) :], other[len(sums) :], strict=True)]
        return (*added, *kept)

    done = jax.lax.reduce(both, starts, combine, axes)
    return list(done[: len(sums)]), list(done[len(sums) :])


def _spread(xp: Any, x: Any, axis: int, n: int) -> Any:
    """Each segment's value for each of its elements."""
    length = min(SEGMENT, n)
    whole = xp.broadcast_to(xp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], length, *x.shape[axis + 1 :]))
    whole = whole.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
    return whole[:, :, :n] if axis == 2 else whole[:, :n]


def _without_itself(xp: Any, found: Any, off: Any, axis: int) -> Any:
    """The mean square of the other elements of each element's segment."""
    n = off.shape[axis]
    counts = _counts(xp, n, axis, each=True)
    return xp.maximum(_spread(xp, found, axis, n) * counts - off * off, 0) / xp.maximum(counts - 1, 1)


def _over(xp: Any, x: Any, scale: Any) -> Any:
    """x/scale where 0/0 is 0: without a scale nothing may be off."""
    return xp.where(x == 0, 0, x / scale)
