"""Examples of a vmap as a larger batch, for calls that have no rule of their own or a narrow one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def folded(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function of arrays that all begin with the batch, as its result does; None stands for an array not given.

    Under a vmap its examples are a larger batch. It is not for differentiation: give it a gradient from outside.
    """
    computed = jax.custom_batching.custom_vmap(fn)

    @computed.def_vmap
    def rule(size: int, batched: Any, *arrays: Any) -> tuple[jax.Array, bool]:
        whole = [spread(x, has, size) for x, has in zip(arrays, batched, strict=True)]
        out = computed(*(merged(x) for x in whole))
        return out.reshape(size, -1, *out.shape[1:]), True

    return computed


def spread(x: Any, has: Any, size: int) -> Any:
    """An array of all examples."""
    return x if x is None or has else jnp.broadcast_to(x, (size, *x.shape))


def merged(x: Any) -> Any:
    """The array with its first two axes made one; None stays None."""
    return x if x is None else x.reshape(-1, *x.shape[2:])
