"""Calls of a program with candidates that were still being compiled when the time of their call was up.

A call gets a part of the budget before it is known what its candidates take to compile. The first one waits for a
worker and compilers besides. What later calls leave of their parts is theirs: such a call is tuned once more, and those
of which nothing was measured first.
"""

from __future__ import annotations

from .results import Entry

# Of the candidates that may run, so many are enough; one that compiles for ever is left behind by every tuning.
_ENOUGH = 0.8
# A second tuning compiles everything anew: with no more time than the first it would get no further.
_LONGER = 1.5


def raced(entry: Entry) -> int:
    """Candidates of a call with times."""
    return 0 if entry.record is None else sum(bool(trial.samples_s) for trial in entry.record.trials)


def is_worth_more(entry: Entry, took: float, left: float) -> bool:
    """Were many candidates left behind, and is there so much more time that they may be reached?"""
    if entry.record is None or left < _LONGER * took:
        return False
    late = sum(trial.status == "timeout" for trial in entry.record.trials)
    return late > 0 and (not entry.is_measured or raced(entry) < _ENOUGH * (raced(entry) + late))
