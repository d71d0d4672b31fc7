"""Calls rebuilt from what a store keeps of them: the kernel's path and the named parts of the key."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from ..core.device import default_device
from ..core.errors import SignatureError
from ..core.invocation import Invocation
from ..core.kernel import versioned
from ..core.key import Key
from ..core.record import Record
from ..core.trace_context import TraceContext
from ..execution.recording import call_key_of
from ..execution.signatures import imported
from .found_call import FoundCall

_ARRAY = re.compile(r"([a-z][a-z0-9_]*)\[([\d,]*)\]")
_CONTAINER = re.compile(r"(tuple|list|dict) of (\d+)")


def rebuilt_call(key: Key, record: Record, selector: Any) -> FoundCall:
    """The call behind a stored entry; a `SignatureError` says why it cannot be made again.

    Imports the kernel's module. The call must come out with the key that it is kept under.
    """
    if not record.kernel:
        raise SignatureError(
            "its record does not name the kernel, or is another user's, of which nothing is imported; name the program "
            "or a recording with --calls"
        )
    parts = {name[5:]: text for name, text in record.key.items() if name.startswith("call.")}
    if not parts:
        raise SignatureError("its record does not describe the call")
    kind = imported(record.kernel)
    try:
        kernel = kind()
    # Whatever the constructor raises: it needs what a store does not know.
    except Exception as error:
        raise SignatureError(f"{record.kernel} cannot be made without arguments: {error}") from error
    if versioned(kernel) != key.op_id:
        raise SignatureError(f"the kernel is {versioned(kernel)} now, and the entry is of {key.op_id}")
    inv = _invocation(kernel.op_id, parts)
    trace_context = TraceContext(None, parts.get("matmul_precision"), bool(_jax.setting("jax_enable_x64")))
    with trace_context.entered():
        found = call_key_of(kernel, inv)
    if found != key.call_key:
        raise SignatureError(f"made again it has another key, {found}; it was called with more than its parts show")
    return FoundCall(key, kernel, inv, (selector,), default_device(), trace_context)


def _invocation(op_id: str, parts: Mapping[str, str]) -> Invocation[Any, Any]:
    positions = [name for name in parts if re.fullmatch(r"args\[\d+\]", name)]
    args = tuple(_value(f"args[{place}]", parts) for place in range(len(positions)))
    kwargs = {}
    for name in parts:
        keyword = re.fullmatch(r"kwargs\['(\w+)'\]", name)
        if keyword is not None:
            kwargs[keyword[1]] = _value(name, parts)
    if any(name in parts for name in ("mesh", "in_specs", "out_specs")):
        raise SignatureError("it runs on a mesh, which a store does not describe")
    options = {name: _plain(json.loads(parts[name]), name) for name in ("batch_axes", "method") if name in parts}
    return Invocation(op_id, args, kwargs, **options)


def _value(name: str, parts: Mapping[str, str]) -> Any:
    text = parts[name]
    container = _CONTAINER.fullmatch(text)
    if container is not None and container[1] != "dict":
        items = [_value(f"{name}[{place}]", parts) for place in range(int(container[2]))]
        return tuple(items) if container[1] == "tuple" else items
    if container is not None:
        inner = [re.fullmatch(re.escape(name) + r"\['([^']*)'\]", other) for other in parts]
        return {found[1]: _value(found[0], parts) for found in inner if found is not None}
    array = _ARRAY.fullmatch(text)
    if array is not None:
        shape = tuple(int(size) for size in array[2].split(",") if size)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(array[1]))
    try:
        return _plain(json.loads(text), name)
    # A sharded array, or another form that only the program itself can make; or a text that a hand wrote.
    except (ValueError, OverflowError, RecursionError) as error:
        raise SignatureError(f"{name} is {text[:200]}, which cannot be made again from its name") from error


def _plain(form: Any, name: str) -> Any:
    match form:
        case None | bool() | str():
            return form
        case ["int", str(digits)]:
            return int(digits)
        case ["float", str(digits)]:
            return float("nan") if digits == "nan" else float.fromhex(digits)
        case ["dtype", str(dtype)]:
            return jnp.dtype(dtype)
        case ["builtins.tuple", list(items)]:
            return tuple(_plain(item, name) for item in items)
        case ["builtins.list", list(items)]:
            return [_plain(item, name) for item in items]
        case ["function", str(path)]:
            return _function(path, name)
    raise SignatureError(f"{name} is {json.dumps(form)}, which cannot be made again from its name")


def _function(path: str, name: str) -> Any:
    module, found = path, None
    while "." in module and found is None:
        module = module.rpartition(".")[0]
        try:
            rest = path[len(module) + 1 :].split(".")
            found = functools.reduce(getattr, rest, importlib.import_module(module))
        # The rest of the path is a class or a function of a module further up.
        except (ImportError, AttributeError):
            continue
    if not callable(found):
        raise SignatureError(f"{name} is the function {path}, which cannot be found by its name")
    return found
