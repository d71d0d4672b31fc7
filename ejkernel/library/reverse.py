"""Gradients of the library: recomputed where that moves less memory, and reverse mode alone on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from ..ops.core.invocation import Cfg, Out
from ..ops.core.kernel import Kernel
from .varying import varying_like


def recomputed(forward: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """The forward function, with the gradient of the plain one computed from the arguments alone.

    What JAX would keep between the two passes are arrays as large as the argument, in float32.
    """
    return _with_gradient(forward, functools.partial(_pulled, plain))


def by_kernels(
    forward: Callable[..., Any], backward: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """The forward function, with the gradients `backward(dy, *args)`; the gradients of those are the plain one's."""
    return _with_gradient(forward, recomputed(backward, functools.partial(_pulled, plain)))


def by_kept(
    forward: Callable[..., Any], keeping: Callable[..., Any], backward: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """The forward function with gradients; a differentiated call runs `keeping(*args)`: the result, and what is kept.

    The gradients are `backward(dy, kept, *args)`.
    """
    pulled = functools.partial(_pulled, plain)

    # What is kept follows from the arguments: derivatives of the plain gradient by these say all.
    def told(dy: Any, kept: Any, *args: Any) -> Any:
        return pulled(dy, *args)

    made, pair = jax.custom_vjp(forward), jax.custom_vjp(keeping)
    back = recomputed(backward, told)
    pair.defvjp(lambda *args: (pair(*args), args), lambda args, dy: pulled(dy[0], *args))

    def first(*args: Any) -> Any:
        out, kept = pair(*args)
        return out, (kept, args)

    made.defvjp(first, lambda known, dy: back(dy, known[0], *known[1]))
    return _alike(made)


def _pulled(plain: Callable[..., Any], dy: Any, *args: Any) -> Any:
    return jax.vjp(plain, *args)[1](dy)


def _with_gradient(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    made = jax.custom_vjp(forward)
    # Not the forward function itself: gradients of gradients differentiate this rule.
    made.defvjp(lambda *args: (made(*args), args), lambda args, dy: backward(dy, *args))
    return _alike(made)


def _alike(made: Callable[..., Any]) -> Callable[..., Any]:
    def alike(*args: jax.Array) -> Any:
        # Inside shard_map, what all shards share is spread before, so that JAX itself adds up its gradients.
        return made(*(varying_like(arg, *args) for arg in args))

    return alike


class ReverseOnGpu(Kernel[Cfg, Out]):
    """Some implementations have a gradient of their own, reverse mode alone, and are what a GPU is likely to run.

    So there all of them are: what a call can do must not depend on what was tuned.
    """

    def fwd_with_residuals_gpu(self, *args: Any, cfg: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The result, and how its implementation pulls a gradient back."""
        given = [arg for arg in args if arg is not None]

        def of_arrays(*arrays: Any) -> Any:
            left = iter(arrays)
            return self.run(*(arg if arg is None else next(left) for arg in args), cfg=cfg, **kwargs)

        return jax.vjp(of_arrays, *given)

    def vjp_gpu(self, residuals: Any, y: Any, dy: Any, *args: Any, cfg: Any, **kwargs: Any) -> tuple[Any, ...]:
        """One gradient per array."""
        grads = iter(residuals(dy))
        return tuple(None if arg is None else next(grads) for arg in args)
