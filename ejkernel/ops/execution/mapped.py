"""Kernels mapped over a batch or over devices, each with the cfg of its own call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..core.kernel import Kernel
from .executor import Executor


def vmap_with_config(executor: Executor[Any, Any], kernel: Kernel[Any, Any], in_axes: Any = 0) -> Callable[..., Any]:
    """The kernel over a batch; what is tuned is the batched call. Keywords reach the kernel unmapped."""

    def mapped(*args: Any, **kwargs: Any) -> Any:
        return jax.vmap(lambda *each: executor(kernel, *each, **kwargs), in_axes=in_axes)(*args)

    return mapped


def pmap_with_config(
    executor: Executor[Any, Any], kernel: Kernel[Any, Any], in_axes: Any = 0, axis_name: str = "devices"
) -> Callable[..., Any]:
    """The kernel over this process's devices; what is tuned is one device's share. Keywords reach it unmapped."""

    def mapped(*args: Any, **kwargs: Any) -> Any:
        return jax.pmap(lambda *each: executor(kernel, *each, **kwargs), axis_name=axis_name, in_axes=in_axes)(*args)

    return mapped
