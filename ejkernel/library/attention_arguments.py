"""The arguments of attention: what fits, and the one form that the kernel takes them in."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import Invocation
from .arguments import ArgumentError, ArgumentTypeError, as_array, as_int32, integers, known_values, same, same_dtype
from .attention_sight import Sight

# The arrays of a call by their positions.
ARRAYS = ("q", "k", "v", "mask", "bias", "query_lengths", "key_value_lengths", "sinks")


def check_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """An error unless queries, keys and values fit each other."""
    same_dtype("q", q, "k", k)
    same_dtype("k", k, "v", v)
    if k.shape[:3] != v.shape[:3]:
        raise ArgumentError(f"k and v must have the same shape but for the last axis, got {k.shape} and {v.shape}")
    same("batch", "q", q, q.shape[0], "k", k, k.shape[0])
    same("head_dim", "q", q, q.shape[3], "k", k, k.shape[3])
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ArgumentError(
            f"the heads of q must be a multiple of those of k: {q.shape[2]} and {k.shape[2]}, "
            f"of shapes {q.shape} and {k.shape}"
        )


def spread(name: str, value: Any, places: tuple[int, ...]) -> jax.Array | None:
    """A mask or bias with four dimensions, each of them 1 or all."""
    if value is None:
        return None
    array = as_array(name, value)
    wanted = jnp.bool_ if name == "mask" else jnp.floating
    if not jnp.issubdtype(array.dtype, wanted):
        hint = "use a boolean array, or bias= for what is added" if name == "mask" else "use a floating-point array"
        raise ArgumentTypeError(f"{name} is {array.dtype.name}; {hint}")
    whole = (1,) * (4 - array.ndim) + array.shape
    if len(whole) != 4 or any(size not in (1, place) for size, place in zip(whole, places, strict=True)):
        raise ArgumentError(
            f"{name} of shape {array.shape} does not broadcast to (batch, heads, queries, keys) = {places}"
        )
    return array.reshape(whole)


def sinks_of(value: Any, q: jax.Array) -> jax.Array | None:
    """A logit for each head of the queries, in float32."""
    if value is None:
        return None
    array = as_array("sinks", value)
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.shape != (q.shape[2],):
        raise ArgumentError(
            f"sinks must be a floating-point array with a logit for each head of q, ({q.shape[2]},); "
            f"got {array.dtype.name} of shape {array.shape}"
        )
    return array


def scale_of(value: Any, head_dim: int) -> float:
    """The number that scores are multiplied by; that of the heads' width where none is given."""
    if not isinstance(value, (numbers.Real, type(None))):
        raise ArgumentTypeError(f"scale must be a number, got {type(value).__qualname__}; multiply q for anything else")
    if value is not None and not math.isfinite(value):
        raise ArgumentError(f"scale must be finite, got {value}")
    # Heads of no width have no scores.
    return max(head_dim, 1) ** -0.5 if value is None else float(value)


def soft_cap_of(value: Any) -> float | None:
    """The number that scores are kept below."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ArgumentError(f"logits_soft_cap must be a finite number over 0, or None; got {value!r}")
    return float(value)


def window_of(window: Any, causal: bool, queries: int) -> tuple[int, int] | None:
    """A window as (left, right); None where it hides nothing."""
    if window is None:
        return None
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2 or any(
        isinstance(side, bool) or not isinstance(side, numbers.Integral) or side < 0 for side in sides
    ):
        raise ArgumentError(f"window must be a number of keys from 0 on, or two of them (left, right); got {window!r}")
    # Numbers of numpy are arrays to a kernel, and a window is static.
    left, right = int(sides[0]), 0 if causal else int(sides[1])
    # A window that hides nothing is none; a causal call has its own way.
    return None if causal and left >= queries else (left, right)


def in_range(lengths: Any, most: int) -> bool:
    """Are all lengths from 0 to the most that there can be?"""
    return not lengths.size or bool(lengths.min() >= 0 and lengths.max() <= most)


def lengths_of(name: str, value: Any, batch: int, most: int) -> jax.Array | None:
    """Lengths that fit the call."""
    if value is None:
        return None
    lengths = integers(name, value, ("batch",))
    if lengths.shape[0] != batch:
        raise ArgumentError(f"{name} must have the shape (batch,) = ({batch},), got {lengths.shape}")
    known = known_values(lengths)
    if known is not None and not in_range(known, most):
        raise ArgumentError(f"{name} must be from 0 to {most}, got {known.min()} to {known.max()}")
    # Under a trace nothing can be read: what is beyond the places counts as all of them.
    return jnp.clip(as_int32(lengths), 0, most)


def named(inv: Invocation[Any, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return named_args(inv.args, inv.kwargs)


def named_args(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names."""
    return dict(zip(ARRAYS, args, strict=False)) | dict(kwargs)


def sight_of(given: Mapping[str, Any]) -> Sight:
    """The rules that hide keys, of a call's arguments."""
    places = [given.get(name) for name in ("query_lengths", "key_value_lengths")]
    return Sight(given.get("causal", False), given.get("window"), *places)


def is_float(arg: Any) -> bool:
    """Is this an array with a gradient?"""
    return arg is not None and bool(jnp.issubdtype(arg.dtype, jnp.floating))


def floats_of(args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The arrays with gradients, and all the others in their places, for `refilled`."""
    return [arg for arg in args if is_float(arg)], [None if is_float(arg) else (arg,) for arg in args]


def refilled(others: Sequence[Any], floats: Iterable[Any]) -> list[Any]:
    """The arguments with these arrays in the places of those with gradients."""
    values = iter(floats)
    return [next(values) if other is None else other[0] for other in others]
