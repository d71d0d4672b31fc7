"""Builders make programs of traced candidates: what every builder does, and the one that compiles in this process."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, final

from ..timing.compiler_timing import compiler_timing
from ..timing.program import CompiledProgram, Staged


class ProgramBuilder(Protocol):
    """Makes programs."""

    def ready_made(self, cfg: Any, name: str, until: float) -> Staged | None:
        """A candidate that needs no tracing here, where there is one by then."""

    def traced(self, staged: Staged, cfg: Any) -> Staged:
        """Does the part that belongs on the thread that traced it; raises what becomes the candidate's outcome."""

    def lower(self, staged: Staged) -> tuple[Any, str]:
        """The lowered program, and a text that is equal for equal programs."""

    def compiler_timing(self, staged: Staged, lowered: Any) -> str:
        """A name for what compiling it for a GPU runs there, equal where the same is; empty where nothing is."""

    def await_parts(self, staged: Staged) -> None:
        """Waits for what another process makes for `build`, before that: meanwhile the candidate is not at work."""

    def build(self, staged: Staged, lowered: Any, *, for_speed: bool = True) -> CompiledProgram:
        """The program, on any thread; `lowered` is None for what runs as it is."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Holds back programs of later tunings, inside a `with` block, while candidates wait for their compilers."""

    @property
    def one_by_one(self) -> bool:
        """Is one to be made at a time?"""

    @property
    def is_instant(self) -> bool:
        """Does `build` take no time, so that no other thread need do it?"""


@final
@dataclass(frozen=True)
class LocalBuilder:
    """Programs of this process."""

    one_by_one: bool = False
    is_instant: bool = False

    def ready_made(self, cfg: Any, name: str, until: float) -> Staged | None:
        """Gives None: every candidate is traced in this process."""
        return None

    def traced(self, staged: Staged, cfg: Any) -> Staged:
        """Gives the traced candidate back unchanged."""
        return staged

    def lower(self, staged: Staged) -> tuple[Any, str]:
        """Lowers the candidate by JAX."""
        return staged.lower()

    def compiler_timing(self, staged: Staged, lowered: Any) -> str:
        """The name that the lowered program's text gives."""
        return compiler_timing(lowered.as_text())

    def await_parts(self, staged: Staged) -> None:
        """Returns at once: no other process makes parts of the program."""

    def build(self, staged: Staged, lowered: Any, *, for_speed: bool = True) -> CompiledProgram:
        """Compiles the lowered program, or makes one that runs as it is."""
        return staged.build() if lowered is None else staged.compile(lowered, for_speed=for_speed)

    def undisturbed(self) -> AbstractContextManager[None]:
        """Holds nothing back: nothing is compiled for later tunings in this process."""
        return contextlib.nullcontext()
