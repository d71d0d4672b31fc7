"""Stable forms of static values: the same text in every process, on every machine, under every hash seed."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import re
import types
from collections import defaultdict
from collections.abc import Mapping, Set
from typing import Any

import jax
import numpy as np

from .. import _jax
from . import codec
from .errors import KeyPartError

# Deeper than any real argument; a container that holds itself ends here.
DEEPEST = 64


def short_hash(text: str, length: int = 16) -> str:
    """The first hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:length]


def stable_json(value: Any) -> str:
    """Any supported value as canonical JSON text: equal values give equal text everywhere."""
    return json.dumps(form(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def to_json(value: Any) -> str:
    """A cfg, or any value that is made of fields, as JSON text."""
    return json.dumps(codec.encode(value), sort_keys=True, allow_nan=False)


def from_json(text: str, kind: Any = None) -> Any:
    """The value behind `to_json`'s text, rebuilt as `kind` where that is given."""
    data = json.loads(text)
    return data if kind is None else codec.decode(kind, data)


def form(value: Any, name: str = "value", depth: int = 0) -> Any:
    """A JSON value that tells this static value, and its type, from every other."""
    if depth > DEEPEST:
        raise KeyPartError(f"{name} is nested deeper than {DEEPEST} levels, or contains itself")
    # Enums first: an IntEnum is an int as well.
    if isinstance(value, enum.Enum):
        return ["enum", type_name(type(value)), value.name or repr(value.value)]
    if value is None or value is Ellipsis or type(value) in (bool, str):
        return value if value is not Ellipsis else ["..."]
    if type(value) is int:
        return ["int", str(value)]
    if type(value) is float:
        return ["float", "nan" if math.isnan(value) else value.hex()]
    if type(value) is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__, bytes(value).hex()]

    def inner(part: Any, label: str) -> Any:
        return form(part, f"{name}{label}", depth + 1)

    if is_array(value):
        return ["array", array_form(value, name)]
    for known in (_dtype, _sharding, _structure, _container, _fields, _callable):
        found = known(value, inner)
        if found is not None:
            return found
    raise KeyPartError(
        f"{name} is a {type_name(type(value))}, which has no stable form to make a key of; pass it as an array, "
        "a number, a string, an enum, a function, a dataclass, or give the kernel a key_builder"
    )


def type_name(kind: Any) -> str:
    """Module and qualified name of a class or function."""
    module = getattr(kind, "__module__", None) or ""
    module = _jax.public_module(module)
    name = getattr(kind, "__qualname__", None) or getattr(kind, "__name__", None) or ""
    return f"{module}.{name}"


_NO_ARRAYS = frozenset((int, float, bool, str, complex, type(None), types.FunctionType))


def is_array(value: Any) -> bool:
    """Is this an array, which a key knows by shape and dtype alone?"""
    # JAX's own check of `jax.Array` is made in Python, and most values need none.
    kind = type(value)
    if kind is _jax.ArrayImpl:
        return True
    return kind not in _NO_ARRAYS and isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


@functools.cache
def dtype_name(dtype: Any) -> str:
    """A dtype's one spelling, JAX's own extended ones included."""
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def array_form(value: Any, name: str = "value") -> str:
    """`float32[8,128]`, and the mesh and spec where the array's type shows them."""
    # Not jax.typeof for shapes without an array: newer versions warn there when they cut 64 bits to 32.
    if isinstance(value, jax.ShapeDtypeStruct):
        dtype, shape, sharding = jax_dtype(value.dtype), value.shape, value.sharding
    else:
        try:
            seen = jax.typeof(value)
        except TypeError as error:
            raise KeyPartError(f"{name} is an array that JAX does not know: {error}") from error
        dtype, shape, sharding = seen.dtype, seen.shape, seen.sharding
    text = f"{dtype_name(dtype)}[{','.join(map(str, shape))}]"
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return text
    if isinstance(value, jax.ShapeDtypeStruct):
        spec = _explicit_part(sharding.spec, mesh, len(shape))
    else:
        spec = tuple(sharding.spec)
    return f"{text}@{json.dumps(mesh_form(mesh), separators=(',', ':'))}{_spec_text(spec)}"


def jax_dtype(dtype: Any) -> Any:
    """The dtype that JAX would use for this one under the current x64 setting."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return dtype
    return jax.typeof(np.zeros((), dtype)).dtype


def mesh_form(mesh: Any) -> list[Any]:
    """Axis names, sizes and types; never the devices."""
    kinds = [str(kind).rsplit(".", maxsplit=1)[-1].lower() for kind in mesh.axis_types]
    names = [_jax.axis_text(name) for name in mesh.shape]
    return [[name, int(size), kind] for name, size, kind in zip(names, mesh.shape.values(), kinds, strict=True)]


def _explicit_part(spec: Any, mesh: Any, rank: int) -> tuple[Any, ...]:
    # An array's type shows only the axes that are sharded explicitly; a shape with a sharding must give the same.
    explicit = {n for n, k in zip(mesh.axis_names, mesh.axis_types, strict=True) if k == jax.sharding.AxisType.Explicit}

    def keep(entry: Any) -> Any:
        if isinstance(entry, tuple):
            kept = tuple(n for n in entry if n in explicit)
            return kept if len(kept) > 1 else (kept[0] if kept else None)
        return entry if entry in explicit else None

    entries = [keep(e) for e in spec]
    return tuple(entries + [None] * (rank - len(entries)))


def _spec_text(spec: Any) -> str:
    return "P(" + ",".join("+".join(e) if isinstance(e, tuple) else str(e) for e in spec) + ")"


def _dtype(value: Any, inner: Any) -> Any:
    # A class of the user's own may have a `type` that is anything, such as a property.
    scalar = getattr(value, "type", None)
    extended = isinstance(scalar, type) and jax.numpy.issubdtype(scalar, jax.dtypes.extended)
    if isinstance(value, np.dtype) or extended:
        return ["dtype", dtype_name(value)]
    if isinstance(value, type) and issubclass(value, np.generic):
        return ["dtype", np.dtype(value).name]
    # jnp.float32 and its siblings: callables that know their dtype.
    if callable(value) and isinstance(getattr(value, "dtype", None), np.dtype):
        return ["dtype", value.dtype.name]
    return None


def _sharding(value: Any, inner: Any) -> Any:
    if isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        return ["mesh", mesh_form(value)]
    if isinstance(value, jax.sharding.PartitionSpec):
        parts = [list(e) if isinstance(e, tuple) else (None if e is None else str(e)) for e in value]
        return ["spec", parts, sorted(value.unreduced), sorted(value.reduced)]
    if isinstance(value, jax.sharding.NamedSharding):
        return ["sharding", mesh_form(value.mesh), inner(value.spec, ".spec"), value.memory_kind]
    if isinstance(value, jax.sharding.SingleDeviceSharding):
        return ["sharding", "one device", value.memory_kind]
    if isinstance(value, jax.Device):
        return ["device", value.platform, value.device_kind]
    return None


def _structure(value: Any, inner: Any) -> Any:
    # A tree without its leaves: a static value of frameworks that take models apart.
    if not isinstance(value, jax.tree_util.PyTreeDef):
        return None
    data = value.node_data()
    if data is None:
        return ["structure", "leaf"]
    kind, constant = data
    children = [inner(child, f" child {i}") for i, child in enumerate(value.children())]
    return ["structure", type_name(kind), inner(constant, " (constant data)"), children]


def _container(value: Any, inner: Any) -> Any:
    if isinstance(value, Mapping):
        items = [[inner(k, f" key {k!r}"), inner(v, f"[{k!r}]")] for k, v in value.items()]
        # JAX sorts the keys of these two, so their order is not part of the call; any other mapping keeps it.
        ordered = sorted(items, key=json.dumps) if type(value) in (dict, defaultdict) else items
        return [type_name(type(value)), ordered]
    if isinstance(value, (list, tuple)):
        return [type_name(type(value)), [inner(v, f"[{i}]") for i, v in enumerate(value)]]
    if isinstance(value, Set):
        return [type_name(type(value)), sorted((inner(v, " item") for v in value), key=json.dumps)]
    if isinstance(value, slice):
        return ["slice", [inner(v, " bound") for v in (value.start, value.stop, value.step)]]
    if isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    if isinstance(value, re.Pattern):
        return ["pattern", inner(value.pattern, ".pattern"), value.flags]
    return None


def _fields(value: Any, inner: Any) -> Any:
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
    elif codec.is_model(type(value)):
        names = sorted(type(value).model_fields)
        names += sorted(getattr(value, "model_extra", None) or {})
    else:
        return _node(value, inner)
    return ["fields", type_name(type(value)), {n: inner(getattr(value, n), f".{n}") for n in names}]


def _node(value: Any, inner: Any) -> Any:
    # A class that its author registered with JAX: its children and its own constant data.
    flat = jax.tree_util.default_registry.flatten_one_level(value)
    if flat is None:
        return None
    children, constant = flat
    return [
        *("node", type_name(type(value))),
        [inner(child, f"[{i}]") for i, child in enumerate(children)],
        inner(constant, " (constant data)"),
    ]


def _callable(value: Any, inner: Any) -> Any:
    if isinstance(value, type):
        return ["type", type_name(value)]
    if isinstance(value, functools.partial):
        return ["partial", inner(value.func, ".func"), inner(value.args, ".args"), inner(value.keywords, ".keywords")]
    if not callable(value):
        return None
    if isinstance(value, types.MethodType):
        return ["function", type_name(value.__func__)]
    if getattr(value, "__qualname__", None) or getattr(value, "__name__", None):
        return ["function", type_name(value)]
    # An object with a __call__: its state decides what it computes.
    return ["callable", type_name(type(value)), inner(dict(getattr(value, "__dict__", {})), " state")]
