"""Time of a program by kernel call: a profiler's trace, the cfgs behind its labels, and what tuning would be worth."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..core import formatting
from ..core.description import one_line
from ..core.errors import RecordFormatError
from ..core.key import Key
from ..execution.labels import parse_label
from ..store.store import Store, StoredEntry, as_store, peek
from .markup import Cell, bar, cell, number, table, text
from .summary import TuningSummary, summary_of_entry
from .xplane import Operation, operations

CallState = Literal["tuned", "guessed", "locked"]


@dataclass(frozen=True)
class CallTime:
    """One kernel call of a profiled program."""

    op_id: str
    call_key: str
    seconds: float
    runs: int
    # Tuned: a store has its cfg. Locked: the lock file in force has. Guessed: neither.
    state: CallState
    cfg: Any = None
    call: Mapping[str, str] | None = None
    figures: TuningSummary | None = None
    # Seconds of this trace that tuning would save, by the gains of the operation's other calls; None: unknown.
    worth: float | None = None

    @property
    def name(self) -> str:
        """The call as a line."""
        return one_line(self.op_id, self.call) if self.call else f"{self.op_id} {self.call_key}"


@dataclass(frozen=True)
class Attribution:
    """Time of a trace by kernel call, the costliest first; what has no label is one sum."""

    platform: str
    total_s: float
    calls: tuple[CallTime, ...]

    @property
    def unlabelled_s(self) -> float:
        """Seconds of operations outside of kernel calls."""
        return max(self.total_s - sum(one.seconds for one in self.calls), 0.0)

    def as_dict(self) -> dict[str, Any]:
        """The times as plain data that JSON can hold."""
        from .explain import plain

        names = ("op_id", "call_key", "seconds", "runs", "state", "worth")
        calls = [{**{name: getattr(one, name) for name in names}, "cfg": plain(one.cfg)} for one in self.calls]
        return {"platform": self.platform, "seconds": self.total_s, "unlabelled": self.unlabelled_s, "calls": calls}

    def table(self) -> str:
        """The calls as text."""
        rows = [(*row, _cfg(one)) for one, row in self._rows()]
        return formatting.as_text((*_HEADER, "cfg"), rows) + f"\n{self.summary}"

    def _rows(self) -> list[tuple[CallTime, tuple[str, ...]]]:
        return [
            (
                one,
                (
                    one.name,
                    formatting.seconds(one.seconds),
                    f"{one.seconds / self.total_s:.0%}" if self.total_s else "-",
                    str(one.runs),
                    one.state,
                    _worth(one),
                ),
            )
            for one in self.calls
        ]

    @property
    def summary(self) -> str:
        """The trace in a line."""
        other = self.unlabelled_s / self.total_s if self.total_s else 0.0
        calls = "1 kernel call" if len(self.calls) == 1 else f"{len(self.calls)} kernel calls"
        return f"{calls} in {formatting.seconds(self.total_s)} of operations on {self.platform}; the rest, {other:.0%}"

    def __str__(self) -> str:
        """The table."""
        return self.table()

    def __repr__(self) -> str:
        return f"<Attribution: {self.summary}>"

    def _repr_html_(self) -> str:
        rows = [(*row, _cfg(one)) for one, row in self._rows()]
        return formatting.as_html((*_HEADER, "cfg"), rows) + f"<p>{html.escape(self.summary)}</p>"


_HEADER = ("call", "time", "share", "runs", "state", "worth of tuning")


def attribute(trace: str | os.PathLike[str], *, store: Any = None) -> Attribution:
    """Says which kernel calls the time of a profiler's trace went into, with their cfgs; `store` is where to look.

    The trace is what `jax.profiler.trace(folder)` wrote, with labels on, as they are by default (EJKERNEL_OPS_STAMP).
    """
    found = operations(trace)
    if not found:
        raise RecordFormatError(
            f"the trace {os.fspath(trace)} holds no operation of a JAX program; call the program, and "
            "block_until_ready, inside `with jax.profiler.trace(folder):`"
        )
    # Where there is an accelerator, the host's operations are only its launches.
    platform = next(kind for kind in ("gpu", "tpu", "cpu") if any(one.platform == kind for one in found))
    here = [one for one in found if one.platform == platform]
    known = _Known(platform, store)
    calls = [known.call(label, some) for label, some in _by_label(here).items()]
    ordered = tuple(sorted(calls, key=lambda one: (-one.seconds, one.op_id, one.call_key)))
    return Attribution(platform, sum(one.seconds for one in here), ordered)


def _by_label(found: Iterable[Operation]) -> dict[tuple[str, str], list[Operation]]:
    calls: dict[tuple[str, str], list[Operation]] = {}
    for one in found:
        if one.label:
            calls.setdefault(parse_label(one.label), []).append(one)
    return calls


class _Known:
    """The entries and the lock that say how each call came to its cfg."""

    def __init__(self, platform: str, store: Any) -> None:
        from ..execution.default import default_selector

        selector = default_selector()
        self._platform = platform
        self._stores: list[Store] = selector.stores() if store is None else [as_store(store)]
        self._lock_file = selector.lock_file
        self._entries: dict[tuple[str, str], StoredEntry] = {}
        self._gains: dict[str, list[float]] = {}
        for place in reversed(self._stores):
            for key in map(Key._make, place.keys()):
                entry = peek(place, key) if key.device.startswith(f"{platform}|") else None
                if entry is not None:
                    self._entries[key.op_id, key.call_key] = entry
                    figures = summary_of_entry(entry.summary)
                    if figures is not None and figures.gain is not None and figures.gain[0] > 0:
                        self._gains.setdefault(key.op_id.partition("@")[0], []).append(figures.gain[0])

    def call(self, name: tuple[str, str], some: list[Operation]) -> CallTime:
        """The facts of one call of the trace."""
        seconds = sum(one.seconds for one in some)
        # What is in a loop runs more often than the call itself.
        programs = {one.program for one in some}
        runs = sum(min(one.runs for one in some if one.program == program) for program in programs)
        locked = None
        if self._lock_file is not None:
            locked = next((e for key, e in self._lock_file.entries.items() if key[1:] == name), None)
        entry = self._entries.get(name)
        if locked is not None:
            return CallTime(*name, seconds, runs, "locked", locked.cfg, locked.call)
        if entry is not None and entry.source != "guess":
            return CallTime(
                *name, seconds, runs, "tuned", entry.cfg, entry.call, summary_of_entry(entry.summary), worth=0.0
            )
        gains = self._gains.get(name[0].partition("@")[0], [])
        typical = math.exp(sum(map(math.log, gains)) / len(gains)) if gains else None
        worth = None if typical is None else seconds * (1 - 1 / max(typical, 1.0))
        return CallTime(*name, seconds, runs, "guessed", worth=worth)


def _cfg(one: CallTime) -> str:
    # A label does not say what was guessed.
    return "the heuristic cfg" if one.cfg is None else formatting.short(one.cfg)


def _worth(one: CallTime) -> str:
    if one.state != "guessed":
        gain = None if one.figures is None else one.figures.gain
        return "" if gain is None else f"tuned, {one.figures.gain_cell() if one.figures else ''}"
    if one.worth is None:
        return f"unknown: no other call of it is tuned; at most {formatting.seconds(one.seconds)}"
    return f"about {formatting.seconds(one.worth)}, as other calls of it gained"


def profile_section(found: Attribution) -> str:
    """A profile as a part of a page."""
    rows = []
    for one in found.calls:
        share = one.seconds / found.total_s if found.total_s else 0.0
        cfg = _cfg(one)
        rows.append(
            (
                cell(one.name),
                number(formatting.seconds(one.seconds), one.seconds),
                Cell(f"{bar(share)} {share:.0%}", share, sorts=True),
                number(str(one.runs), one.runs),
                cell(one.state),
                cell(_worth(one)),
                cell(cfg, "c"),
            )
        )
    said = f"<p>{text(found.summary)}.</p>"
    return f"<h2>Profile</h2>{said}" + table("Time by kernel call", (*_HEADER, "cfg"), rows, kind="s")
