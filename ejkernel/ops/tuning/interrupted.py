"""Ctrl-C in a tuning: an interrupt that carries what was known by then."""

from __future__ import annotations

from typing import Any

from ..core.record import Record


class TuningInterrupted(KeyboardInterrupt):
    """Ctrl-C after some rounds of a race; `record` holds what they say."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    @property
    def is_of_use(self) -> bool:
        """Were the winner and the heuristic cfg both timed? Without that nothing is known to be faster."""
        record = self.record
        places: list[Any] = [record.winner, record.heuristic]
        return all(place is not None and record.trials[place].samples_s for place in places)
