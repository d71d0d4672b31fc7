"""The kernel calls of a program, as selectors see them while JAX traces.

`noting_calls` looks through a program: selectors answer with what is known, nothing is tuned, kept or told, and a
`CallLog` has every call with its place in the program. `calls_made` lets selectors choose as ever, and has every
decision.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ..core import codec
from ..core.abstract import abstractify
from ..core.cfg import same
from ..core.device import environment
from ..core.errors import ConfigTypeError
from ..core.invocation import Invocation
from ..core.key import Key
from ..core.request import Decision, Request, revived
from ..core.trace_context import TraceContext
from ..store.lock_file import LockFile
from ..store.store import Source, StoredEntry
from . import policy
from .cache import overlay_in_force, traced_anew

# The name of the scope around a call in the program that is looked through; the call's number follows it.
MARK = "ejk_found_"


@dataclass
class SeenCall:
    """One call, where it stands in the program, and what was answered."""

    number: int
    selector: Any
    request: Request
    decision: Decision
    trace_context: TraceContext
    frames: tuple[policy.Frame, ...]
    # The numbers of the calls with kernels that make this call, the outermost first.
    outer: tuple[int, ...]
    # Set when the call's kernel has been traced: a kernel inside another one ends first, and has the smaller number.
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

    def saw(self, selector: Any, request: Request, decision: Decision) -> Decision:
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
        """A named scope around the kernel of the call that was noted last: the call is found by it in the program."""
        seen, self._next = self._next, None
        if seen is None:
            # No selector noted the call. With `cfg=` none is asked; else a chooser of the user's own answered.
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
    """The log of the program that is looked through in this context, if one is."""
    return _finder.get()


@contextlib.contextmanager
def noting_calls(finder: CallLog) -> Iterator[None]:
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


@dataclass
class CallsMade:
    """The calls that selectors answered, each with its cfg; those with a `cfg=` of their own need none."""

    entries: dict[Key, StoredEntry] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of calls."""
        return len(self.entries)


_collectors: ContextVar[tuple[CallsMade, ...]] = ContextVar("ejkernel_collectors", default=())


@contextlib.contextmanager
def calls_made() -> Iterator[CallsMade]:
    """Collects the calls that are traced in this block; functions that were compiled before are traced again."""
    calls = CallsMade()
    token = _collectors.set((*_collectors.get(), calls))
    try:
        with traced_anew():
            yield calls
    finally:
        _collectors.reset(token)


def is_watching() -> bool:
    """Is a program looked through here, or are its calls collected?"""
    return _finder.get() is not None or bool(_collectors.get())


def collect(request: Request, decision: Decision, lock_file: LockFile | None) -> None:
    """Adds a decision to every collection around this call."""
    collectors = _collectors.get()
    # A cfg that the caller gives stands in the program's own text: no file need hold it.
    if not collectors or request.inv.override_cfg is not None:
        return
    cfg = decision.cfg
    _refuse_what_does_not_come_back(request, cfg)
    # A tuned cfg has an objective; a measured one without it was put by hand, or came from an overlay.
    source: Source = "guess" if not decision.measured else "hand" if decision.objective is None else "autotune"
    entry = StoredEntry(cfg, environment(request.device), source, decision.objective, call=request.call)
    if lock_file is not None and request.key in lock_file and request.key not in overlay_in_force():
        # The lock file answered: its entry is taken over, so that freezing again under the lock writes the same text.
        entry = replace(lock_file.entries[request.key], cfg=cfg)
    for calls in collectors:
        calls.entries[request.key] = entry


def _refuse_what_does_not_come_back(request: Request, cfg: Any) -> None:
    if not same(revived(request, codec.encode(cfg)), cfg):
        raise ConfigTypeError(
            f"{codec.describe(cfg)}, the cfg of {request.key}, does not come back from JSON as it was; "
            "give the kernel a cfg_type, such as a dataclass"
        )
