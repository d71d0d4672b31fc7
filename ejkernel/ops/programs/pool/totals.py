"""The part of each worker in the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from ...core import formatting


@dataclass
class WorkerTotals:
    """Calls and seconds of one worker."""

    tuned: int = 0
    failed: int = 0
    refused: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """The totals in a few words."""
        more = [f"{count} {word}" for count, word in ((self.failed, "failed"), (self.refused, "refused")) if count]
        calls = "1 call" if self.tuned == 1 else f"{self.tuned} calls"
        return f"{', '.join([f'{calls} tuned', *more])} in {formatting.duration(self.seconds)}"


# A result lists so many workers; the others share a line.
_MOST_LINES = 32


@final
@dataclass
class PoolTotals:
    """The workers that answered, by their names."""

    workers: dict[str, WorkerTotals] = field(default_factory=dict)

    def of(self, worker: str) -> WorkerTotals:
        """The totals of one worker."""
        return self.workers.setdefault(worker, WorkerTotals())

    def lines(self) -> list[str]:
        """A line for each worker, those with the most calls first."""
        ranked = sorted(self.workers.items(), key=lambda item: (-item[1].tuned, item[0]))
        lines = [f"worker {name}: {totals}" for name, totals in ranked[:_MOST_LINES]]
        rest = [totals for _, totals in ranked[_MOST_LINES:]]
        if rest:
            whole = WorkerTotals(*(sum(getattr(one, name) for one in rest) for name in WorkerTotals.__match_args__))
            lines.append(f"{len(rest)} more workers: {whole}")
        return lines
