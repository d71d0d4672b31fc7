"""The decisions that are made inside a `with` block: what a program asked for, to be frozen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from ..core import codec
from ..core.candidates import revived
from ..core.device import environment
from ..core.errors import ConfigTypeError
from ..core.key import Key
from ..core.request import Request
from ..store.lock_file import LockFile
from ..store.store import Source, StoredEntry
from .cache import ConfigCache, overlay_in_force, traced_anew


@dataclass
class CallsMade:
    """The calls that selectors answered, each with its cfg; those with a `cfg=` of their own need none."""

    entries: dict[Key, StoredEntry] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many calls."""
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


def collect(request: Request, cfg: Any, tier: str, cache: ConfigCache[Any], lock: LockFile | None = None) -> None:
    """Remembers a decision for whoever collects."""
    collectors = _collectors.get()
    # What the caller gives is in the program's own text.
    if not collectors or tier == "override":
        return
    _refuse_what_does_not_come_back(request, cfg)
    known = cache._find(request.key) if tier not in ("overlay", "heuristics") else None
    objective = None if known is None else known[1]
    # What was tuned has an objective; the rest somebody put, or an overlay said.
    source: Source = "guess" if tier == "heuristics" else "hand" if objective is None else "autotune"
    entry = StoredEntry(cfg, environment(request.device), source, objective, call=request.call)
    if lock is not None and request.key in lock and request.key not in overlay_in_force():
        # Frozen before: frozen again under its lock, the text stays the same.
        entry = replace(lock.entries[request.key], cfg=cfg)
    for calls in collectors:
        calls.entries[request.key] = entry


def _refuse_what_does_not_come_back(request: Request, cfg: Any) -> None:
    if repr(revived(request, codec.encode(cfg))) != repr(cfg):
        raise ConfigTypeError(
            f"{codec.describe(cfg)}, the cfg of {request.key}, does not come back from JSON as it was; "
            "give the kernel a cfg_type, such as a dataclass"
        )
