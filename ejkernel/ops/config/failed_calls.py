"""Calls of which all candidates failed in this process, so that nothing tries them again."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from ..core.key import Key
from ..tuning.tuner import Tuner

# By class as well: a corrected one may have what the old one lacked.
Failure = tuple[Key, type]


class OutOfTime(str):
    """The reason of a tuning that ran out of time: its candidates may be as good as any."""

    __slots__ = ()


# By tuner: another one may do what this one could not. Our own are all alike.
_of_ours: dict[Failure, str] = {}
_of_others: WeakKeyDictionary[Any, dict[Failure, str]] = WeakKeyDictionary()
_lock = threading.Lock()


def failures_of(tuner: Any) -> dict[Failure, str]:
    """The failed calls of a tuner, with the reasons."""
    if type(tuner) is Tuner:
        return _of_ours
    try:
        with _lock:
            return _of_others.setdefault(tuner, {})
    # Neither hashable nor weakly referable: then by its type.
    except TypeError:
        return _of_others.setdefault(type(tuner), {})
