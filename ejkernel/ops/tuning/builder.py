"""From a traced candidate to a program: what every builder does, and the one that compiles in this process."""

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
        """While candidates wait for their compilers: what is compiled for later tunings waits."""

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
        """None is."""
        return None

    def traced(self, staged: Staged, cfg: Any) -> Staged:
        """As it is."""
        return staged

    def lower(self, staged: Staged) -> tuple[Any, str]:
        """Lowered by JAX."""
        return staged.lower()

    def compiler_timing(self, staged: Staged, lowered: Any) -> str:
        """By its text."""
        return compiler_timing(lowered.as_text())

    def await_parts(self, staged: Staged) -> None:
        """There are none."""

    def build(self, staged: Staged, lowered: Any, *, for_speed: bool = True) -> CompiledProgram:
        """Compiled, or as it is."""
        return staged.build() if lowered is None else staged.compile(lowered, for_speed=for_speed)

    def undisturbed(self) -> AbstractContextManager[None]:
        """Nothing is compiled for later tunings here."""
        return contextlib.nullcontext()
