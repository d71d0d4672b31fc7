"""Checks of arguments: a clear error before tuning starts, naming the argument and both shapes."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops.core.errors import OpsError

FLOATS = ("float32", "bfloat16", "float16")
# As JAX makes arrays under `jax_enable_x64`; XLA's way computes with them where an operation takes them.
DOUBLE = "float64"
_FLOATS = frozenset(map(jnp.dtype, FLOATS))
# Of float32, which Python's own numbers become.
LARGEST = float(np.finfo(np.float32).max)


class ArgumentError(OpsError, ValueError):
    """An argument with a shape or a value that does not fit the call."""


class ArgumentTypeError(OpsError, TypeError):
    """An argument of a type or dtype that the operation does not take."""


def integer(name: str, value: Any) -> int:
    """The option as Python's own: numbers of numpy are arrays to a kernel, and options are static."""
    if not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(f"{name} must be an integer, got {type(value).__qualname__}")
    return int(value)


def as_array(name: str, value: Any) -> jax.Array:
    """The argument as an array."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ArgumentTypeError(f"{name} must be an array, got {type(value).__qualname__}")
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ArgumentTypeError(f"{name} is a shape without values; give an array, or call it under jax.eval_shape")
    # Converting costs more than a small call, even where there is nothing to convert. Random keys have no weak types.
    return value if isinstance(value, jax.Array) and not getattr(value, "weak_type", False) else jnp.asarray(value)


def float_dtype(name: str, value: Any) -> str:
    """The name of a result's dtype, which must be a supported floating-point one."""
    try:
        found = str(jnp.dtype(value).name)
    except TypeError as error:
        raise ArgumentTypeError(f"{name}={value!r} is no dtype; use one of {', '.join(FLOATS)}") from error
    if found not in FLOATS:
        raise ArgumentTypeError(f"{name} is {found}; use one of {', '.join(FLOATS)}")
    return found


def float_array(name: str, value: Any, form: Sequence[str]) -> jax.Array:
    """The argument as an array of a supported floating-point dtype with one dimension for each name of the form."""
    array = as_array(name, value)
    if array.dtype not in _FLOATS:
        raise ArgumentTypeError(f"{name} is {array.dtype.name}; use one of {', '.join(FLOATS)}{_advice(array)}")
    return with_rank(name, array, form)  # type: ignore[no-any-return]


def _advice(array: Any) -> str:
    if array.dtype.name != DOUBLE:
        return ""
    return ", as in x.astype(jnp.float32) (jax_enable_x64 makes float64; matmul, softmax and the norms take that, too)"


def integers(name: str, value: Any, form: Sequence[str] | None = None) -> Any:
    """The argument in its own dtype, to be read before it is narrowed; with a dimension for each name of the form.

    It may be an array of numpy: JAX itself would cut its 64 bits to 32.
    """
    array = value if isinstance(value, np.ndarray) else as_array(name, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ArgumentTypeError(f"{name} is {array.dtype.name}; use an integer array, such as int32")
    return array if form is None else with_rank(name, array, form)


def as_int32(array: Any) -> jax.Array:
    """The integers in 32 bits; what does not fit is the nearest that does, and so out of every range that it was."""
    if array.dtype == jnp.int32:
        return jnp.asarray(array) if isinstance(array, np.ndarray) else array
    info = np.iinfo(np.int32)
    low, high = max(info.min, int(jnp.iinfo(array.dtype).min)), min(info.max, int(jnp.iinfo(array.dtype).max))
    return jnp.asarray(array.clip(low, high).astype(np.int32))


def with_rank(name: str, array: Any, form: Sequence[str]) -> Any:
    """The array, or an error where it has another number of dimensions."""
    if array.ndim != len(form):
        raise ArgumentError(f"{name} must have the shape ({', '.join(form)}), got {array.shape}")
    return array


def same(what: str, one: str, first: jax.Array, first_size: int, other: str, second: jax.Array, size: int) -> None:
    """An error unless two arguments agree in a size."""
    if first_size != size:
        raise ArgumentError(
            f"{one} and {other} differ in {what}: {first_size} and {size}, of shapes {first.shape} and {second.shape}"
        )


def same_dtype(one: str, first: jax.Array, other: str, second: jax.Array) -> None:
    """An error unless two arguments have the same dtype."""
    if first.dtype != second.dtype:
        raise ArgumentTypeError(
            f"{one} is {first.dtype.name} and {other} is {second.dtype.name}; convert one of them with astype"
        )


def known_values(array: Any) -> np.ndarray[Any, Any] | None:
    """The values where they can be read now; None under a trace, and for a shape that stands for an array."""
    return None if isinstance(array, (jax.core.Tracer, jax.ShapeDtypeStruct)) else np.asarray(array)
