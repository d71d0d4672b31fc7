"""Kernels mapped over a batch or over devices, each with the cfg of its own call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax

from ..core.kernel import Kernel
from ..core.stable import is_array
from .executor import Executor
from .static_values import as_it_is_now, value_key

# Sets of keywords that a mapped kernel keeps programs for.
_MOST = 64


def vmap_with_config(executor: Executor[Any, Any], kernel: Kernel[Any, Any], in_axes: Any = 0) -> Callable[..., Any]:
    """The kernel over a batch; what is tuned is the batched call. Keywords reach the kernel unmapped."""

    def mapped(*args: Any, **kwargs: Any) -> Any:
        return jax.vmap(lambda *each: executor(kernel, *each, **kwargs), in_axes=in_axes)(*args)

    return mapped


def pmap_with_config(
    executor: Executor[Any, Any], kernel: Kernel[Any, Any], in_axes: Any = 0, axis_name: str = "devices"
) -> Callable[..., Any]:
    """The kernel over this process's devices; what is tuned is one device's share. Keywords reach it unmapped."""

    # One pmap for each set of keywords: a new one would compile again.
    made: OrderedDict[Hashable, Any] = OrderedDict()

    def mapped(*args: Any, **kwargs: Any) -> Any:
        arrays = {name: value for name, value in kwargs.items() if is_array(value)}
        static = {name: value for name, value in kwargs.items() if name not in arrays}
        key = (len(args), tuple(arrays), tuple((name, value_key(value)) for name, value in static.items()))
        function = made.get(key)
        if function is None:
            kept = {name: as_it_is_now(value) for name, value in static.items()}

            def each(*parts: Any) -> Any:
                by_keyword = dict(zip(arrays, parts[len(args) :], strict=True))
                return executor(kernel, *parts[: len(args)], **by_keyword, **kept)

            axes = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
            function = jax.pmap(each, axis_name=axis_name, in_axes=(*axes, *(None for _ in arrays)))
            made[key] = function
            while len(made) > _MOST:
                made.popitem(last=False)
        return function(*args, *arrays.values())

    return mapped
