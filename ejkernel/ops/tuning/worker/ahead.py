"""In a worker: programs of the next tunings are compiled while this one is measured.

The parent sends them as it writes them down, and sends them again when their tuning begins; by then most are compiled.
Nothing of it runs on the device: where the compiler would time products there, a program is compiled without that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, final

import jax

from ... import _jax
from ...timing.compile_pool import JaxSettings
from ...timing.program import compiled_quickly, times_products

# The tuning that is measured goes first: its candidates wait for their compilers, and these programs for a later turn.
_NICER = 5
# Tunings that programs are given ahead of at most; one that was not taken by then will not be.
_TUNINGS = 4


class CompiledAhead(NamedTuple):
    """A program of flat arrays."""

    executable: Any
    # How many arrays it takes.
    arguments: int
    # False: compiled quickly.
    for_speed: bool


@final
class AheadCompiler:
    """Compiles programs on threads of its own; each is taken once."""

    def __init__(self, load: Callable[[bytes], Any]) -> None:
        # Half of the processors: the parent traces meanwhile.
        workers = max(1, (os.cpu_count() or 2) // 2)
        self._pool = ThreadPoolExecutor(workers, "ejkernel-ahead", initializer=_give_way)
        self._load = load
        self._coming: dict[bytes, Future[CompiledAhead]] = {}
        # Tunings that have begun, and how many had when a program was given.
        self._tunings = 0
        self._given: dict[bytes, int] = {}
        self._settings: JaxSettings | None = None

    def begin(self) -> None:
        """From now on programs are compiled with the settings of this thread."""
        self._settings = JaxSettings.here()

    def give(self, data: bytes) -> None:
        """Has a program compiled."""
        if self._settings is not None and data not in self._coming:
            self._coming[data] = self._pool.submit(self._compiled, data, self._settings)
            self._given[data] = self._tunings

    def take(self, data: bytes, *, for_speed: bool) -> CompiledAhead | None:
        """A program that was given, once it is there; None where it was not begun, failed, or is of another kind."""
        future = self._coming.pop(data, None)
        self._given.pop(data, None)
        # What fails is compiled again where it belongs, and says why.
        if future is None or future.cancel() or future.exception() is not None:
            return None
        found = future.result()
        return found if found.for_speed == for_speed else None

    def forget(self) -> None:
        """A tuning begins: lets go of what was given long ago and was not taken."""
        self._tunings += 1
        for data in [data for data, given in self._given.items() if self._tunings - given > _TUNINGS]:
            self._given.pop(data, None)
            future = self._coming.pop(data, None)
            if future is not None:
                future.cancel()

    def _compiled(self, data: bytes, settings: JaxSettings) -> CompiledAhead:
        with settings.entered():
            return self.compiled(data)

    def compiled(self, data: bytes, *, for_speed: bool | None = None) -> CompiledAhead:
        """Compiles a program on this thread; None: for speed, unless the compiler would run its products."""
        with _jax.clean_room():
            exported = self._load(data)

            def program(*leaves: Any) -> Any:
                return exported.call(*leaves)

            # A profiler's trace knows programs by their names.
            program.__name__ = program.__qualname__ = f"ejk_{secrets.token_hex(4)}_flat"
            shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
            lowered = jax.jit(program).trace(*shapes).lower()
            if for_speed is None:
                for_speed = not times_products(lowered.as_text())
            executable = lowered.compile() if for_speed else compiled_quickly(lowered)
            return CompiledAhead(executable, len(shapes), for_speed)


def _give_way() -> None:
    """Has this thread go behind those of the tuning at work; elsewhere than on Linux threads have no such number."""
    with contextlib.suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
