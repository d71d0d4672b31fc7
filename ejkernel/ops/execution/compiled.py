"""A kernel with its cfg fixed for good, as a function."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax

from ..core.kernel import Kernel
from .arguments import Taken, take

# Sets of static values that a compiled kernel keeps programs for.
_MOST = 64


class Compiled:
    """One jitted function for each set of static values; static example keywords are defaults."""

    def __init__(
        self,
        kernel: Kernel[Any, Any],
        run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        defaults: dict[str, Any],
    ) -> None:
        self._kernel = kernel
        self._run = run
        self._defaults = defaults
        self._programs: OrderedDict[Hashable, Any] = OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The kernel's result."""
        program, taken = self._program(args, kwargs)
        return program(*taken.leaves)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The lowered program of such a call, as `jax.jit(f).lower` gives it."""
        program, taken = self._program(args, kwargs)
        return program.lower(*taken.leaves)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The traced program of such a call, as `jax.jit(f).trace` gives it."""
        program, taken = self._program(args, kwargs)
        return program.trace(*taken.leaves)

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Taken]:
        taken = take(self._kernel, args, {**self._defaults, **kwargs})
        program = self._programs.get(taken.shape)
        if program is None:
            rebuild = taken.with_copied_statics()

            def call(*leaves: Any) -> Any:
                return self._run(*rebuild(leaves))

            call.__name__ = call.__qualname__ = self._kernel.op_id
            program = self._programs.setdefault(taken.shape, jax.jit(call))
            while len(self._programs) > _MOST:
                self._programs.popitem(last=False)
        return program, taken
