"""The effect of each parameter of a cfg on the time, read off a record. No JAX here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..core import codec
from ..core.errors import ConfigTypeError
from ..core.record import Record
from ..core.standing import standings

Value = str


@dataclass(frozen=True)
class Effect:
    """One parameter: for each of its values the best and the middle ratio to the winner, and of how many candidates."""

    name: str
    values: Mapping[Value, tuple[float, float, int]]

    @property
    def size(self) -> float:
        """The ratio of the worst value's best candidate to the best one's."""
        bests = [best for best, _, _ in self.values.values()]
        return max(bests) / min(bests)


@dataclass(frozen=True)
class HeatMap:
    """Two parameters: the best ratio of each pair of values that was timed."""

    rows: str
    columns: str
    row_values: tuple[Value, ...]
    column_values: tuple[Value, ...]
    best: Mapping[tuple[Value, Value], float]


def effects(record: Record) -> list[Effect]:
    """The parameters with several timed values, the one that matters most first."""
    timed = _timed(record)
    found = []
    for name in dict.fromkeys(name for fields, _ in timed for name in fields):
        ratios: dict[Value, list[float]] = {}
        for fields, ratio in timed:
            ratios.setdefault(fields.get(name, "-"), []).append(ratio)
        if len(ratios) > 1:
            values = {value: (min(some), median(some), len(some)) for value, some in _in_order(ratios).items()}
            found.append(Effect(name, values))
    return sorted(found, key=lambda effect: -effect.size)


def heat_map(record: Record, most: int = 12) -> HeatMap | None:
    """The two parameters that matter most, with several values each; None where there are no two."""
    names = [effect.name for effect in effects(record) if len(effect.values) <= most]
    timed = _timed(record)
    for rows, columns in itertools.combinations(names, 2):
        best: dict[tuple[Value, Value], float] = {}
        for fields, ratio in timed:
            pair = fields.get(rows, "-"), fields.get(columns, "-")
            best[pair] = min(ratio, best.get(pair, ratio))
        row_values = tuple(_in_order(dict.fromkeys(row for row, _ in best)))
        column_values = tuple(_in_order(dict.fromkeys(column for _, column in best)))
        # A pair of parameters that only ever change together says nothing that one of them does not.
        if len(best) > max(len(row_values), len(column_values)):
            return HeatMap(rows, columns, row_values, column_values, best)
    return None


def _timed(record: Record) -> list[tuple[dict[str, Value], float]]:
    found = []
    for trial, standing in zip(record.trials, standings(record), strict=True):
        if trial.status != "ok" or standing.ratio is None:
            continue
        try:
            fields = codec.encode(trial.cfg)
        # A record may hold what no store can.
        except ConfigTypeError:
            fields = trial.cfg
        shown = fields if isinstance(fields, dict) else {"cfg": fields}
        found.append(({str(name): _text(value) for name, value in shown.items() if value is not None}, standing.ratio))
    return found


def _text(value: Any) -> Value:
    return value if isinstance(value, str) else repr(value)


def _in_order(values: Mapping[Value, Any]) -> dict[Value, Any]:
    """The values by size where all are numbers, else as they came."""
    try:
        return dict(sorted(values.items(), key=lambda item: float(item[0])))
    # A name is no number.
    except ValueError:
        return dict(values)
