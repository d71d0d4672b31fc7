"""Candidates that were compiled quickly: which may win once the compiler has timed their parts, and which cannot.

Until a candidate with the same parts has been compiled for speed, a candidate may win if it is not far behind. That
compilation shows how many seconds the parts gain. All candidates with these parts gain the same, since only their
kernels differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

# A compiler that times its products made programs up to 1.4 times as fast on an H200: a quick program that takes longer
# than the fastest by more than this factor cannot win by that.
HOPELESS = 1.6
# Once the gain of its parts is known, a candidate is compiled for speed if its time less that gain is within this
# factor of the fastest: the shortest of a few runs varies by a few percent.
NEAR = 1.05


@dataclass(frozen=True)
class Hopeless:
    """The reason that a candidate cannot win; `is_estimated` where a gain was taken off its time."""

    ratio: float
    is_estimated: bool = False

    @property
    def message(self) -> str:
        """The reason as a record has it."""
        if self.is_estimated:
            return f"{self.ratio:.2f} times as long as the fastest, with the gain of equal parts"
        return f"{self.ratio:.1f} times as long as the fastest, before the compiler has timed its parts"


@final
@dataclass
class QuickCandidates:
    """Seconds of candidates by a first look; `quick` holds those that were compiled quickly.

    `parts` names what the compiler would time of each of these.

    The candidate that is `kept` is compiled for speed, however slow it is.
    """

    seconds: Mapping[int, float]
    quick: Collection[int]
    parts: Callable[[int], str]
    kept: int | None = None
    # Seconds of the programs that are there now: quick ones, and those that were compiled for speed.
    _quick: dict[int, float] = field(init=False)
    _for_speed: dict[int, float] = field(init=False)
    _gained: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._quick = {number: seconds for number, seconds in self.seconds.items() if number in self.quick}
        self._for_speed = {number: seconds for number, seconds in self.seconds.items() if number not in self.quick}

    @property
    def standard(self) -> int | None:
        """A candidate with one program from the first look on: later looks are scaled by its time."""
        if self.kept in self.seconds and self.kept not in self.quick:
            return self.kept
        return min((n for n in self.seconds if n not in self.quick), key=lambda n: self.seconds[n], default=None)

    def in_order(self, numbers: Collection[int]) -> list[int]:
        """The one that is kept, the fastest of those with the same parts, and the others; each by its seconds."""
        ordered = sorted(numbers, key=lambda n: (n != self.kept, self.seconds[n]))
        first: dict[str, int] = {}
        for number in ordered:
            first.setdefault(self.parts(number), number)
        return sorted(ordered, key=lambda n: (n != self.kept, first[self.parts(n)] != n, self.seconds[n]))

    def note(self, numbers: Sequence[int], found: Mapping[int, float]) -> None:
        """Notes that these were compiled for speed, with the seconds of those that run, and of the standard."""
        for number in numbers:
            del self._quick[number]
        standard = self.standard
        # Scales the times to the first look: a device that has worked for minutes is some percent slower.
        scale = 1.0 if standard is None or standard not in found else self.seconds[standard] / found[standard]
        for number in found.keys() & set(numbers):
            took = self._for_speed[number] = found[number] * scale
            parts, gain = self.parts(number), self.seconds[number] - took
            self._gained[parts] = max(gain, self._gained.get(parts, -math.inf))

    def why_hopeless(self, number: int) -> Hopeless | None:
        """The reason that a candidate cannot win; None where it may."""
        gain = self._gained.get(self.parts(number))
        if number == self.kept:
            return None
        if gain is not None:
            # Compares with programs compiled for speed alone: the seconds of a quick one would change too.
            ratio = (self.seconds[number] - gain) / min(self._for_speed.values())
            return Hopeless(ratio, is_estimated=True) if ratio > NEAR else None
        ratio = self.seconds[number] / min([*self._quick.values(), *self._for_speed.values()])
        return Hopeless(ratio) if ratio > HOPELESS else None
