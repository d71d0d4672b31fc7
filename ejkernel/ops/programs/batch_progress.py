"""Progress of tuning many calls: a live line on a terminal; in a log one line a call, and one of the whole at times."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from ..core import formatting
from ..core.key import Key
from ..core.standing import verdict
from ..tuning.progress import NotebookLine, notebook_display, write_line
from .results import AutotuningResult, Entry

# A line that changes more often than this cannot be read; a notebook's travels through two processes.
_LEAST_SECONDS = 0.3
# A log keeps every line, so it gets one of the whole at times.
_LOG_SECONDS = 30.0


class BatchProgress:
    """Says on the error stream what is being done; silent unless asked for."""

    def __init__(
        self, *, on: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        # Grows where tuned cfgs bring other calls.
        self.total = 0
        self._stream = (stream or sys.stderr) if on else None
        self._live = self._stream is not None and self._stream.isatty()
        self._clock = clock
        self._start = clock()
        self._number = 0
        display = notebook_display() if on and not self._live else None
        # One line of a notebook, written over and over while a pool is at work.
        self._notebook = None if display is None else NotebookLine("", None, display)
        # A log's first line of the whole comes when there is something to tell.
        self._shown = self._start if self._is_log else -math.inf

    @property
    def _is_log(self) -> bool:
        return self._stream is not None and not self._live and self._notebook is None

    @property
    def is_due(self) -> bool:
        """Is it time for a line about the whole?"""
        least = _LOG_SECONDS if self._is_log else _LEAST_SECONDS
        return self._stream is not None and self._clock() - self._shown >= least

    def tuning(self, key: Key) -> None:
        """The next call's turn has come."""
        self._number += 1
        self._line(f"{self._place()}: tuning {key.op_id} {key.call_key}", passing=True)

    def again(self, key: Key) -> None:
        """A call that had its turn is tuned once more."""
        self._line(f"tuning {key.op_id} {key.call_key} once more: candidates of it were left behind", passing=True)

    def tuned(self, entry: Entry, worker: str = "") -> None:
        """A call is done; a worker of a pool has no turns, so its calls are counted here."""
        self._number += bool(worker)
        by = f" by {worker}" if worker else ""
        self._line(f"{self._place()}: {entry.op_id_v} {entry.call_key}: {_outcome(entry)}{by}")

    def under_way(self, running: int, where: str, failed: int, gain: float | None, left: str) -> None:
        """Tasks that a pool is at, and what has come of it so far."""
        self._shown = self._clock()
        parts = [f"{self._number} of {self.total} done", f"{running} running{where}"]
        parts += [f"{failed} failed"] if failed else []
        parts += [] if gain is None else [f"{gain:.2f}x so far"]
        parts += [left] if left else []
        if self._notebook is not None:
            self._notebook.write(", ".join(parts))
        self._line(", ".join(parts), passing=not self._is_log)

    def skipped(self, key: Key, why: str) -> None:
        """A call is left as it is."""
        self._number += 1
        self._line(f"{self._place()}: {key.op_id} {key.call_key}: not tuned: {why}")

    def confirming(self, changes: int) -> None:
        """The program itself is run before and after so many changes."""
        self._line(f"running the program before and after {changes} changes", passing=True)

    def note(self, text: str) -> None:
        """Writes a line about the whole program."""
        self._line(text)

    def finished(self, result: AutotuningResult) -> None:
        """Writes that everything is done, or was stopped."""
        word = "interrupted" if result.interrupted else "done"
        self._line(f"{word} after {formatting.duration(self._clock() - self._start)}: {result.totals}")
        if result.confirmation is not None:
            self._line(str(result.confirmation))

    def _place(self) -> str:
        return f"{self._number} of {self.total}"

    def _line(self, text: str, *, passing: bool = False) -> None:
        if self._live or not passing:
            write_line(self._stream, text, live=self._live, passing=passing)


def _outcome(entry: Entry) -> str:
    if not entry.is_measured or entry.record is None:
        return f"not tuned: {entry.note}" if entry.note else f"known ({entry.source})"
    record: Any = entry.record
    noisy = verdict(record).kind == "noisy"
    gain = ", too noisy to tell" if noisy else "" if record.gain is None else f", {record.gain[0]:.2f}x"
    failed = f", {len(record.failures)} failed" if record.failures else ""
    taken = formatting.seconds(record.trials[record.winner].seconds)
    return f"{formatting.short(entry.cfg)}: {taken}{gain} ({len(record.trials)} candidates{failed})"
