"""Changes of the caches and policies of this process: code that kept a cfg asks here if it is stale. No JAX here."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from .cfg import same

# Moves with every change; read on every call, so a plain module attribute.
epoch = 0

# The last changes of each key, in any cache or store: the epoch and the new cfg.
_latest: dict[Any, list[tuple[int, Any]]] = {}
# Changes kept for each key: several caches of one process may know the key.
_NOTES = 8
# The epoch of the last change that may concern every key.
_everything = 0
_lock = threading.Lock()


class Dependent(Protocol):
    """Keeps what must not outlive a change."""

    def forget(self) -> None:
        """Lets go of what was kept."""


_dependents: weakref.WeakSet[Dependent] = weakref.WeakSet()


def tell(dependent: Dependent) -> None:
    """Lets `dependent.forget()` be called after each change, before the change is done for the code that makes it."""
    with _lock:
        _dependents.add(dependent)


def note(key: Any, cfg: Any) -> None:
    """Notes that a key has this cfg now."""
    global epoch
    with _lock:
        epoch += 1
        _latest[key] = [*_latest.get(key, ()), (epoch, cfg)][-_NOTES:]
        told = list(_dependents)
    for dependent in told:
        dependent.forget()


def note_everything() -> None:
    """Notes that any key may have another cfg now."""
    global epoch, _everything
    with _lock:
        epoch += 1
        _everything = epoch
        _latest.clear()
        told = list(_dependents)
    for dependent in told:
        dependent.forget()


def everything_since(seen: int) -> bool:
    """May any key have another cfg than at that epoch?"""
    return _everything > seen


def differs(key: Any, cfg: Any, *, since: int) -> bool:
    """Was this key given another cfg, anywhere, after that epoch?"""
    notes = _latest.get(key, [])
    if len(notes) == _NOTES and notes[0][0] > since:
        return True
    return any(when > since and not same(now, cfg) for when, now in notes)
