"""A user's function and its arguments as a program of arrays alone, whatever framework they come from.

Arrays are traced wherever they lie in pytrees, those of the function itself included: modules, optimizer states,
functions that carry weights. Everything else is a constant. No framework is known here by name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import jax

from ..core.errors import ProgramArgumentError
from ..timing.inputs import FlatCall, flatten_call


def flatten_program(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatCall:
    """The call taken apart; its first argument is the function, which may hold arrays as well."""
    fn, args, kwargs = unbound(fn, args, kwargs)
    _refuse_what_contains_itself((fn, *args, kwargs))
    return flatten_call((fn, *args), kwargs)


def of_arrays(call: FlatCall) -> Callable[..., tuple[Any, ...]]:
    """The program as a function of its arrays: it gives the arrays that are returned, and those that are changed.

    What it returns besides arrays, such as a module's activation function, JAX would refuse. What it leaves in an
    argument is an output as well: the compiler would else drop an update that is assigned and not returned.
    """

    def run(*leaves: Any) -> tuple[Any, ...]:
        (fn, *args), kwargs = call.rebuild(leaves)
        out = fn(*args, **kwargs)
        given = set(map(id, leaves))
        changed = [leaf for leaf in flatten_call((fn, *args), kwargs).leaves if id(leaf) not in given]
        return tuple(leaf for leaf in (*jax.tree_util.tree_leaves(out), *changed) if isinstance(leaf, jax.Array))

    return run


def trace(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> jax.stages.Traced:
    """Traces a function without running it; what it donates is not used up."""
    inner, all_args, all_kwargs = unbound(fn, args, kwargs)
    # A jitted function knows which of its arguments are static, and how its framework takes modules apart.
    if callable(getattr(inner, "trace", None)) and callable(getattr(inner, "lower", None)):
        traced = _jax_traced(inner.trace(*all_args, **all_kwargs))  # type: ignore[attr-defined]
        if traced is not None:
            return traced
    call = flatten_program(fn, args, kwargs)
    return jax.jit(of_arrays(call)).trace(*call.leaves)


def unbound(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A call with nothing bound: the object of a method and the arguments of a partial are arguments."""
    inner: Any = fn
    args, kwargs = tuple(args), dict(kwargs)
    while True:
        if inspect.ismethod(inner):
            inner, args = inner.__func__, (inner.__self__, *args)
        # A subclass may call its function in another way.
        elif type(inner) is functools.partial:
            inner, args, kwargs = inner.func, (*inner.args, *args), {**inner.keywords, **kwargs}
        else:
            return inner, args, kwargs


def holds_arrays(value: Any) -> bool:
    """Does an object that is no pytree hold arrays, in its attributes or in what is inside them?"""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, jax.Array):
            return True
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        waiting += getattr(one, "__dict__", {}).values() if _is_leaf(one) else _children(one)
    return False


def _refuse_what_contains_itself(value: Any, around: tuple[Any, ...] = ()) -> None:
    """Raises: JAX's own flattening would not, and leaves the interpreter at the end of its stack for good."""
    if _is_leaf(value):
        return
    if any(one is value for one in around):
        raise ProgramArgumentError(
            f"a {type(value).__name__} among the arguments contains itself, and is no tree of arrays; "
            "give the function that its framework jits"
        )
    for child in _children(value):
        _refuse_what_contains_itself(child, (*around, value))


def _is_leaf(value: Any) -> bool:
    return jax.tree_util.all_leaves([value])


def _children(node: Any) -> list[Any]:
    """The nodes one level inside a pytree."""
    # The node itself is asked for first.
    asked = itertools.count()
    return jax.tree_util.tree_leaves(node, is_leaf=lambda _: next(asked) > 0)


def _jax_traced(found: Any) -> jax.stages.Traced | None:
    """JAX's own traced program, also where a framework's object is around it."""
    if isinstance(found, jax.stages.Traced):
        return found
    parts = [getattr(found, field.name) for field in dataclasses.fields(found)] if _is_dataclass(found) else []
    return next((part for part in parts if isinstance(part, jax.stages.Traced)), None)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
