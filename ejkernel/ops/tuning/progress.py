"""Seeing a tuning: one live line on a terminal, one quiet line elsewhere, one line of totals at the end."""

from __future__ import annotations

import atexit
import contextlib
import html
import importlib
import logging
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TextIO, final

from ..core import formatting
from ..core.record import Record
from ..core.standing import verdict
from ..settings import Progress

log = logging.getLogger("ejkernel.ops")
# A program that wants the records adds a handler; until then they are not shown.
log.addHandler(logging.NullHandler())

# A line that changes more often than this cannot be read.
_LEAST_SECONDS = 0.1
# A notebook's line travels through two processes.
_LEAST_NOTEBOOK_SECONDS = 0.3
# Silence that is longer than this looks as if the program hung.
_LONG_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Step:
    """Progress of a tuning."""

    stage: Literal["compiling", "checking", "timing"]
    done: int
    total: int
    # The shortest time so far, and how many times as fast that is as the heuristic cfg.
    best_s: float | None = None
    gain: float | None = None


Watch = Callable[[Step], None]


class Phases:
    """Seconds of a tuning by what they went into."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def ended(self, name: str) -> None:
        """Counts the time since the last end for this phase."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


def unseen(step: Step) -> None:
    """Shows no step."""


def write_line(stream: TextIO | None, text: str, *, live: bool = False, passing: bool = False) -> None:
    """Writes a line of progress; a stream that went away ends the showing, not the tuning.

    `live`: in place of the line that a terminal shows last. `passing`: the next line will take its place.
    """
    if passing:
        # A line that wraps cannot be written over.
        text = text[: shutil.get_terminal_size().columns - 1]
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            # Back to the beginning of the line, and the rest of it cleared.
            stream.write(("\r\x1b[K" if live else "") + text + ("" if passing else "\n"))
            stream.flush()


@final
class Line:
    """One line of a terminal, written over and over; `close` takes it away."""

    def __init__(self, title: str, seconds: float | None, stream: TextIO) -> None:
        self.title = title
        self.stream = stream
        self._until = None if seconds is None else time.perf_counter() + seconds
        self._shown = -math.inf
        self._best: Step | None = None

    def __call__(self, step: Step) -> None:
        """Shows how far it is."""
        self.note(step)
        now = time.perf_counter()
        if now - self._shown < _LEAST_SECONDS:
            return
        self._shown = now
        write_line(self.stream, self.text(step, now), live=True, passing=True)

    def note(self, step: Step) -> None:
        """Remembers the best so far."""
        self._best = step if step.best_s is not None else self._best

    def text(self, step: Step, now: float) -> str:
        """The line without its control characters."""
        parts = [f"tuning {self.title}", f"{step.stage} {step.done}/{step.total}"]
        if self._best is not None and self._best.best_s is not None:
            gain = "" if self._best.gain is None else f" ({self._best.gain:.2f}x)"
            parts.append(f"best {formatting.seconds(self._best.best_s)}{gain}")
        if self._until is not None:
            parts.append(f"{formatting.duration(max(self._until - now, 0), 0)} left")
        return "  ".join(parts)

    def close(self) -> None:
        """Leaves the line empty for whatever comes next."""
        if self._shown > -math.inf:
            write_line(self.stream, "", live=True, passing=True)


@final
class NotebookLine:
    """One line of a notebook, written over and over; it ends as the outcome."""

    def __init__(self, title: str, seconds: float | None, display: Callable[..., Any]) -> None:
        self._line = Line(title, seconds, sys.stderr)
        self._display = display
        self._handle: Any = None
        self._shown = -math.inf

    def __call__(self, step: Step) -> None:
        """Shows how far it is."""
        now = time.perf_counter()
        self._line.note(step)
        if now - self._shown >= _LEAST_NOTEBOOK_SECONDS:
            self._shown = now
            self.write(self._line.text(step, now))

    def write(self, text: str) -> None:
        """Replaces the line."""
        shown = {"text/plain": text, "text/html": f"<code>{html.escape(text)}</code>"}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def close(self) -> None:
        """Leaves the line as it is: the outcome replaces it."""


