"""What the lines of a journal mean: who crashed, who failed, what was timed, and who was at work when it ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# As many rounds as a race has, and as many candidates as the largest search that ends.
MOST_SAMPLES = 40
MOST_CANDIDATES = 2000


@dataclass
class JournalContent:
    """What is known of one key's candidates, by their ids."""

    identity: str = ""
    # Outcomes of those that took a process with them: they outlive everything else.
    lost: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    # At work when a process died, and nobody knows why it died: what each was doing, once for every death.
    suspects: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)
    rounds: list[list[tuple[str, float]]] = field(default_factory=list)
    clock: str = ""
    # Of a tuning that is over.
    winner: str | None = None
    candidates: Sequence[str | None] = ()
    _at_work: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(lines: Iterable[Mapping[str, Any]], *, alone: bool) -> JournalContent:
        """Replays a journal; alone: nobody is writing it, so who is still at work in it never came back."""
        history = JournalContent()
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
            self.suspects.pop(line["failed"], None)
            self.failed[line["failed"]] = line
        elif "lost" in line:
            self._cleared(line["lost"])
            self.suspects.pop(line["lost"], None)
            self.lost[line["lost"]] = line
        elif "round" in line:
            self._only_compiling()
            if line["clock"] != self.clock:
                self.rounds, self.clock = [], line["clock"]
            self.rounds.append([(one, seconds) for one, seconds in line["round"] if one is not None])
            for one, _ in self.rounds[-1]:
                self.suspects.pop(one, None)
        elif "suspects" in line:
            for one, deaths in line["suspects"].items():
                self.suspects.setdefault(one, []).extend(deaths)
        elif "left" in line:
            self._at_work.clear()
        elif "finished" in line:
            self._at_work.clear()
            self.winner, self.candidates = line["finished"], line["candidates"]

    def _cleared(self, one: str) -> None:
        doing = self._at_work.pop(one, None)
        # Having compiled clears nobody who was at work later on.
        if doing is not None and (doing != "compile" or set(self.suspects.get(one, ())) == {"compile"}):
            self.suspects.pop(one, None)

    def _only_compiling(self) -> None:
        self._at_work = {one: doing for one, doing in self._at_work.items() if doing == "compile"}

    def _accuse(self) -> None:
        for one, doing in self._at_work.items():
            if one not in self.lost:
                self.suspects.setdefault(one, []).append(doing)
        self._at_work.clear()

    def forget(self) -> None:
        """Everything but who crashed."""
        self.failed, self.programs, self.rounds, self.clock, self.winner = {}, {}, [], "", None

    def shorten(self) -> None:
        """Leaves what a later tuning would look at: the latest samples of the latest candidates."""
        samples: dict[str, int] = {}
        kept = []
        for row in reversed(self.rounds):
            new = [(one, s) for one, s in row if samples.get(one, 0) < MOST_SAMPLES]
            new = [(one, s) for one, s in new if one in samples or len(samples) < MOST_CANDIDATES]
            samples.update({one: samples.get(one, 0) + 1 for one, _ in new})
            kept.append(new)
        self.rounds = [row for row in reversed(kept) if row]
        self.failed = dict(list(self.failed.items())[-MOST_CANDIDATES:])
        self.programs = {one: program for one, program in self.programs.items() if one in samples}

    def lines(self) -> Iterator[dict[str, Any]]:
        """The same in as few lines as it takes."""
        yield {"begin": self.identity, "fresh": True, "candidates": []}
        yield from (dict(line) for line in self.lost.values())
        yield {"suspects": self.suspects}
        yield from ({"ends": one, "program": program} for one, program in self.programs.items())
        yield from (dict(line) for line in self.failed.values())
        yield from ({"round": [list(pair) for pair in row], "clock": self.clock} for row in self.rounds)
        if self.winner is not None:
            yield {"finished": self.winner, "candidates": self.candidates}
