"""Reading the lines of a journal: which candidates crashed, failed or were dropped, and which was at work last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# As many candidates as the largest search that ends.
MOST_CANDIDATES = 2000


@dataclass
class JournalContent:
    """Outcomes of one key's candidates, by their ids."""

    identity: str = ""
    # Outcomes of those that took a process with them: they outlive everything else.
    lost: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    # At work when a process died of an unknown cause: what each was doing, once for every death.
    suspects: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    # Timed, and slower than the best: seconds, ratio, clock and program.
    dropped: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    # Did a candidate crash, or a process die, since the first was dropped? Then it may have been dropped against one
    # that cannot be used.
    crashed: bool = False
    # Of a tuning that is over.
    winner: str | None = None
    candidates: Sequence[str | None] = ()
    _at_work: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(lines: Iterable[Mapping[str, Any]], *, alone: bool) -> JournalContent:
        """Replays a journal; alone: no process is writing it, so that a candidate still at work never came back."""
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
        # A candidate that compiles may still crash when it runs, which it was suspected of.
        if doing not in ("compile", "lower") or set(self.suspects.get(one, ())) <= {"compile", "lower"}:
            self.suspects.pop(one, None)

    def _accuse(self) -> None:
        for one, doing in self._at_work.items():
            if one not in self.lost:
                self.suspects.setdefault(one, []).append(doing)
                self.crashed = True
        self._at_work.clear()

    def forget(self) -> None:
        """Everything but crashes."""
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
