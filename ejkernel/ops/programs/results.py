"""Results of tuning a set of calls, as values."""

from __future__ import annotations

import html
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from ..config.cache import Plain, overlay_cache
from ..core import codec, formatting
from ..core.description import described_in
from ..core.errors import ConfigTypeError, ScopeError, SettingError, TuningError
from ..core.key import Key
from ..core.record import Record
from ..core.shown import Shown
from ..core.standing import verdict
from ..store.store import Store, StoredEntry
from . import result_file
from .confirm import Confirmation


@dataclass(frozen=True, repr=False)
class Measurement(Shown):
    """One cfg and its time."""

    cfg: Any
    seconds: float

    def in_short(self) -> str:
        """The value in a few words."""
        return f"{formatting.short(self.cfg)}, {formatting.seconds(self.seconds)}"


@dataclass(frozen=True, repr=False)
class AutotuneData(Shown):
    """The times of one call's cfgs."""

    measurements: Sequence[Measurement]

    def in_short(self) -> str:
        """The value in a few words."""
        return f"{len(self.measurements)} measurements"

    @property
    def fastest_config(self) -> Any:
        """The cfg of the shortest time, the earlier one of equals."""
        if not self.measurements:
            raise TuningError("there is no fastest cfg: nothing was measured")
        return min(self.measurements, key=lambda m: m.seconds).cfg


@dataclass(frozen=True, repr=False)
class Entry(Shown):
    """One call's cfg, and what is known about how it came to be."""

    op_id_v: str
    call_key: str
    cfg: Any
    # Of the tuning, a failed one included; None where nothing was measured for it.
    record: Record | None = None
    # The tier that answered; empty for an entry made by hand.
    source: str = ""
    # Why it was not tuned, or what became of its winner later on.
    note: str = ""
    # Runs in one run of the program.
    count: int = 1
    # Empty: the result's.
    device: str = ""
    # Is the cfg a guess of a tier's? None: by the name of the tier.
    guessed: bool | None = field(default=None, compare=False)
    # Read from a file, and plain JSON until the kernel rebuilds it.
    is_plain: bool = field(default=False, compare=False, repr=False)

    def in_short(self) -> str:
        """The value in a few words."""
        return f"{self.op_id_v} {self.call_key}, {formatting.short(self.cfg)} from {self.source or 'hand'}"

    @property
    def is_measured(self) -> bool:
        """Did a tuning choose this cfg?"""
        return self.record is not None and self.record.winner is not None

    @property
    def is_guess(self) -> bool:
        """Is this what the kernel's author would take, unmeasured?"""
        return self.source in _GUESSING if self.guessed is None else self.guessed


# Tiers that guess, for entries of files that do not say it.
_GUESSING = ("heuristics", "predicted")


@dataclass(frozen=True)
class BatchTotals:
    """Seconds of the measured calls in one run of a program, with their heuristic cfgs and with the tuned ones."""

    calls: int
    heuristic_s: float
    tuned_s: float

    def __str__(self) -> str:
        """The totals in the words of progress lines and tables."""
        if not self.calls:
            return "no times were measured"
        times = f"{formatting.seconds(self.heuristic_s)} with heuristics, {formatting.seconds(self.tuned_s)} tuned"
        ratio = f" ({self.heuristic_s / self.tuned_s:.2f}x)" if self.tuned_s else ""
        return f"{self.calls} measured {'call takes' if self.calls == 1 else 'calls take'} {times}{ratio}"


class _EnteredResults(threading.local):
    """The results that this thread is in, with the overlays that they made."""

    def __init__(self) -> None:
        self.stack: list[tuple[object, overlay_cache]] = []


_entered = _EnteredResults()


