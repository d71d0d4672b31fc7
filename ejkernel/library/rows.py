"""Operations on whole rows: their arguments, and what their implementations cannot do."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax

from ..ops import Invocation
from .arguments import DOUBLE, FLOATS, ArgumentError, ArgumentTypeError, as_array, float_array
from .extent import too_large
from .mosaic import served, shelf, spread
from .reduce import refuses_lanes
from .triton.rows import refuses


def float_rows(name: str, value: Any) -> jax.Array:
    """The argument as an array of a supported floating-point dtype with at least one dimension."""
    array = value if isinstance(value, jax.Array) else as_array(name, value)
    if array.dtype.name not in (*FLOATS, DOUBLE):
        raise ArgumentTypeError(f"{name} is {array.dtype.name}; use one of {', '.join(FLOATS)}")
    if array.ndim == 0:
        raise ArgumentError(f"{name} has the shape (); give it at least one dimension")
    return array


def narrow_rows(name: str, value: Any) -> jax.Array:
    """Rows as of `float_rows`, for an operation that does not compute in float64."""
    array = float_rows(name, value)
    return float_array(name, array, ("...",) * array.ndim)


def as_vector(name: str, value: Any, other: str, rows: jax.Array) -> jax.Array:
    """The argument as a vector with one value for each column of another one."""
    array = float_rows(name, value)
    if array.shape != rows.shape[-1:]:
        raise ArgumentError(
            f"{name} has the shape {array.shape} and {other} the shape {rows.shape}; "
            f"{name} needs one value for each of the last axis, {rows.shape[-1:]}"
        )
    return array


def across(vector: jax.Array, x: jax.Array) -> jax.Array:
    """The vector with as many dimensions as `x`: under `jax_numpy_rank_promotion="raise"` nothing is promoted."""
    missing = x.ndim - vector.ndim
    return jax.lax.expand_dims(vector, range(missing)) if missing else vector


def epsilon(value: Any) -> float:
    """The number that keeps a division from failing."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
        raise ArgumentError(f"eps={value!r} is no finite number of at least 0")
    return float(value)


def rows_refuse(
    inv: Invocation[Any, Any],
    implementation: str,
    lanes: int | None,
    rows: int | None,
    num_warps: int | None,
    each: int | None = None,
    *,
    shared: bool = False,
) -> str:
    """The reason that an operation on whole rows cannot run so; empty where it can."""
    x = inv.args[0]
    if implementation == "lanes":
        return refuses_lanes(x.shape[-1], lanes)
    if implementation not in ("triton", "mosaic"):
        return ""
    if 0 in x.shape:
        return "there is nothing to compute"
    if implementation == "mosaic":
        refuses_launch = shelf.refuses if shared else spread.refuses
        refused = refuses_launch(x.shape[-1], x.dtype.itemsize, num_warps, each)
        # Shared memory of another generation is not as large.
        return refused or served.refuses(inv, x.size, hopper=shared)
    return too_large(inv, x.size) or refuses(x.shape[-1], rows, num_warps)
