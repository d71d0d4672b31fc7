"""What every candidate must compute: the kernel's own reference, compiled beside the candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from ..timing.compile_pool import Built, CompilePool
from ..timing.inputs import FlatCall
from ..timing.program import forward, stage

# The number under which it is compiled: no candidate's.
NUMBER = -1


@final
class Reference:
    """One program, since every operation of it would else be compiled alone; as it is where that cannot be."""

    def __init__(self, fn: Callable[..., Any], call: FlatCall, leaves: Sequence[Any]) -> None:
        self._staged = stage(fn, call, leaves, "forward", name="reference")
        self._run: Callable[..., Any] = forward(fn, call)
        self._pool: CompilePool | None = None
        # Is it still being compiled?
        self.is_coming = False

    def begin(self, pool: CompilePool) -> None:
        """Has it compiled, and not for speed: it runs once for each set of inputs."""
        self._pool, self.is_coming = pool, True
        pool.give(NUMBER, lambda: self._staged.build(for_speed=False))

    def arrived(self, built: Built) -> None:
        """It is there; what cannot be compiled may still run."""
        self.is_coming = False
        if not built.failed:
            self._run = built.outcome.call

    def is_there_by(self, end: float) -> bool:
        """Waits until then."""
        built = self._pool.late(NUMBER, end) if self._pool is not None and self.is_coming else None
        if built is not None:
            self.arrived(built)
        return not self.is_coming

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """What is right for these inputs."""
        return jax.block_until_ready(self._run(*leaves))
