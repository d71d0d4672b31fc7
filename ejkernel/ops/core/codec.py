"""A cfg as JSON and back: dataclasses, pydantic models, named tuples and plain values, equal after the trip.

`loads` reads files that any user may have written, as the standard has it: what is odd is a `ValueError`. No JAX here.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ConfigTypeError

# Deeper than any real config; a bound keeps a damaged or hostile file from exhausting the stack.
_DEEPEST = 64


def encode(cfg: Any) -> Any:
    """The JSON value of a cfg; a `ConfigTypeError` names the field that has none."""
    return _encode(cfg, describe(cfg), 0)


def dumps(value: Any) -> str:
    """One line of strict JSON."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(", ", ": "))


def describe(cfg: Any) -> str:
    """A cfg's type and value, short enough for a message."""
    try:
        text = repr(cfg)
    # Python refuses to spell a number of thousands of digits.
    except ValueError:
        text = f"a {type(cfg).__qualname__} with a number of thousands of digits"
    return text if len(text) <= 200 else text[:197] + "..."


def is_model(kind: Any) -> bool:
    """Is this a pydantic model class (pydantic itself is never imported)?"""
    return isinstance(kind, type) and hasattr(kind, "model_fields") and hasattr(kind, "model_validate")


def is_named_tuple(kind: Any) -> bool:
    """Is this a named tuple class?"""
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _encode(value: Any, where: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise ConfigTypeError(f"{where} is nested deeper than {_DEEPEST} levels, or contains itself")
    if isinstance(value, enum.Enum):
        return _encode(value.value, where, depth + 1)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ConfigTypeError(f"{where} is {value!r}, which JSON cannot hold; use None or a finite number")
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {name: _encode(v, f"{where}.{name}", depth + 1) for name, v in fields.items()}
    if is_model(type(value)):
        return _encode(value.model_dump(mode="json"), where, depth + 1)
    if callable(getattr(value, "model_dump", None)) and not isinstance(value, type):
        return _encode(value.model_dump(), where, depth + 1)
    if is_named_tuple(type(value)):
        return {name: _encode(getattr(value, name), f"{where}.{name}", depth + 1) for name in value._fields}
    if isinstance(value, (list, tuple)):
        return [_encode(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigTypeError(f"{where} has the key {key!r}, and JSON keys are strings")
        return {key: _encode(v, f"{where}[{key!r}]", depth + 1) for key, v in value.items()}
    raise ConfigTypeError(
        f"{where} is a {type(value).__qualname__}, which JSON cannot hold; "
        "use plain numbers, strings, lists and dataclasses, or pass a dumper and a loader"
    )


def decode(kind: Any, data: Any) -> Any:
    """A value of type `kind` rebuilt from JSON; a `ConfigTypeError` says what does not fit."""
    return _decode(kind, data, getattr(kind, "__qualname__", str(kind)))


def _decode(kind: Any, data: Any, where: str) -> Any:
    if kind is Any or kind is None or isinstance(kind, typing.TypeVar):
        return data
    if kind is _Unknown:
        plain = data is None or isinstance(data, (bool, int, float, str))
        return _expect(plain, data, where, "an annotation that can be read from outside; define the class in a module")
    if kind is type(None):
        return _expect(data is None, data, where, "null")
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _decode(inner[0], data, where)
    if origin is typing.Literal:
        return _expect(any(data == v and type(data) is type(v) for v in inner), data, where, f"one of {inner}")
    if origin in (typing.Union, types.UnionType):
        return _decode_union(inner, data, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        names = {f.name: f.init for f in dataclasses.fields(kind)}
        return _build(kind, {n: data[n] for n in data if names.get(n, True)} if isinstance(data, dict) else data, where)
    if is_model(kind):
        try:
            # As JSON, since a strict model takes a list for a tuple only there; by name, as it was dumped.
            return kind.model_validate_json(json.dumps(data), by_name=True, by_alias=False)
        # pydantic's ValidationError is a ValueError.
        except ValueError as error:
            raise ConfigTypeError(f"{where}: {error}") from error
    if is_named_tuple(kind):
        return _build(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        member = next((m for m in kind if _encode(m.value, where, 0) == data and _alike(m.value, data)), None)
        return _expect(member is not None, data, where, f"one of {[m.value for m in kind]}") and member
    return _decode_plain(origin or kind, inner, data, where)


def _decode_union(members: tuple[Any, ...], data: Any, where: str) -> Any:
    reasons = []
    # An exact type first: `int | float` must give 1 back as an int and 1.0 as a float.
    for member in sorted(members, key=lambda m: m is not type(data)):
        try:
            return _decode(member, data, where)
        except ConfigTypeError as error:
            reasons.append(str(error))
    raise ConfigTypeError(f"{where}: no member of the union fits ({'; '.join(reasons)})")


def _hints(kind: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    # A class defined inside a function may have annotations that name its local types: then each is read by itself.
    except NameError:
        pass
    found: dict[str, Any] = {}
    for name, annotation in {
        n: a for base in reversed(kind.__mro__) for n, a in vars(base).get("__annotations__", {}).items()
    }.items():
        probe = type("Probe", (), {"__annotations__": {name: annotation}, "__module__": kind.__module__})
        try:
            found.update(typing.get_type_hints(probe))
        except NameError:
            found[name] = _Unknown
    return found


def _build(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ConfigTypeError(f"{where} needs an object, got {describe(data)}")
    hints = _hints(kind)
    values = {name: _decode(hints.get(name, Any), value, f"{where}.{name}") for name, value in data.items()}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ConfigTypeError(f"{where}: {error}") from error


def _decode_plain(kind: Any, inner: tuple[Any, ...], data: Any, where: str) -> Any:
    if kind is tuple or (isinstance(kind, type) and issubclass(kind, tuple)):
        _expect(isinstance(data, list), data, where, "a list")
        if not inner:
            return tuple(data)
        if len(inner) == 2 and inner[1] is ...:
            return tuple(_decode(inner[0], v, f"{where}[{i}]") for i, v in enumerate(data))
        _expect(len(data) == len(inner), data, where, f"{len(inner)} items")
        return tuple(_decode(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(inner, data, strict=True)))
    if kind in (list, Sequence, set, frozenset):
        _expect(isinstance(data, list), data, where, "a list")
        items = [_decode(inner[0] if inner else Any, v, f"{where}[{i}]") for i, v in enumerate(data)]
        return items if kind in (list, Sequence) else kind(items)
    if isinstance(kind, type) and issubclass(kind, Mapping):
        _expect(isinstance(data, dict), data, where, "an object")
        value_kind = inner[1] if len(inner) == 2 else Any
        return {k: _decode(value_kind, v, f"{where}[{k!r}]") for k, v in data.items()}
    if kind is float:
        return float(_expect(isinstance(data, (int, float)) and not isinstance(data, bool), data, where, "a number"))
    if kind is int:
        return _expect(isinstance(data, int) and not isinstance(data, bool), data, where, "a whole number")
    if kind in (bool, str):
        return _expect(isinstance(data, kind), data, where, kind.__name__)
    if kind is object or not isinstance(kind, type):
        return data
    raise ConfigTypeError(f"{where}: a {kind.__qualname__} cannot be rebuilt from JSON; pass a loader")


def _alike(value: Any, data: Any) -> bool:
    # 1, 1.0 and True are equal to Python and three values to JSON.
    return not isinstance(data, (bool, int, float)) or type(value) is type(data) or isinstance(value, type(data))


class _Unknown:
    """The type of a field with an annotation that can't be read from outside its function."""


def _expect(fits: bool, data: Any, where: str, what: str) -> Any:
    if not fits:
        raise ConfigTypeError(f"{where} needs {what}, got {describe(data)}")
    return data


def has_fields(kind: Any) -> bool:
    """Is this a class with named fields?"""
    return (isinstance(kind, type) and dataclasses.is_dataclass(kind)) or is_model(kind) or is_named_tuple(kind)


# Deeper than any file that we write; far below Python's own limit.
_DEEPEST_TEXT = 100


def loads(text: str | bytes) -> Any:
    """The value of a text; NaN, Infinity, 1e999, a key that stands twice and deep nesting are a `ValueError`."""
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    # Brackets by the thousand, which no writer of ours makes.
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not is_shallow(found, _DEEPEST_TEXT):
        raise ValueError(f"it is nested deeper than {_DEEPEST_TEXT} levels")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # A key that stands twice is an error.
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return data


def _refuse(constant: str) -> Any:
    # NaN and Infinity, which Python reads although they are no JSON.
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    # One that is too large for a float, such as 1e999, is an error and not infinity.
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"{text[:20]} is too large for a number")
    return found


def is_shallow(value: Any, levels: int) -> bool:
    """Is this nested in no more than so many levels?"""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(is_shallow(item, levels - 1) for item in inner if isinstance(item, (dict, list)))
