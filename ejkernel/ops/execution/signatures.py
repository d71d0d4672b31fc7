"""A call without its arrays as JSON, and back: kernel by import path, shapes, static values, batch and mesh."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _jax
from ..core.errors import SignatureError
from ..core.invocation import Invocation
from ..core.kernel import Kernel, kernel_path
from ..core.stable import DEEPEST, mesh_form, type_name
from ..core.trace_context import TraceContext
from ..timing.transforms import on_local_devices

_OPTIONS = ("batch_axes", "method", "mesh", "in_specs", "out_specs", "check_vma")


def written(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], trace_context: TraceContext) -> dict[str, Any]:
    """The JSON of a call; a `SignatureError` names what has none."""
    around = trace_context.mesh
    return {
        "kernel": _importable(kernel),
        "state": {name: _form(value, f"attribute {name}") for name, value in vars(kernel).items()},
        "args": [_form(value, f"args[{i}]") for i, value in enumerate(inv.args)],
        "kwargs": {name: _form(value, name) for name, value in inv.kwargs.items()},
        **{name: _form(getattr(inv, name), name) for name in _OPTIONS},
        "around": {
            "mesh": None if around is None else mesh_form(around),
            "precision": trace_context.precision,
            "x64": trace_context.x64,
        },
    }


def rebuilt(data: Mapping[str, Any], platform: str) -> tuple[Any, Invocation[Any, Any], TraceContext]:
    """Kernel, call and trace context behind such JSON; imports the kernel's module."""
    try:
        return _rebuilt(data, platform)
    # The file was changed by hand, or a value has another form here.
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, SignatureError):
            raise
        raise SignatureError(f"its signature cannot be read: {error!r}") from error


def _rebuilt(data: Mapping[str, Any], platform: str) -> tuple[Any, Invocation[Any, Any], TraceContext]:
    kind = imported(data["kernel"])
    kernel = kind.__new__(kind)
    vars(kernel).update({name: _value(form, platform) for name, form in data["state"].items()})
    around = data["around"]
    mesh = None if around["mesh"] is None else _abstract_mesh(around["mesh"])
    inv: Invocation[Any, Any] = Invocation(
        kernel.op_id,
        tuple(_value(form, platform) for form in data["args"]),
        {name: _value(form, platform) for name, form in data["kwargs"].items()},
        **{name: _value(data[name], platform) for name in _OPTIONS},
    )
    return kernel, inv, TraceContext(mesh, around["precision"], bool(around["x64"]))


def imported(path: str) -> type[Kernel[Any, Any]]:
    """The kernel class behind `module:Name`; nothing else that lies there will do."""
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    # Whatever a module raises while it is imported: the call is named and left out, the others are tuned.
    except Exception as error:
        raise SignatureError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Kernel)):
        raise SignatureError(f"{path} is no kernel class")
    return found


def _importable(kernel: Kernel[Any, Any]) -> str:
    path = kernel_path(kernel)
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not type(kernel) or module == "__main__":
        raise SignatureError(f"{path} cannot be imported by another process; define the class at the top of a module")
    return path


def _form(value: Any, where: str, depth: int = 0) -> Any:
    """Plain JSON for plain values; everything else is an object with one key that says what it is."""
    if depth > DEEPEST:
        raise SignatureError(f"{where} is nested deeper than {DEEPEST} levels, or contains itself")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is tuple:
        return {"tuple": [_form(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]}
    if type(value) is list:
        return [_form(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _form(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}}
    if isinstance(value, jax.ShapeDtypeStruct):
        return {"array": [_dtype_text(value.dtype), list(value.shape), _sharding(value.sharding, where)]}
    # Three spellings of one thing, as keys see them: np.dtype("float32"), np.float32 and jnp.float32.
    if isinstance(value, (np.dtype, type(jax.numpy.float32))) or (
        isinstance(value, type) and issubclass(value, np.generic)
    ):
        return {"dtype": jax.numpy.dtype(value).name}
    if isinstance(value, PartitionSpec) and not value.unreduced and not value.reduced:
        return {"spec": [list(part) if isinstance(part, tuple) else part for part in value]}
    if isinstance(value, Mesh):
        return {"mesh": mesh_form(value)}
    raise SignatureError(
        f"{where} is a {type_name(type(value))}, which has no form in a recording; "
        "use numbers, strings, dtypes, lists, tuples and dicts of them, or tune this call where it is made"
    )


def _sharding(sharding: Any, where: str) -> Any:
    if sharding is None or isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return None
    if not isinstance(sharding, NamedSharding):
        raise SignatureError(f"{where} is sharded by a {type_name(type(sharding))}; use a NamedSharding")
    return [mesh_form(sharding.mesh), _form(sharding.spec, f"{where}.spec")]


def _dtype_text(dtype: Any) -> str:
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return f"key:{_jax.key_implementation(dtype)}"
    return str(dtype)


def _value(form: Any, platform: str) -> Any:
    if isinstance(form, list):
        return [_value(item, platform) for item in form]
    if not isinstance(form, dict):
        return form
    ((kind, data),) = form.items()
    if kind == "float":
        return float(data)
    if kind == "tuple":
        return tuple(_value(item, platform) for item in data)
    if kind == "dict":
        return {key: _value(item, platform) for key, item in data.items()}
    if kind == "array":
        return _shape(*data)
    if kind == "dtype":
        return jax.numpy.dtype(data)
    if kind == "spec":
        return PartitionSpec(*(tuple(part) if isinstance(part, list) else part for part in data))
    if kind == "mesh":
        return _mesh(data, platform)
    raise SignatureError(f"the recording has a value of the unknown kind {kind!r}")


def _shape(dtype: str, shape: list[int], sharding: Any) -> jax.ShapeDtypeStruct:
    placed = None if sharding is None else NamedSharding(_abstract_mesh(sharding[0]), _value(sharding[1], ""))
    if dtype.startswith("key:"):
        kind = jax.eval_shape(lambda: jax.random.key(0, impl=dtype.removeprefix("key:"))).dtype
    else:
        kind = jax.numpy.dtype(dtype)
    return jax.ShapeDtypeStruct(tuple(shape), kind, sharding=placed)


def _mesh(axes: list[Any], platform: str) -> Mesh:
    sizes = {name: size for name, size, _ in axes}
    made = on_local_devices(sizes, platform, _kinds(axes))
    if made is None:
        raise SignatureError(f"its mesh {sizes} needs {math.prod(sizes.values())} devices, which this process has not")
    return made


def _abstract_mesh(axes: list[Any]) -> AbstractMesh:
    return AbstractMesh(tuple(n for _, n, _ in axes), tuple(name for name, _, _ in axes), axis_types=_kinds(axes))


def _kinds(axes: list[Any]) -> tuple[AxisType, ...]:
    return tuple(AxisType[kind.capitalize()] for _, _, kind in axes)
