"""What changed in any cache or policy of this process, so that whoever built on an answer can tell. No JAX here."""

from __future__ import annotations

import threading
from typing import Any

# Moves with every change; read on every call, so a plain module attribute.
epoch = 0

# The last change of each key, and of everything at once.
_latest: dict[Any, tuple[int, Any]] = {}
_everything = 0
_lock = threading.Lock()


def note(key: Any, cfg: Any) -> None:
    """A key has this cfg now."""
    global epoch
    with _lock:
        epoch += 1
        _latest[key] = (epoch, cfg)


def note_everything() -> None:
    """Any key may have another cfg now."""
    global epoch, _everything
    with _lock:
        epoch += 1
        _everything = epoch
        _latest.clear()


def everything_since(seen: int) -> bool:
    """May any key have another cfg than at that epoch?"""
    return _everything > seen


def differs(key: Any, cfg: Any, *, since: int) -> bool:
    """Was this key given another cfg after that epoch?"""
    when, now = _latest.get(key, (0, None))
    if when <= since or now is cfg:
        return False
    same = type(now) is type(cfg) and now == cfg
    # 1, 1.0 and True are equal to Python and three cfgs to a kernel; what compares to an array is another cfg.
    return not (same is True and repr(now) == repr(cfg))
