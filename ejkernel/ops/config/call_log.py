"""Looking through a program for its kernel calls: selectors then answer with what is known, and nothing is tuned."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax

from ..core.abstract import abstractify
from ..core.invocation import Invocation
from ..core.request import Request
from ..core.trace_context import TraceContext
from . import policy

_D = TypeVar("_D")

# What a call is called in the program that is looked through, its number behind it.
MARK = "ejk_found_"


@dataclass
class SeenCall:
    """One call, where it stands in the program, and what was answered."""

    number: int
    selector: Any
    request: Request
    decision: Any
    surroundings: TraceContext
    frames: tuple[policy.Frame, ...]
    # The calls whose kernels this one is inside of.
    outer: tuple[int, ...]
    # Grows from the inside out: a kernel inside another one has the smaller number.
    order: int = field(default=-1)


class CallLog:
    """Notes the calls of the program that this thread traces."""

    def __init__(self) -> None:
        self.sightings: list[SeenCall] = []
        # Calls that a chooser of the user's own answered.
        self.unseen = 0
        self._next: SeenCall | None = None
        self._inside: list[int] = []
        self._order = itertools.count()

    def saw(self, selector: Any, request: Request, decision: _D) -> _D:
        """Notes a call and hands its answer on."""
        seen = SeenCall(
            *(len(self.sightings), selector, _kept(request), decision),
            *(TraceContext.now(), policy.frames.get(), tuple(self._inside)),
            next(self._order),
        )
        self.sightings.append(seen)
        self._next = seen
        return decision

    @contextlib.contextmanager
    def scope(self, inv: Invocation[Any, Any]) -> Iterator[None]:
        """Is put around the kernel of the call that was noted last, so that it can be found in the program."""
        seen, self._next = self._next, None
        if seen is None:
            # Nobody chooses for a compiled kernel, whose cfg is given.
            self.unseen += inv.override_cfg is None
            yield
            return
        self._inside.append(seen.number)
        try:
            with jax.named_scope(f"{MARK}{seen.number}"):
                yield
        finally:
            self._inside.pop()
            seen.order = next(self._order)


_finder: ContextVar[CallLog | None] = ContextVar("ejkernel_finder", default=None)


def in_force() -> CallLog | None:
    """Who looks through a program in this context."""
    return _finder.get()


@contextlib.contextmanager
def looking(finder: CallLog) -> Iterator[None]:
    """Has the calls of a `with` block noted instead of tuned."""
    token = _finder.set(finder)
    try:
        yield
    finally:
        _finder.reset(token)


def _kept(request: Request) -> Request:
    """The request without tracers, which must not outlive their trace; arrays with values stay as they are."""
    inv: Invocation[Any, Any] = request.inv
    args, kwargs = jax.tree_util.tree_map(
        lambda leaf: abstractify(leaf) if isinstance(leaf, jax.core.Tracer) else leaf, (inv.args, dict(inv.kwargs))
    )
    return replace(request, inv=replace(inv, args=args, kwargs=kwargs))
