"""A kernel's own gradient as one differentiable function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import _jax
from .errors import GradientError
from .stable import dtype_name, is_array


def positional(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The call with keywords of positional parameters in their places, as far as they follow without a gap."""
    args, kwargs = list(args), dict(kwargs)
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters[len(args) :]:
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or parameter.name == "cfg":
            break
        if parameter.name in kwargs:
            args.append(kwargs.pop(parameter.name))
        elif parameter.default is not inspect.Parameter.empty and any(
            later.name in kwargs and later.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for later in parameters
        ):
            args.append(parameter.default)
        else:
            break
    return tuple(args), kwargs


def names_of(function: Callable[..., Any], count: int) -> list[str]:
    """Names of a function's first positional arguments."""
    names = [p.name for p in inspect.signature(function).parameters.values()][:count]
    return names + [f"argument {i}" for i in range(len(names), count)]


def own_gradient(
    kernel: str, run: Callable[..., Any], fwd: Callable[..., Any], vjp: Callable[..., Any], cfg: Any
) -> Callable[..., Any]:
    """`run` with its cfg, differentiated by the kernel's own `vjp`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = positional(run, args, kwargs)
        flat, tree = jax.tree_util.tree_flatten((args, kwargs))
        arrays = [i for i, leaf in enumerate(flat) if is_array(leaf)]
        count = len([leaf for leaf in jax.tree_util.tree_leaves(args) if is_array(leaf)])
        constants = [None if is_array(leaf) else leaf for leaf in flat]

        def rebuild(leaves: Sequence[Any]) -> tuple[Any, Any]:
            whole = list(constants)
            for place, leaf in zip(arrays, leaves, strict=True):
                # JAX passes a Python number that is differentiated on as it is.
                whole[place] = leaf if is_array(leaf) else jax.numpy.asarray(leaf)
            return jax.tree_util.tree_unflatten(tree, whole)  # type: ignore[no-any-return]

        @jax.custom_vjp
        def function(*leaves: Any) -> Any:
            inner, keywords = rebuild(leaves)
            return run(*inner, cfg=cfg, **keywords)

        # The residuals without their arrays: JAX carries only arrays from forward to backward.
        aside: list[Any] = []

        def forward(*leaves: Any) -> Any:
            inner, keywords = rebuild(leaves)
            made = fwd(*inner, cfg=cfg, **keywords)
            if not isinstance(made, tuple) or len(made) != 2:
                raise GradientError(f"fwd_with_residuals of kernel {kernel} must return (out, residuals), got {made!r}")
            out, residuals = made
            kept, residual_tree = jax.tree_util.tree_flatten(residuals)
            aside[:] = [residual_tree, [None if is_array(leaf) else leaf for leaf in kept]]
            return out, ([leaf for leaf in kept if is_array(leaf)], out, leaves)

        def backward(saved: Any, cotangent: Any) -> Any:
            kept, out, leaves = saved
            residual_tree, others = aside
            remaining = iter(kept)
            filled = [next(remaining) if leaf is None else leaf for leaf in others]
            residuals = jax.tree_util.tree_unflatten(residual_tree, filled)
            inner, keywords = rebuild(leaves)
            grads = vjp(residuals, out, cotangent, *inner, cfg=cfg, **keywords)
            return (*_checked(kernel, names_of(run, len(inner)), grads, inner), *map(_no_gradient, leaves[count:]))

        function.defvjp(forward, backward)
        leaves = _equally_varying([flat[i] for i in arrays])
        names = _keyword_names(kwargs)
        guarded = [_jax.reverse_only(leaf, functools.partial(forward_mode_error, kernel)) for leaf in leaves[:count]]
        guarded += [_jax.constant(leaf, _by_keyword(kernel, n)) for leaf, n in zip(leaves[count:], names, strict=True)]
        return function(*guarded)

    return call


def _equally_varying(leaves: list[Any]) -> list[Any]:
    # Inside shard_map JAX checks that a gradient varies over the same mesh axes as its argument; a kernel's vjp mixes
    # its arguments, so all of them vary over every axis that one of them does. JAX sums the gradients back.
    every = frozenset[str]().union(*map(_jax.varying_axes, leaves))
    if not every:
        return leaves
    return [_vary(leaf, every - _jax.varying_axes(leaf)) for leaf in leaves]


def _vary(leaf: Any, axes: frozenset[str]) -> Any:
    return jax.lax.pcast(leaf, tuple(sorted(axes)), to="varying") if axes else leaf


def forward_mode_error(kernel: str) -> GradientError:
    """The error for forward mode of an own gradient."""
    return GradientError(
        f"kernel {kernel} has its own gradient, which is reverse mode only (grad, vjp); forward mode (jvp, jacfwd, "
        "linearize) of it cannot be had: use jacrev, or call the kernel's run directly"
    )


def _by_keyword(kernel: str, name: str) -> Callable[[], Exception]:
    return lambda: GradientError(
        f"kernel {kernel} has its own gradient, which covers positional arguments alone, and {name}, given by keyword, "
        "is being differentiated: pass it by position, or stop its gradient"
    )


def _keyword_names(kwargs: Mapping[str, Any]) -> list[str]:
    # In the order of the arrays, which is that of the sorted keywords.
    return [name for name in sorted(kwargs) for leaf in jax.tree_util.tree_leaves(kwargs[name]) if is_array(leaf)]


def _no_gradient(leaf: Any) -> Any:
    """The zero gradient that JAX wants for this array: None for integers, since their shape may be a symbol."""
    return jax.numpy.zeros_like(leaf) if jax.numpy.issubdtype(jax.numpy.result_type(leaf), np.inexact) else None


def _checked(kernel: str, names: Sequence[str], grads: Any, args: Sequence[Any]) -> list[Any]:
    """One gradient for each array among the positional arguments."""
    # A vjp may answer for parameters that this call left at their defaults: those have no gradient.
    if isinstance(grads, (tuple, list)) and all(grad is None for grad in grads[len(args) :]):
        grads = grads[: len(args)]
    if not isinstance(grads, (tuple, list)) or len(grads) != len(args):
        got = f"{len(grads)} values" if isinstance(grads, (tuple, list)) else f"a {type(grads).__qualname__}"
        raise GradientError(
            f"vjp of kernel {kernel} must return a tuple of {len(args)} gradients, one for each of "
            f"{', '.join(names)} (None where there is none); got {got}"
        )
    found: list[Any] = []
    for name, grad, arg in zip(names, grads, args, strict=True):
        found += _of_argument(kernel, name, grad, arg)
    return found


def _of_argument(kernel: str, name: str, grad: Any, arg: Any) -> list[Any]:
    found: list[Any] = []

    # None in a gradient stands for everything that the argument has there.
    def add(part: Any, there: Any) -> None:
        if part is None:
            found.extend(_no_gradient(leaf) for leaf in jax.tree_util.tree_leaves(there) if is_array(leaf))
        elif is_array(there):
            found.append(_of_leaf(kernel, name, part, there))
        elif not jax.tree_util.all_leaves([there]):
            raise ValueError("a gradient without structure for an argument that has one")

    try:
        jax.tree_util.tree_map(add, grad, arg, is_leaf=lambda part: part is None)
    except GradientError:
        raise
    # JAX raises these where one tree is no prefix of the other.
    except (ValueError, TypeError) as error:
        shape, wanted = jax.tree_util.tree_structure(grad), jax.tree_util.tree_structure(arg)
        raise GradientError(
            f"vjp of kernel {kernel} returned a gradient for {name} of structure {shape}, not {wanted}"
        ) from error
    return found


def _of_leaf(kernel: str, name: str, part: Any, leaf: Any) -> Any:
    if part is None or not jax.numpy.issubdtype(leaf.dtype, np.inexact):
        return _no_gradient(leaf)
    if np.shape(part) != np.shape(leaf) or jax.dtypes.result_type(part) != leaf.dtype:
        raise GradientError(
            f"vjp of kernel {kernel} returned a gradient for {name} of "
            f"{dtype_name(jax.dtypes.result_type(part))}{list(np.shape(part))}; "
            f"the argument is {dtype_name(leaf.dtype)}{list(np.shape(leaf))}"
        )
    return part
