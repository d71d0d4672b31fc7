"""Do two candidates compute the same thing?"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

# Largest allowed root-mean-square error over the reference's root mean square, and ten times that for the worst
# element: a wrong tile hides in a mean, one rounded element must not fail. Set by mantissa bits, with room for sums
# in another order.
_LIMITS = {"float64": 1e-9, "float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2, "complex64": 1e-3, "complex128": 1e-9}
# 8-bit and narrower floats carry 1 to 3 mantissa bits.
_NARROW = 0.2
_WORST_OVER_MEAN = 10.0


def compare(out: Any, reference: Any, tolerance: float | None = None) -> tuple[float, str]:
    """The largest relative error, and why the output is wrong; an empty reason means that it is right."""
    shapes: list[Any] = [jax.tree_util.tree_structure(tree) for tree in (out, reference)]
    if shapes[0] != shapes[1]:
        return math.inf, "another structure of outputs"
    worst = 0.0
    for path, (got, want) in _pairs(out, reference):
        error, reason = _compare_leaf(got, want, tolerance)
        worst = max(worst, error)
        if reason:
            return worst, f"output{path}: {reason}"
    return worst, ""


def _pairs(out: Any, reference: Any) -> list[tuple[str, tuple[Any, Any]]]:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(reference)]
    leaves = zip(jax.tree_util.tree_leaves(out), jax.tree_util.tree_leaves(reference), strict=True)
    return list(zip(paths, leaves, strict=True))


def _compare_leaf(got: Any, want: Any, tolerance: float | None) -> tuple[float, str]:
    if not hasattr(want, "dtype") or not hasattr(got, "dtype"):
        if hasattr(want, "dtype") != hasattr(got, "dtype"):
            return math.inf, f"{type(got).__qualname__} instead of {type(want).__qualname__}"
        return (0.0, "") if got == want else (math.inf, f"{got!r} instead of {want!r}")
    if np.shape(got) != np.shape(want) or got.dtype != want.dtype:
        return math.inf, f"{got.dtype}{list(np.shape(got))} instead of {want.dtype}{list(np.shape(want))}"
    if want.dtype == jax.dtypes.float0 or want.size == 0:
        return 0.0, ""
    if jax.numpy.issubdtype(want.dtype, jax.dtypes.extended):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    limit = _LIMITS.get(str(want.dtype), _NARROW) if tolerance is None else tolerance
    if _belongs_on_device(got, want):
        return _verdict(*np.asarray(_errors(got, want)).tolist(), limit=limit)
    got, want = np.asarray(got), np.asarray(want)
    if not jax.numpy.issubdtype(want.dtype, np.inexact):
        wrong = int(np.sum(got != want))
        return (0.0, "") if not wrong else (math.inf, f"{wrong} of {want.size} integers differ")
    wide = np.complex128 if jax.numpy.issubdtype(want.dtype, np.complexfloating) else np.float64
    return _compare_floats(got.astype(wide), want.astype(wide), limit)


def _compare_floats(got: Any, want: Any, limit: float) -> tuple[float, str]:
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite):
        return math.inf, f"{int(np.sum(~np.isfinite(got)))} non-finite values instead of {int(np.sum(~finite))}"
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return math.inf, "other non-finite values"
    got, want = got[finite], want[finite]
    if want.size == 0:
        return 0.0, ""
    off = np.abs(got - want)
    # Over the largest first: squares of huge values are infinite, those of tiny ones zero.
    largest = float(np.max(np.abs(want)))
    if largest == 0.0:
        return (0.0, "") if not off.any() else (math.inf, f"up to {off.max():.3g} where all should be zero")
    want, off = want / largest, off / largest
    scale = math.sqrt(float(np.mean(np.abs(want) ** 2)))
    return _verdict(0, 0, math.sqrt(float(np.mean(off**2))) / scale, float(off.max()) / scale, limit=limit)


def _verdict(unlike: float, other: float, mean: float, worst: float, *, limit: float) -> tuple[float, str]:
    if unlike:
        return math.inf, f"{int(unlike)} values are finite on one side alone"
    if other:
        return math.inf, "other non-finite values"
    if not (mean <= limit and worst <= limit * _WORST_OVER_MEAN):
        return worst, f"off by {mean:.3g} (RMS) and {worst:.3g} (worst) of the reference's RMS; allowed {limit:.3g}"
    return worst, ""


# Below this the copy to the host costs less than compiling the comparison.
_DEVICE_ELEMENTS = 1 << 16


def _belongs_on_device(got: Any, want: Any) -> bool:
    """Large arrays of an accelerator are compared there: only the verdict crosses to the host."""
    arrays = isinstance(got, jax.Array) and isinstance(want, jax.Array)
    if not arrays or want.size < _DEVICE_ELEMENTS or not jax.numpy.issubdtype(want.dtype, np.floating):
        return False
    return all(d.platform != "cpu" for d in want.devices()) and got.sharding == want.sharding


@jax.jit
def _errors(got: Any, want: Any) -> Any:
    """How many values are finite on one side alone, how many non-finite ones differ, RMS and worst error."""
    wide = jax.numpy.promote_types(want.dtype, np.float32)
    got, want = got.astype(wide), want.astype(wide)
    finite = jax.numpy.isfinite(want)
    unlike = jax.numpy.sum(jax.numpy.isfinite(got) != finite)
    same = (got == want) | (jax.numpy.isnan(got) & jax.numpy.isnan(want))
    other = jax.numpy.sum(~finite & ~same)
    both = finite & jax.numpy.isfinite(got)
    largest = jax.numpy.max(jax.numpy.where(both, jax.numpy.abs(want), 0))
    # Where all should be zero, any difference is infinite.
    scaled = jax.numpy.where(both, want, 0) / largest
    off = jax.numpy.where(both, jax.numpy.abs(got - want), 0)
    count = jax.numpy.maximum(jax.numpy.sum(both), 1)
    rms = jax.numpy.sqrt(jax.numpy.sum(scaled**2) / count) * largest
    mean = jax.numpy.sqrt(jax.numpy.sum((off / largest) ** 2) / count) * largest
    nothing = jax.numpy.max(off) == 0
    mean, worst = jax.numpy.where(nothing, 0, mean / rms), jax.numpy.where(nothing, 0, jax.numpy.max(off) / rms)
    # One array, so that one copy brings the verdict.
    return jax.numpy.stack([unlike.astype(wide), other.astype(wide), mean, worst])
