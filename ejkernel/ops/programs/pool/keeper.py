"""Records that came back, given to the selectors of their calls; a store that is full for a while gets them later."""

from __future__ import annotations

import time
from typing import Any, final

from ...core.record import Record
from ..found_call import FoundCall

# Seconds of waiting before each new attempt to write to a store that was full.
_PAUSES = (0.0, 0.2, 1.0)


@final
class RecordKeeper:
    """Has selectors keep records, as if they were their own tunings."""

    def __init__(self) -> None:
        # Records that a store could not take when they came.
        self._unkept: list[tuple[FoundCall, Record]] = []

    def keep(self, call: FoundCall, record: Record) -> None:
        """Keeps a record in memory and stores."""
        _adopt(call, record)
        if _is_unkept(call):
            self._unkept.append((call, record))

    def keep_again(self) -> None:
        """Writes once more what a store could not take."""
        for pause in _PAUSES:
            late = [(call, record) for call, record in self._unkept if _is_unkept(call)]
            if not late:
                break
            time.sleep(pause)
            for call, record in late:
                _adopt(call, record)
        self._unkept.clear()


def _adopt(call: FoundCall, record: Record) -> None:
    with call.restored():
        for selector in call.selectors:
            selector.adopt(call.inv, call.kernel, record)


def _is_unkept(call: FoundCall) -> bool:
    """Does a store of the call's selectors hold something that it could not write?"""
    persistent: list[Any] = [selector.persistent for selector in call.selectors]
    return any(getattr(store, "reason", "") for store in persistent)
