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
        """Were the winner, the heuristic cfg and another one timed? Without that nothing is known to be faster."""
        record = self.record
        places: list[Any] = [record.winner, record.heuristic]
        timed = [place for place, trial in enumerate(record.trials) if trial.samples_s]
        return len(timed) > 1 and all(place in timed for place in places)
