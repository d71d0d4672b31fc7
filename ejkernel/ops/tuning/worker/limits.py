"""Limits on the time and the memory of a worker process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import SettingError
from ...timing.cost import host_memory

# Of the memory that is free when it starts.
_MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class Isolation:
    """Limits of the process that candidates run in."""

    # The longest that one candidate may take for one turn: a check, a warm-up, a sample; five times that to compile.
    # Under a deadline also 100 times what another one needed, if that is over five seconds.
    run_seconds: float = 60.0
    # Host memory of the process; None: nine tenths of what is free when it starts.
    memory_bytes: int | None = None
    # Modules to import there, such as those that register foreign functions.
    imports: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuses what means nothing."""
        if not self.run_seconds > 0:
            raise SettingError(f"run_seconds={self.run_seconds!r} is no limit; use a positive number of seconds")
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise SettingError(f"memory_bytes={self.memory_bytes!r} is no limit; use a positive number, or None")
        if isinstance(self.imports, str):
            raise SettingError(f"imports={self.imports!r} must be a list of module names, such as [{self.imports!r}]")

    @property
    def memory_limit(self) -> float:
        """Bytes that a process which starts now may hold."""
        return self.memory_bytes or (host_memory() or math.inf) * _MEMORY_SHARE
