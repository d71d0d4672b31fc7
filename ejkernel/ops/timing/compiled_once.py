"""Small programs of our own, compiled once for each form of their arguments, ahead of their use where that is known."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax

from .program import compiled_quickly

# A program of that many forms ago is compiled again.
_MOST = 128


class _Coming:
    """A program on its way: the thread that holds the lock compiles it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.program: Any = None


_lock = threading.Lock()
_known: OrderedDict[Any, _Coming] = OrderedDict()


def run(function: Callable[..., Any], device: jax.Device, arguments: tuple[Any, ...], static: Hashable = ()) -> Any:
    """Calls it with arrays of one device, and what else it depends on last; the result is under way."""
    try:
        return compiled(function, device, arguments, static)(*arguments)
    # In memory an array may lie in another way than its shape says, such as 4-bit integers on JAX 0.10.
    except ValueError as error:
        if "layout" not in str(error):
            raise
        return _jitted(function, static)(*arguments)


def compiled(
    function: Callable[..., Any], device: jax.Device, arguments: tuple[Any, ...], static: Hashable = ()
) -> Any:
    """The program for arrays, or shapes, like these; the first thread that asks compiles it, and others wait."""
    leaves, tree = jax.tree_util.tree_flatten(arguments)
    key = (function, static, device, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
    with _lock:
        coming = _known.setdefault(key, _Coming())
        _known.move_to_end(key)
        while len(_known) > _MOST:
            _known.popitem(last=False)
    with coming.lock:
        if coming.program is None:
            sharding = jax.sharding.SingleDeviceSharding(device)
            shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in leaves]
            lowered = _jitted(function, static).lower(*jax.tree_util.tree_unflatten(tree, shapes))
            coming.program = compiled_quickly(lowered)
        return coming.program


@functools.lru_cache(maxsize=_MOST)
def _jitted(function: Callable[..., Any], static: Hashable) -> Any:
    return jax.jit(lambda *given: function(*given, static))
