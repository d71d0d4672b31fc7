"""A kernel with its keywords fixed, as a function of the arrays: one look-up away from the jitted function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import invalidation
from ..timing.program import UNTRACEABLE
from .short_key import ARRAY, frames_in_force, place_of
from .table import CompiledEntry, NeedsValues

if TYPE_CHECKING:
    from ..core.kernel import Kernel
    from .executor import Executor

# Numbers of arrays, and places, that a bound function remembers its entry for.
_MOST = 32


def bound(executor: Executor[Any, Any], kernel: Kernel[Any, Any], static: dict[str, Any]) -> Callable[..., Any]:
    """The function; a call that is not of arrays alone, or that comes after a change, goes through the executor."""
    # Arrays among the keywords come behind the caller's own.
    held = tuple(value for value in static.values() if type(value) is ARRAY)
    entries: dict[Hashable, CompiledEntry] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if type(arg) is not ARRAY:
                return executor(kernel, *args, **{**static, **kwargs})
        # A policy override around a call makes it another one, as a keyword does.
        if kwargs or frames_in_force():
            return executor(kernel, *args, **{**static, **kwargs})
        leaves = (*args, *held) if held else args
        entry = entries.get((len(args), place_of(leaves)) if executor.several_kinds else len(args))
        if entry is None or entry.epoch != invalidation.epoch:
            return long_way(args)
        entry.hot = True
        try:
            return entry.fn(*leaves)
        # A new shape that cannot be measured, or traced, without its values.
        except (NeedsValues, *UNTRACEABLE):
            entry.forget_failures()
            return long_way(args)

    def long_way(args: tuple[Any, ...]) -> Any:
        def keep(entry: CompiledEntry, leaves: Sequence[Any]) -> None:
            whole = (*args, *held)
            # Arrays inside a container among the keywords have other places: then the executor takes the call apart.
            if len(leaves) != len(whole) or any(leaf is not own for leaf, own in zip(leaves, whole, strict=True)):
                return
            if len(entries) >= _MOST:
                entries.clear()
            entries[(len(args), place_of(whole)) if executor.several_kinds else len(args)] = entry

        return executor.call_anew(kernel, args, static, keep)

    call.__name__ = call.__qualname__ = kernel.op_id
    call.__doc__ = f"Kernel {kernel.op_id} with its keywords fixed, as a function of the arrays."
    return call
