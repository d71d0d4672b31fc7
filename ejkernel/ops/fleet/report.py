"""Report on a program's agreed decisions: the deciding process, the tier and cfg, and each process's wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core import formatting
from ..core.codec import describe
from ..core.key import Key
from ..core.record import Objective
from ..core.shown import Shown


@dataclass(frozen=True, repr=False)
class Agreed(Shown):
    """One decision that holds for the whole program."""

    key: Key
    objective: Objective
    cfg: Any
    # The process that decided, and the tier that it had the cfg from.
    process: int
    tier: str
    tuned_for: Objective | None = None
    # Why the heuristic cfg was published in place of a decision.
    why: str = ""
    # Seconds that each process waited, as far as they have asked; the one that decided is among them.
    waited: Mapping[int, float] = field(default_factory=dict)
    # False: a guess.
    measured: bool = False

    def in_short(self) -> str:
        """The value in a few words."""
        return f"{self.key}, {formatting.short(self.cfg)} from {self.tier} of process {self.process}"

    def __str__(self) -> str:
        """The decision in a line or two."""
        each = sorted(self.waited.items())
        waits = ", ".join(f"{process} {formatting.seconds(seconds)}" for process, seconds in each)
        text = f"{self.key}, {self.objective}: {describe(self.cfg)} from {self.tier} of process {self.process}"
        return f"{text}; waited: {waits or 'no process'}" + (f"\n  {self.why}" if self.why else "")


@dataclass(frozen=True, repr=False)
class AgreementReport(Shown):
    """Every decision that this process knows to be agreed, in the order in which it asked."""

    process: int
    processes: int
    agreed: tuple[Agreed, ...] = ()

    def in_short(self) -> str:
        """The value in a few words."""
        return f"process {self.process} of {self.processes}, {len(self.agreed)} agreed"

    def __str__(self) -> str:
        """The report as messages show it."""
        head = f"process {self.process} of {self.processes}: {len(self.agreed)} agreed"
        return "\n".join([head, *map(str, self.agreed)])
