"""Static values: what tells two of them apart, and one as it is now, whatever its owner changes later."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import hashlib
from collections.abc import Hashable, Sequence
from types import NoneType
from typing import Any

import jax
import numpy as np

from ..core.codec import is_model

# Numpy arrays can be changed in place: up to this size their content is the key, above it a digest stands for it.
_SMALL_ARRAY = 1 << 16
# Values that are their own key, once the type stands beside them.
_PLAIN = frozenset((int, bool, str, bytes, NoneType))
# Their subclasses may hold more than their value, which their `==` does not see.
_BUILT_IN = (str, bytes, int, float, complex, tuple, frozenset, functools.partial)


def value_key(value: Any, *, soft: bool = True) -> Hashable:
    """A hashable stand-in that tells values, their types, -0.0 and NaN apart, at any depth; None for what has none.

    A value that is known by its address alone is kept alive by the entry under this key.
    """
    if type(value) in _PLAIN:
        return type(value), value
    if isinstance(value, (jax.Array, np.ndarray)):
        return _array_key(value)
    if isinstance(value, (float, complex, np.generic)):
        return type(value), repr(value), _hidden(value)
    parts = _parts(value, soft)
    if parts is not None:
        keys = [value_key(part, soft=soft) for part in parts]
        if None in keys:
            return None
        kept = frozenset(keys) if isinstance(value, frozenset) else tuple(keys)
        # What fields do not show, the object's own `==` may; where it has none that counts, its attributes do.
        by_itself = _has_fields(value) and is_hashable(value)
        return type(value), kept, value if by_itself else _hidden(value)
    if not is_hashable(value):
        return ("object", id(value)) if soft else None
    return type(value), value, _hidden(value)


def as_it_is_now(value: Any) -> Any:
    """A copy of what can be changed in place, at any depth, where `value_key` looks at its content."""
    if isinstance(value, np.ndarray):
        return value if _is_read_only(value) else _frozen(value)
    if type(value) in (tuple, list, set):
        return type(value)(map(as_it_is_now, value))
    if type(value) is dict:
        return {key: as_it_is_now(part) for key, part in value.items()}
    # A hashable object is known by its own `==`, and an unknown one by its address: a copy would be another one.
    if not _has_fields(value) or is_hashable(value):
        return value
    same = copy.copy(value)
    for name in _fields(value):
        object.__setattr__(same, name, as_it_is_now(getattr(value, name)))
    return same


def is_hashable(value: Any) -> bool:
    """Can this be part of a key as it is?"""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _array_key(value: Any) -> Hashable:
    if not isinstance(value, np.ndarray):
        return "array", id(value)
    if value.dtype.hasobject:
        return "array", value.shape, value_key(value.ravel().tolist())
    if value.nbytes <= _SMALL_ARRAY:
        return "array", str(value.dtype), value.shape, value.tobytes()
    if _is_read_only(value):
        return "array", id(value)
    # Some gigabytes a second; one that is marked as read-only costs nothing.
    content = hashlib.sha256(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return "array", str(value.dtype), value.shape, content.digest()


def _is_read_only(value: np.ndarray[Any, Any]) -> bool:
    """Is there no array left through which this memory can be changed?"""
    memory: Any = value
    while isinstance(memory, np.ndarray):
        if memory.flags.writeable:
            return False
        memory = memory.base
    return not isinstance(memory, (bytearray, memoryview))


def _frozen(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    same = value.copy()
    same.flags.writeable = False
    return same


def _has_fields(value: Any) -> bool:
    return not isinstance(value, type) and (dataclasses.is_dataclass(value) or is_model(type(value)))


def _fields(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return list(type(value).model_fields)


def _parts(value: Any, soft: bool) -> Sequence[Any] | None:
    """The parts of a value; None for one without parts. Unhashable containers count where the caller can keep them."""
    if isinstance(value, type):
        return None
    if isinstance(value, functools.partial):
        return (value.func, value.args, tuple(sorted(value.keywords.items())))
    if isinstance(value, (tuple, frozenset)):
        return tuple(value)
    if _has_fields(value) and (soft or type(value).__hash__ is not None):
        return [getattr(value, name) for name in _fields(value)]
    if soft and isinstance(value, dict):
        return tuple(value.items())
    if soft and isinstance(value, (list, set)):
        return tuple(value) if isinstance(value, list) else (frozenset(value),)
    return None


def _hidden(value: Any) -> Hashable:
    """The attributes of a value that neither its fields nor its `==` show."""
    if not (isinstance(value, _BUILT_IN) or _has_fields(value)) or isinstance(value, enum.Enum):
        return None
    state = dict(getattr(value, "__dict__", None) or {})
    for store in ("__pydantic_private__", "__pydantic_extra__"):
        state |= getattr(value, store, None) or {}
    shown = set(_fields(value)) if _has_fields(value) else set()
    own = [(name, value_key(kept)) for name, kept in state.items() if name not in shown and not _is_memo(value, name)]
    return tuple(sorted(own, key=lambda pair: pair[0])) or None


def _is_memo(value: Any, name: str) -> bool:
    # Derived from the rest of the object, and there only once it was asked for.
    return isinstance(getattr(type(value), name, None), functools.cached_property)
