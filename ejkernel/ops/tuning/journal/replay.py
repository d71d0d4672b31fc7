"""Reading the lines of a journal: which candidates crashed, failed or were dropped, and which was at work last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from ...core.record import Status
from .observer import Doing

# As many candidates as the largest search that ends.
MOST_CANDIDATES = 2000


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 64


def _is_doing(value: Any) -> bool:
    return value in get_args(Doing)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(one is None or _is_id(one) for one in value)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


_TRIAL: dict[str, Callable[[Any], bool]] = {
    # A candidate that is right has no line of this kind.
    "status": lambda value: value in get_args(Status) and value != "ok",
    "message": _is_text,
    "error": _is_number,
    "compile_s": _is_number,
}


def _is_outcome(value: Any) -> bool:
    return isinstance(value, dict) and all(name in _TRIAL and _TRIAL[name](one) for name, one in value.items())


def _is_trial(value: Any) -> bool:
    return _is_outcome(value) and {"status", "message"} <= value.keys()


def _are_suspects(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_id(one) and isinstance(deaths, list) and all(map(_is_doing, deaths)) for one, deaths in value.items()
    )


# The fields of each kind of line, by the first of them.
_SHAPES: dict[str, dict[str, Callable[[Any], bool]]] = {
    "slot": {"slot": lambda value: value is None or _is_id(value), "doing": _is_doing},
    "begin": {"begin": _is_text, "fresh": lambda value: isinstance(value, bool), "candidates": _are_ids},
    "trying": {"trying": _is_id, "doing": _is_doing},
    "back": {"back": _is_id, "doing": _is_doing},
    "failed": {"failed": _is_id, "program": _is_text, "trial": _is_trial},
    # What crashed is out, whatever else an earlier format said of it.
    "lost": {"lost": _is_id, "trial": _is_outcome},
    "dropped": {
        "dropped": _is_id,
        "program": _is_text,
        "clock": _is_text,
        "seconds": _is_time,
        "ratio": _is_time,
    },
    "suspects": {"suspects": _are_suspects},
    "crashed": {"crashed": lambda value: value is True},
    "left": {"left": lambda value: value is True},
    "finished": {"finished": lambda value: value is None or _is_id(value), "candidates": _are_ids},
}


def fits(line: Any) -> bool:
    """Is this a line that a tuning writes? A right checksum does not make one."""
    if not isinstance(line, dict):
        return False
    shape = next((shape for name, shape in _SHAPES.items() if name in line), None)
    return shape is not None and all(name in line and check(line[name]) for name, check in shape.items())


@dataclass
class JournalContent:
    """Outcomes of one key's candidates, by their ids."""

    identity: str = ""
    # Outcomes of candidates that ended a process: they are kept when all else is forgotten.
    lost: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    # Candidates that were at work when a process died of an unknown cause: the step of each, once for every death.
    suspects: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    # Candidates that were timed and slower than the best: seconds, ratio, clock and program.
    dropped: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    # Did a candidate crash, or a process die, since the first one was dropped? Then that one may have been dropped for
    # being slower than a candidate that cannot be used.
    crashed: bool = False
    # The winner and the candidates of a tuning that is over.
    winner: str | None = None
    candidates: Sequence[str | None] = ()
    _at_work: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(lines: Iterable[Mapping[str, Any]], *, alone: bool) -> JournalContent:
        """Replays a journal. `alone`: no process is writing it, so a candidate that is at work has ended its own."""
        history = JournalContent()
        slot: Mapping[str, Any] | None = None
        for line in lines:
            if "slot" in line:
                slot = line
            else:
                history._take(line)
        if not alone:
            history._at_work.clear()
            return history
        if slot is not None and slot["slot"] is not None:
            history._at_work[slot["slot"]] = slot["doing"]
        history._accuse()
        return history

    def _take(self, line: Mapping[str, Any]) -> None:
        if "begin" in line:
            self._accuse()
            if line["fresh"] or line["begin"] != self.identity:
                self.forget()
            self.identity, self.winner = line["begin"], None
        elif "trying" in line:
            self._at_work[line["trying"]] = line["doing"]
        elif "back" in line:
            self._came_back(line["back"], line["doing"])
        elif "failed" in line:
            self._is_over(line["failed"])
            self.failed[line["failed"]] = line
        elif "lost" in line:
            self._is_over(line["lost"])
            self.lost[line["lost"]] = line
            self.crashed = True
        elif "dropped" in line:
            self.dropped[line["dropped"]] = line
        elif "suspects" in line:
            for one, deaths in line["suspects"].items():
                self.suspects.setdefault(one, []).extend(deaths)
        elif "crashed" in line:
            self.crashed = True
        elif "left" in line:
            self._at_work.clear()
        elif "finished" in line:
            self._at_work.clear()
            self.winner, self.candidates = line["finished"], line["candidates"]

    def _is_over(self, one: str) -> None:
        self._at_work.pop(one, None)
        self.suspects.pop(one, None)

    def _came_back(self, one: str, doing: str) -> None:
        self._at_work.pop(one, None)
        # A candidate that is suspected of a crash in its run is not cleared by having been compiled.
        if doing not in ("compile", "lower") or set(self.suspects.get(one, ())) <= {"compile", "lower"}:
            self.suspects.pop(one, None)

    def _accuse(self) -> None:
        for one, doing in self._at_work.items():
            if one not in self.lost:
                self.suspects.setdefault(one, []).append(doing)
                self.crashed = True
        self._at_work.clear()

    def forget(self) -> None:
        """Forgets everything but crashes."""
        self.failed, self.dropped, self.winner, self.crashed = {}, {}, None, False

    def shorten(self) -> None:
        """Leaves what a later tuning would look at: the latest candidates."""
        self.failed = dict(list(self.failed.items())[-MOST_CANDIDATES:])
        self.dropped = dict(list(self.dropped.items())[-MOST_CANDIDATES:])

    def lines(self) -> Iterator[dict[str, Any]]:
        """The content in as few lines as it takes."""
        yield {"begin": self.identity, "fresh": True, "candidates": []}
        yield from (dict(line) for line in self.lost.values())
        yield {"suspects": self.suspects}
        yield from (dict(line) for line in self.failed.values())
        yield from (dict(line) for line in self.dropped.values())
        if self.crashed:
            yield {"crashed": True}
        if self.winner is not None:
            yield {"finished": self.winner, "candidates": self.candidates}
