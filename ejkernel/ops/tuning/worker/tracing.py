"""Programs that other processes trace and compile: a process traces one at a time, and so it compiles Mosaic kernels.

A tuning that exports its candidates asks here for programs that are already traced, or are being traced, elsewhere.
What is not there is traced as ever. The first candidate is always traced here, and elsewhere too: only where both give
the same program are the others believed, so that a difference between processes costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

from ...core.errors import IsolationError
from ...core.record import Objective
from ...timing.program import Staged
from .delivered import Delivery
from .export import PortableProgram


class TracerGone(IsolationError):
    """A candidate that took the process down that traced it."""


class StillTracing(Exception):
    """A program that was not there in time."""


@dataclass(frozen=True)
class TracedElsewhere:
    """A program that another process traced and exported."""

    data: bytes
    text: str
    outputs: int
    objective: Objective
    # The structure of the outputs, as text: a structure itself does not travel.
    structure: str
    # Shapes and dtypes of the arrays beside the call's; None for a number.
    extra: Sequence[tuple[str, tuple[int, ...]] | None] = ()
    notes: str = ""
    compiler_timing: str = ""


class TracingCall(Protocol):
    """The candidates of one call, traced by other processes."""

    def peek(self, cfg: Any, until: float) -> TracedElsewhere | None:
        """The program of a candidate, if a process has traced it by now, or one of many will by this time."""

    def take(self, cfg: Any) -> None:
        """Takes a candidate away from the other processes: this one traces it."""

    def program(self, cfg: Any, until: float) -> TracedElsewhere | None:
        """The program of a candidate, waited for where a process is tracing it; None: it is to be traced here.

        Raises `TracerGone` where it took a process down, and `StillTracing` where it is not there in time.
        """

    def executable(self, data: bytes, *, quickly: bool) -> Future[Delivery] | None:
        """The executable of an exported program, once a process has compiled it; None where no process will.

        `quickly`: since for speed the compiler would run parts of it on the device.
        """

    def stop_tracing(self) -> None:
        """Says that no more candidates are needed: those that no process has begun with are not traced."""

    def let_go(self) -> None:
        """Says that nothing of the call is needed any more."""


class Tracing(Protocol):
    """Calls with candidates that other processes trace."""

    def call(self, key: tuple[str, str, str], objective: Objective) -> TracingCall | None:
        """The candidates of a call that other processes trace; None where there are none."""


# None: every candidate is traced here.
tracing_in_force: ContextVar[Tracing | None] = ContextVar("ejkernel_tracing", default=None)


def shapes_of(extra: Sequence[Any]) -> tuple[tuple[str, tuple[int, ...]] | None, ...]:
    """The arrays beside a call's as `TracedElsewhere` describes them."""
    return tuple((str(one.dtype), tuple(one.shape)) if hasattr(one, "dtype") else None for one in extra)


@final
@dataclass
class ReadyMade:
    """Gives a tuning the programs of other processes, once the first candidate has the same program here and there."""

    # The candidates of the call in the other processes, which also compile programs that were traced here.
    call: TracingCall | None = None
    # Are programs of other processes used? Not once one differed from the same candidate's here.
    _is_believed: bool = True
    # The first candidate that was exported here.
    _first: tuple[Any, PortableProgram] | None = None
    _agrees: bool = False

    def exported_here(self, cfg: Any, program: PortableProgram) -> None:
        """Notes the program of the first candidate that this process has exported."""
        if self._first is None:
            self._first = cfg, program

    def staged(self, cfg: Any, name: str, until: float) -> Staged | None:
        """A candidate that was traced elsewhere; None where it is to be traced here."""
        elsewhere = self.call
        if elsewhere is None or not self._is_believed:
            return None
        if self._first is None:
            # The first candidate is traced here, and by another process too: the two programs are compared.
            return None
        if not self._is_alike(elsewhere, *self._first, until):
            elsewhere.take(cfg)
            return None
        found = elsewhere.program(cfg, until)
        if found is None:
            return None
        known = self._first[1]
        # A program that differs in kind from the first one's (no gradients, another structure) is traced here: seldom.
        if (
            (found.objective, found.structure) != (known.objective, str(known.structure))
            or tuple(found.extra) != shapes_of(known.extra)
            or found.notes
        ):
            return None
        about = {name: getattr(found, name) for name in ("data", "text", "outputs", "compiler_timing")}
        program = replace(known, **about)
        return Staged(name, found.objective, "", None, lambda executable: executable, portable=program)

    def _is_alike(self, elsewhere: TracingCall, cfg: Any, program: PortableProgram, until: float) -> bool:
        if self._agrees:
            return True
        found = elsewhere.peek(cfg, until)
        if found is None:
            return False
        if found.text != program.text:
            # Something in this process alone changes the programs, so all candidates are traced here.
            self._is_believed = False
            return False
        self._agrees = True
        return True