@dataclass(frozen=True, repr=False)
class AutotuningResult(Shown):
    """The cfgs of many calls on one device; inside `with result:` they are in force."""

    device: str
    entries: Sequence[Entry]
    # Stopped before every call had its turn.
    interrupted: bool = False
    # What was left out, and why.
    notes: Sequence[str] = ()
    # The program itself before and after, where it was run.
    confirmation: Confirmation | None = None
    # What each worker of a pool did, in a line.
    workers: Sequence[str] = ()

    def in_short(self) -> str:
        """The value in a few words."""
        return f"{len(self.entries)} calls on {self.device}, {self.totals}"

    def by_key(self) -> dict[Key, Entry]:
        """The entries by their full keys."""
        return {Key(e.device or self.device, e.op_id_v, e.call_key): e for e in self.entries}

    def as_overlay(self) -> overlay_cache:
        """The cfgs as an overlay."""
        return overlay_cache({key: Plain(e.cfg) if e.is_plain else e.cfg for key, e in self.by_key().items()})

    def __or__(self, other: Any) -> AutotuningResult:
        """Both results as one.

        Of two entries with one key a measured one stays, then one that covers forward and backward, then the right
        side's.
        """
        if not isinstance(other, AutotuningResult):
            return NotImplemented
        merged = self.by_key()
        for key, entry in other.by_key().items():
            if key not in merged or _rank(entry) >= _rank(merged[key]):
                merged[key] = entry
        entries = [replace(e, device="" if key.device == self.device else key.device) for key, e in merged.items()]
        notes = dict.fromkeys((*self.notes, *other.notes))
        workers = (*self.workers, *other.workers)
        return AutotuningResult(
            self.device, tuple(entries), self.interrupted or other.interrupted, tuple(notes), workers=workers
        )

    @property
    def totals(self) -> BatchTotals:
        """The measured calls, each as often as the program runs it."""
        pairs = [(e.count, _seconds_before(e), seconds_of(e, "winner")) for e in self.entries]
        known = [(count, before, after) for count, before, after in pairs if before is not None and after is not None]
        return BatchTotals(
            len(known), sum(n * before for n, before, _ in known), sum(n * after for n, _, after in known)
        )

    def save(self, store: Any) -> int:
        """Puts the cfgs into a store, with their records where it takes them, and says how many; guesses stay out."""
        if not isinstance(store, Store) and not callable(getattr(store, "put", None)):
            raise SettingError(f"{store!r} is no store; save into a PersistentCache(...), or write a file with dump")
        kept = {key: entry for key, entry in self.by_key().items() if not entry.is_guess}
        for key, entry in kept.items():
            if entry.is_plain and getattr(store, "dumper", None) is not None:
                raise ConfigTypeError(
                    f"{codec.describe(entry.cfg)}, the cfg of {key}, is plain JSON, and {store} has a dumper for cfgs; "
                    "load the result with cfg_types={...}"
                )
            if entry.is_measured and isinstance(store, Store):
                store.keep(key, _stored(entry))
            else:
                store.put(*key, entry.cfg)
        return len(kept)

    def dumps(self) -> str:
        """The result as JSON text, one entry a line; a `ConfigTypeError` names a cfg that JSON cannot hold."""
        return result_file.written(self)

    def dump(self, target: Any) -> None:
        """Writes the result to a path or an open text file."""
        result_file.put(target, self.dumps())

    @staticmethod
    def loads(text: str, *, cfg_types: Mapping[str, Any] | None = None, device: str | None = None) -> AutotuningResult:
        """Reads a result that `dumps` wrote.

        A cfg is plain JSON until its kernel is called, which rebuilds it as a store's; `cfg_types` rebuilds it at once,
        by operation (`matmul` or `matmul@v1`). With `device` a result of another one is refused.
        """
        return result_file.parsed(text, cfg_types or {}, device)

    @staticmethod
    def load(source: Any, *, cfg_types: Mapping[str, Any] | None = None, device: str | None = None) -> AutotuningResult:
        """Reads a result from a path or an open text file."""
        return AutotuningResult.loads(result_file.taken(source), cfg_types=cfg_types, device=device)

    def table(self) -> str:
        """The entries as text, the costliest first, with totals and notes."""
        return formatting.as_text(_HEADER, self._rows()) + "\n" + "\n".join(self._footer())

    def __str__(self) -> str:
        """The table."""
        return self.table()

    def _repr_html_(self) -> str:
        footer = "".join(f"<p>{html.escape(line)}</p>" for line in self._footer())
        return formatting.as_html(_HEADER, self._rows()) + footer

    def _rows(self) -> list[tuple[str, ...]]:
        total = sum(e.count * (seconds_of(e, "winner") or 0.0) for e in self.entries)
        ranked = sorted(self.entries, key=lambda e: -e.count * (seconds_of(e, "winner") or 0.0))
        return [_row(entry, total) for entry in ranked]

    def _footer(self) -> list[str]:
        stopped = ["interrupted before every call had its turn"] if self.interrupted else []
        confirmed = [] if self.confirmation is None else [str(self.confirmation)]
        return [f"{self.device}: {self.totals}", *confirmed, *self.workers, *stopped, *self.notes]

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


_HEADER = ("operation", "call", "cfg", "time", "runs", "share", "gain", "candidates", "from")


def _row(entry: Entry, total: float) -> tuple[str, ...]:
    record, taken = entry.record, seconds_of(entry, "winner")
    tried = "-" if record is None else str(len(record.trials))
    failed = "" if record is None or not record.failures else f", {len(record.failures)} failed"
    return (
        *(entry.op_id_v, entry.call_key, formatting.short(entry.cfg), formatting.seconds(taken), str(entry.count)),
        f"{entry.count * taken / total:.0%}" if taken and total else "-",
        _gain_cell(record),
        tried + failed,
        (entry.source or "hand") + (f": {entry.note}" if entry.note else ""),
    )


def _gain_cell(record: Record | None) -> str:
    if record is None or record.gain is None:
        return "-"
    return "too noisy to tell" if verdict(record).kind == "noisy" else f"{record.gain[0]:.2f}x"


def seconds_of(entry: Entry, role: str) -> float | None:
    """The time of an entry's winner, heuristic or runner-up, where it was measured."""
    place = None if entry.record is None else getattr(entry.record, role)
    return None if entry.record is None or place is None else entry.record.trials[place].seconds


def _seconds_before(entry: Entry) -> float | None:
    """The seconds with the heuristic cfg: by the gain where that is known, which is of rounds that had both.

    A gain that the table calls too noisy to tell is none in its totals either.
    """
    after, record = seconds_of(entry, "winner"), entry.record
    if after is None or record is None or record.gain is None:
        return seconds_of(entry, "heuristic")
    return after if verdict(record).kind == "noisy" else after * record.gain[0]


def _rank(entry: Entry) -> tuple[bool, bool]:
    covers = entry.record is not None and entry.record.objective == "forward+backward"
    return entry.is_measured, entry.is_measured and covers


def _stored(entry: Entry) -> StoredEntry:
    record = entry.record
    if record is None:
        return StoredEntry(entry.cfg)
    known = StoredEntry(entry.cfg, record.environment, "autotune", record.objective)
    return replace(known, summary=record.summary(), call=described_in(record), record=record)
