"""A record's candidates as rows of a table. No JAX here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from . import formatting

if TYPE_CHECKING:
    from .record import Record

_HEADER = ("cfg", "median", "spread", "ratio", "error", "status", "")


def record_table(record: Record) -> str:
    """Table of the candidates: the winner first, then by time, then those that were not timed or failed."""
    best = None if record.winner is None else record.trials[record.winner].seconds
    rows = formatting.as_text(_HEADER, [_row(record, place, best) for place in ranked(record)])
    return rows + (f"\n{record.note}" if record.note else "")


def ranked(record: Record) -> list[int]:
    """Indices of the trials in the order of the table."""
    return sorted(range(len(record.trials)), key=lambda place: (place != record.winner, _rank(record, place)))


def _rank(record: Record, place: int) -> float:
    trial = record.trials[place]
    return math.inf if trial.seconds is None or trial.status != "ok" else trial.seconds


def _row(record: Record, place: int, best: float | None) -> tuple[str, ...]:
    trial = record.trials[place]
    taken, spread = trial.seconds, trial.spread
    return (
        repr(trial.cfg),
        formatting.seconds(taken),
        "-" if spread is None else f"{spread:.1%}",
        f"{taken / best:.2f}x" if taken and best else "-",
        "-" if trial.error is None else f"{trial.error:.1e}",
        trial.status,
        notes(record, place),
    )


def notes(record: Record, place: int) -> str:
    """One candidate's role in the race, the round that dropped it, and its message."""
    trial = record.trials[place]
    roles = {"winner": place == record.winner, "tied": place in record.tied, "heuristic": place == record.heuristic}
    said = [role for role, holds in roles.items() if holds]
    if trial.dropped_round is not None:
        said.append(f"dropped in round {trial.dropped_round}")
    return ", ".join(said) + (": " if said and trial.message else "") + trial.message