@final
class LogLines:
    """Lines for a program without a terminal: one once a tuning takes long, and one at its end."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.said = False
        self._timer = threading.Timer(_LONG_SECONDS, self._say)
        self._timer.daemon = True
        self._timer.start()

    def __call__(self, step: Step) -> None:
        """Shows no step."""

    def _say(self) -> None:
        self.said = True
        _print(f"tuning {self.title}; the next process will find it on disk")

    def close(self) -> None:
        """Stops the timer of the line that a long tuning has."""
        self._timer.cancel()


# The notebook's or log's line of a tuning until its outcome is told, in the thread that tunes.
_open = threading.local()
# True while a command or `autotune` tells of its tunings by itself.
_told_elsewhere: ContextVar[bool] = ContextVar("ejkernel_told_elsewhere", default=False)


@contextlib.contextmanager
def told_elsewhere() -> Iterator[None]:
    """Silences the lines of single tunings in a `with` block: the program's progress tells of them."""
    token = _told_elsewhere.set(True)
    try:
        yield
    finally:
        _told_elsewhere.reset(token)


@contextlib.contextmanager
def shown(title: str, seconds: float | None, wanted: Progress) -> Iterator[Watch]:
    """Gives the function that a tuning calls with each step, for the time of a `with` block."""
    stream = sys.stderr
    _open.line = None
    if wanted == "off":
        yield unseen
        return
    if stream is not None and stream.isatty():
        with contextlib.closing(Line(title, seconds, stream)) as line:
            yield line
        return
    display = notebook_display()
    if _told_elsewhere.get() and display is None:
        yield unseen
        return
    live = LogLines(title) if display is None else NotebookLine(title, seconds, display)
    with contextlib.closing(live):
        yield live
    _open.line = live


def tell(title: str, record: Record, seconds: float, wanted: Progress) -> None:
    """One line about a tuning that is over, where that was asked for, and its part of the totals."""
    live, _open.line = getattr(_open, "line", None), None
    if isinstance(live, NotebookLine):
        live.write(outcome(title, record, seconds))
    if wanted == "on" or (isinstance(live, LogLines) and live.said):
        _print(outcome(title, record, seconds))
    _totals.add(record, seconds, wanted)


def _print(text: str) -> None:
    write_line(sys.stderr, f"ejkernel: {text}")


def notebook_display() -> Callable[..., Any] | None:
    """IPython's function that shows a value, where this process is a notebook's kernel; else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    display: Callable[..., Any] = importlib.import_module("IPython.display").display
    return display


def outcome(title: str, record: Record, seconds: float) -> str:
    """The outcome of a tuning, in a line."""
    if record.stop == "settled":
        return f"{title} was tuned by another process meanwhile"
    trials = sum(trial.status != "invalid" for trial in record.trials)
    return f"tuned {title}: {trials} candidates in {formatting.duration(seconds)}, {verdict(record).text}"


class _TuningTotals:
    """Totals of the tunings of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.keys = 0
        self.seconds = 0.0
        self.gains: list[float] = []
        self._loud = False

    def add(self, record: Record, seconds: float, wanted: Progress) -> None:
        with self._lock:
            if not self.keys:
                atexit.register(self.say)
            self.keys += 1
            self.seconds += seconds
            if record.gain is not None:
                self.gains.append(record.gain[0])
            terminal = sys.stderr is not None and sys.stderr.isatty()
            self._loud = wanted == "on" or (wanted == "auto" and terminal)

    def text(self) -> str:
        keys = "1 key" if self.keys == 1 else f"{self.keys} keys"
        gain = math.exp(sum(map(math.log, self.gains)) / len(self.gains)) if self.gains else None
        faster = "" if gain is None else f", on average {gain:.2f} times as fast as the heuristic cfgs"
        return f"{keys} tuned in {formatting.duration(self.seconds)}{faster}"

    def say(self) -> None:
        log.info(self.text())
        if self._loud:
            _print(self.text())


_totals = _TuningTotals()
