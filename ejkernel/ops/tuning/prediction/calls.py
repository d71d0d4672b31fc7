"""Calls as numbers: sizes by their logarithm, and all else as names that are equal or not. No JAX here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..search.features import Array

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](.*)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(\.\d*)?(e[+-]?\d+)?")
# Beyond 128 it makes no difference how often two divides a size, and each time counts as a quarter of a doubling.
_MOST_TWOS = 7
_TWOS = 0.25


@dataclass(frozen=True)
class CallPoint:
    """A call: doublings of its sizes by name, and what cannot be counted."""

    sizes: Mapping[str, float]
    names: Mapping[str, str]


def point_of(call: Mapping[str, str]) -> CallPoint:
    """The numbers of a call from its readable parts."""
    sizes: dict[str, float] = {}
    names: dict[str, str] = {}
    for part, text in call.items():
        array = _ARRAY.fullmatch(text)
        if array is not None:
            dims = [int(size) for size in array[2].split(",") if size]
            names[part] = f"{array[1]}, {len(dims)} axes{array[3]}"
            sizes |= {f"{part} axis {axis}": _doublings(size) for axis, size in enumerate(dims)}
            if len(dims) > 2:
                # Leading axes often are one: rows of a batch of sequences.
                sizes[f"{part} rows"] = sum(map(_doublings, dims[:-1]))
            if dims:
                sizes[f"{part} even"] = _TWOS * _twos(dims[-1])
        elif _NUMBER.fullmatch(text) and float(text) >= 0:
            sizes[part] = _doublings(float(text))
        else:
            names[part] = text
    return CallPoint(sizes, names)


def _doublings(size: float) -> float:
    return math.log2(1.0 + min(size, 1e300))


def _twos(size: int) -> int:
    return min(_MOST_TWOS, (size & -size).bit_length() - 1) if size else 0


@dataclass(frozen=True)
class CallTable:
    """Some calls as rows of numbers: columns that are the same for all of them, or repeat another, are left out."""

    # Columns of sizes first, then one for each name that differs, as the number of its value.
    rows: Array
    sizes: tuple[str, ...]
    names: tuple[str, ...]
    levels: tuple[Mapping[str, int], ...]
    # What all calls have in common.
    common: Mapping[str, str]

    @staticmethod
    def of(points: Sequence[CallPoint]) -> CallTable:
        """The table of some calls."""
        columns: dict[str, Array] = {}
        for name in dict.fromkeys(name for point in points for name in point.sizes):
            known = [point.sizes.get(name, math.nan) for point in points]
            column = np.array(known)
            # A call without this axis lies in the middle of those that have it; a name tells it apart.
            column = np.where(np.isnan(column), np.nanmean(column), column)
            if np.ptp(column) > 0 and not any(np.array_equal(column, other) for other in columns.values()):
                columns[name] = column
        all_names = dict.fromkeys(name for point in points for name in point.names)
        values = {name: [point.names.get(name, "") for point in points] for name in all_names}
        differ = [name for name, found in values.items() if len(set(found)) > 1]
        levels = tuple({text: number for number, text in enumerate(dict.fromkeys(values[name]))} for name in differ)
        coded = [np.array([level[t] for t in values[name]], float) for name, level in zip(differ, levels, strict=True)]
        every = [*columns.values(), *coded]
        return CallTable(
            np.stack(every, axis=1) if every else np.zeros((len(points), 0)),
            tuple(columns),
            tuple(differ),
            levels,
            {name: found[0] for name, found in values.items() if name not in differ},
        )

    @cached_property
    def middle(self) -> Array:
        """The middle of each column."""
        return np.asarray(self.rows.mean(axis=0))

    def row(self, point: CallPoint) -> Array:
        """Another call as a row."""
        middle = self.middle
        sizes = [point.sizes.get(name, middle[place]) for place, name in enumerate(self.sizes)]
        # A value that no known call has is like none of them.
        coded = [level.get(point.names.get(name, ""), -1) for name, level in zip(self.names, self.levels, strict=True)]
        return np.array([*sizes, *coded], float)

    def apart(self, one: Array, other: Array) -> Array:
        """Differences by column of every pair of rows: doublings, or one where names differ."""
        differ = one[:, None, :] - other[None, :, :]
        count = len(self.sizes)
        return np.concatenate([differ[..., :count], (differ[..., count:] != 0).astype(float)], axis=-1)
