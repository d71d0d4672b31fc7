"""What tuning a set of calls gave, as values."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ..config.cache import overlay_cache
from ..core.errors import ScopeError, TuningError


@dataclass(frozen=True)
class Measurement:
    """One cfg and its time."""

    cfg: Any
    seconds: float


@dataclass(frozen=True)
class AutotuneData:
    """The times of one call's cfgs."""

    measurements: Sequence[Measurement]

    @property
    def fastest_config(self) -> Any:
        """The cfg of the shortest time, the earlier one of equals."""
        if not self.measurements:
            raise TuningError("there is no fastest cfg: nothing was measured")
        return min(self.measurements, key=lambda m: m.seconds).cfg


@dataclass(frozen=True)
class Entry:
    """One call's cfg."""

    op_id_v: str
    call_key: str
    cfg: Any


class _Entered(threading.local):
    """The results that this thread is in, with the overlays that they made."""

    def __init__(self) -> None:
        self.stack: list[tuple[object, overlay_cache]] = []


_entered = _Entered()


@dataclass(frozen=True)
class AutotuningResult:
    """The cfgs of many calls on one device; inside `with result:` they are in force."""

    device: str
    entries: Sequence[Entry]

    def as_overlay(self) -> overlay_cache:
        """The cfgs as an overlay."""
        return overlay_cache({(self.device, e.op_id_v, e.call_key): e.cfg for e in self.entries})

    def __enter__(self) -> Self:
        overlay = self.as_overlay()
        overlay.__enter__()
        _entered.stack.append((self, overlay))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mine = [place for place, (owner, _) in enumerate(_entered.stack) if owner is self]
        if not mine:
            raise ScopeError("a result was left that this thread had not entered")
        _entered.stack.pop(mine[-1])[1].__exit__(kind, error, trace)
