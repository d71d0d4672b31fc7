"""A record's candidates as rows of a table. No JAX here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from . import formatting
from .standing import Standing, standings, verdict

if TYPE_CHECKING:
    from .record import Record

HEADER = ("cfg", "time", "spread", "ratio", "error", "status", "")


def record_table(record: Record) -> str:
    """Table of the candidates: the winner first, then by time, then those that were not timed or failed."""
    return f"{formatting.as_text(HEADER, record_rows(record))}\n{verdict(record).text}"


def record_rows(record: Record) -> list[tuple[str, ...]]:
    """The cells of the table, under `HEADER`."""
    shown = standings(record)
    return [_row(record, place, shown[place]) for place in ranked(record)]


def ranked(record: Record) -> list[int]:
    """Indices of the trials in the order of the table."""
    shown = standings(record)
    return sorted(range(len(record.trials)), key=lambda i: (i != record.winner, _rank(record, i, shown[i])))


def _rank(record: Record, place: int, standing: Standing) -> float:
    is_timed = standing.seconds is not None and record.trials[place].status == "ok"
    return standing.seconds if is_timed and standing.seconds is not None else math.inf


def _row(record: Record, place: int, standing: Standing) -> tuple[str, ...]:
    trial = record.trials[place]
    return (
        formatting.short(trial.cfg),
        formatting.seconds(standing.seconds if trial.status == "ok" else None),
        "-" if trial.spread is None else f"{trial.spread:.1%}",
        "-" if standing.ratio is None else f"{standing.ratio:.2f}x",
        "-" if trial.error is None else f"{trial.error:.1e}",
        trial.status,
        notes(record, place, standing),
    )


def notes(record: Record, place: int, standing: Standing) -> str:
    """One candidate's role in the race, the round that dropped it, and its message."""
    trial = record.trials[place]
    roles = {"winner": place == record.winner, "tied": place in record.tied, "heuristic": place == record.heuristic}
    said = [role for role, holds in roles.items() if holds]
    if record.space is not None and trial.samples_s and standing.ratio is None:
        said.append("timed in an earlier batch")
    elif trial.dropped_round is not None:
        said.append(f"dropped in round {trial.dropped_round}" if trial.dropped_round else "dropped before the race")
    return ", ".join(said) + (": " if said and trial.message else "") + trial.message
