"""What the lines of a journal mean: who crashed, who failed, what was timed, and who was at work when it ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class History:
    """What is known of one key's candidates, by their ids."""

    identity: str = ""
    # Outcomes of those that took a process with them: they outlive everything else.
    lost: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    # At work when a process died, and nobody knows why it died.
    suspects: set[str] = field(default_factory=set)
    failed: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)
    rounds: list[list[tuple[str, float]]] = field(default_factory=list)
    clock: str = ""
    # Of a tuning that is over.
    winner: str | None = None
    candidates: Sequence[str | None] = ()
    _at_work: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(lines: Iterable[Mapping[str, Any]], *, alone: bool) -> History:
        """Replays a journal; alone: nobody is writing it, so who is still at work in it never came back."""
        history = History()
        for line in lines:
            history._take(line)
        if alone:
            history._accuse()
        else:
            history._at_work.clear()
        return history

    def _take(self, line: Mapping[str, Any]) -> None:
        if "begin" in line:
            self._accuse()
            if line["fresh"] or line["begin"] != self.identity:
                self.forget()
            self.identity, self.winner = line["begin"], None
        elif "starts" in line:
            if line["doing"] != "compile":
                self._only_compiling()
            self._at_work[line["starts"]] = line["doing"]
        elif "ends" in line:
            self._cleared(line["ends"])
            if line["program"]:
                self.programs[line["ends"]] = line["program"]
        elif "failed" in line:
            self._cleared(line["failed"])
            self.suspects.discard(line["failed"])
            self.failed[line["failed"]] = line
        elif "lost" in line:
            self._cleared(line["lost"])
            self.suspects.discard(line["lost"])
            self.lost[line["lost"]] = line
        elif "round" in line:
            self._only_compiling()
            if line["clock"] != self.clock:
                self.rounds, self.clock = [], line["clock"]
            self.rounds.append([(one, seconds) for one, seconds in line["round"] if one is not None])
            self.suspects -= {one for one, _ in self.rounds[-1]}
        elif "suspects" in line:
            self.suspects |= set(line["suspects"])
        elif "left" in line:
            self._at_work.clear()
        elif "finished" in line:
            self._at_work.clear()
            self.winner, self.candidates = line["finished"], line["candidates"]

    def _cleared(self, one: str) -> None:
        # Having compiled clears nobody who was at work later on.
        if self._at_work.pop(one, "compile") != "compile":
            self.suspects.discard(one)

    def _only_compiling(self) -> None:
        self._at_work = {one: doing for one, doing in self._at_work.items() if doing == "compile"}

    def _accuse(self) -> None:
        self.suspects |= self._at_work.keys() - self.lost.keys()
        self._at_work.clear()

    def forget(self) -> None:
        """Everything but who crashed."""
        self.failed, self.programs, self.rounds, self.clock, self.winner = {}, {}, [], "", None

    def lines(self) -> Iterator[dict[str, Any]]:
        """The same in as few lines as it takes."""
        yield {"begin": self.identity, "fresh": True, "candidates": []}
        yield from (dict(line) for line in self.lost.values())
        yield {"suspects": sorted(self.suspects)}
        yield from ({"ends": one, "program": program} for one, program in self.programs.items())
        yield from (dict(line) for line in self.failed.values())
        yield from ({"round": [list(pair) for pair in row], "clock": self.clock} for row in self.rounds)
