"""Configs as numbers, made from their own fields: what a strategy sees of an enumerated space."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.codec import is_model, is_named_tuple

Array = NDArray[np.float64]
# Positions of cfgs, calls or kinds in a list.
Places = NDArray[np.int64]

# Deeper than any real config.
_DEEPEST = 16
# Numbers that span at least this ratio count by their logarithm: 16 to 32 is as far as 128 to 256.
_LOG_RATIO = 4.0
# Blocks are laid out by powers of two: 96 is more like 160 than like 97. Beyond 64 that says nothing new.
_MOST_TWOS = 6

# Whole numbers from 0 may be names of methods up to so many, and names have a column each up to so many.
_MOST_METHODS = 8
_MOST_NAMES = 64

_ABSENT = "<absent>"
# Values without fields of their own.
_PLAIN = {int, float, str, bool, type(None)}


@dataclass(frozen=True)
class Space:
    """Some configs as numbers: `codes` tell equal field values, `points` how far apart they are."""

    # One row a config, one column a field that varies: which of the field's values it has.
    codes: NDArray[np.int32]
    # One row a config; several columns may belong to one field. Each spans 0 to 1.
    points: NDArray[np.float64]
    # For each column of `points`: columns of one group are one question, such as which of some names.
    groups: NDArray[np.int32]
    names: tuple[str, ...] = ()
    # For each column of `points` with the logarithm of a size: doublings from 0 to 1; zero for all others.
    doublings: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    # Configs to measure first: the heuristic's, then what was found for other calls or on other devices.
    starts: tuple[int, ...] = ()
    # Terms of the search: configs that it may measure in all, where that is known, and the smallest batch that is
    # worth its compilation.
    budget: int | None = None
    wave: int = 1

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def has_fields(self) -> bool:
        """Is there anything to learn from?"""
        return bool(self.codes.shape[1])

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The number of values of each field."""
        return self.codes.max(axis=0) + 1 if len(self.codes) else np.zeros(self.codes.shape[1], np.int64)

    def distance(self, one: int) -> NDArray[np.int64]:
        """The number of fields in which each config differs from this one."""
        return np.asarray((self.codes != self.codes[one]).sum(axis=1))


def space_of(cfgs: Sequence[Any], starts: Sequence[int] = ()) -> Space:
    """The space of some configs; one without any field that varies where they have none."""
    codes, columns, kept = [], [], []
    groups: list[int] = []
    doublings: list[float] = []
    for name, values in _values(cfgs).items():
        levels, code = _levels(values)
        if len(levels) < 2:
            continue
        codes.append(code)
        kept.append(name)
        doublings.append(_doublings(levels))
        for group in _columns(levels):
            number = groups[-1] + 1 if groups else 0
            for column in group:
                columns.append(column[code])
                groups.append(number)
                doublings += [0.0] * (len(columns) - len(doublings))
    empty = (len(cfgs), 0)
    return Space(
        np.stack(codes, axis=1) if codes else np.zeros(empty, np.int32),
        np.stack(columns, axis=1) if columns else np.zeros(empty),
        np.array(groups, np.int32),
        tuple(kept),
        np.array(doublings),
        tuple(starts),
    )


def _values(cfgs: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """The values of each named leaf, over all configs."""
    columns = _plain_columns(cfgs)
    if columns is not None and all(set(map(type, values)) <= _PLAIN for values in columns.values()):
        return columns
    rows = [dict(leaves(cfg)) for cfg in cfgs]
    every = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, _ABSENT) for row in rows] for name in every}


def _plain_columns(cfgs: Sequence[Any]) -> dict[str, Sequence[Any]] | None:
    """The values by field, where all configs are of one kind with the same fields.

    A hundred thousand configs are common: by fields, not by configs, this takes a tenth of the time.
    """
    kinds = set(map(type, cfgs))
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    if dataclasses.is_dataclass(kind):
        return {f.name: [getattr(cfg, f.name) for cfg in cfgs] for f in dataclasses.fields(kind)}
    names = list(cfgs[0]) if kind is dict else []
    if names and all(isinstance(name, str) for name in names) and all(cfg.keys() == cfgs[0].keys() for cfg in cfgs):
        return {name: [cfg[name] for cfg in cfgs] for name in names}
    return None


def leaves(cfg: Any) -> Iterator[tuple[str, Any]]:
    """The named values of a config, however deep; nothing for a value that has no fields."""
    found = _fields(cfg)
    if found is not None:
        for name, value in found.items():
            yield from _leaves(value, str(name), 1)


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    found = _fields(value) if depth < _DEEPEST else None
    if not found:
        yield path, value
        return
    for name, part in found.items():
        yield from _leaves(part, f"{path}.{name}", depth + 1)


def _fields(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if is_model(type(value)):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if is_named_tuple(type(value)):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    return None


def _levels(values: Sequence[Any]) -> tuple[list[Any], NDArray[np.int32]]:
    """The distinct values of a field in a stable order, and which one each config has."""
    # Values of one plain kind are equal where Python says so; otherwise 1, 1.0 and True are three values.
    plain = len(kinds := set(map(type, values))) == 1 and kinds <= {int, str, bool}
    known = {value: _name(value) for value in set(values)} if plain else None
    names = [known[value] for value in values] if known is not None else [_name(value) for value in values]
    first = dict(zip(names, values, strict=True))
    order = sorted(first, key=lambda name: (not _is_number(first[name]), _sort_key(first[name]), name))
    place = {name: number for number, name in enumerate(order)}
    return [first[name] for name in order], np.array([place[name] for name in names], np.int32)


def _name(value: Any) -> tuple[str, str]:
    # 1, 1.0 and True are three values, and not every value can be hashed.
    return type(value).__qualname__, value if type(value) is str else repr(value)


def _sort_key(value: Any) -> float:
    return float(value) if _is_number(value) else 0.0


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, enum.Enum)) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        return math.isfinite(float(value))
    # A whole number beyond any float.
    except OverflowError:
        return False


def _columns(levels: Sequence[Any]) -> Iterator[list[NDArray[np.float64]]]:
    """Columns by level, in groups: numbers on a line, all else as one column a value."""
    numbers = [_is_number(level) for level in levels]
    line = np.array([float(v) if number else math.nan for v, number in zip(levels, numbers, strict=True)])
    on_a_line = len(set(line[~np.isnan(line)].tolist())) > 1
    if on_a_line:
        yield [_line(line)]
        twos = _twos(levels, numbers)
        if twos is not None:
            yield [twos]
    # 0, 1, 2 may count something or name methods: both views are given, and the model finds which one tells.
    is_index = all(numbers) and 2 < len(levels) <= _MOST_METHODS and line.tolist() == list(range(len(levels)))
    if is_index or not on_a_line or not all(numbers):
        yield _names(len(levels))


def _names(count: int) -> list[NDArray[np.float64]]:
    """One column a value; for very many values, which are hardly ever seen twice, one column in all."""
    if count > _MOST_NAMES:
        return [np.linspace(0.0, 1.0, count)]
    return list(np.eye(count)[:1] if count == 2 else np.eye(count))


def _line(values: NDArray[np.float64]) -> NDArray[np.float64]:
    known = values[~np.isnan(values)]
    low, high = known.min(), known.max()
    if low > 0 and high / low >= _LOG_RATIO:
        values = np.log(values)
    elif low == 0 and len(known) > 2:
        values = np.log1p(values)
    low, high = np.nanmin(values), np.nanmax(values)
    # What is no number lies in the middle; a column of its own tells it apart.
    return np.nan_to_num((values - low) / (high - low), nan=0.5)


def _doublings(levels: Sequence[Any]) -> float:
    """Doublings from the smallest to the largest size; zero where a field is not one of sizes."""
    if not all(map(_is_number, levels)) or min(levels) <= 0:
        return 0.0
    ratio = float(max(levels)) / float(min(levels))
    return math.log2(ratio) if ratio >= _LOG_RATIO else 0.0


def _twos(levels: Sequence[Any], numbers: Sequence[bool]) -> NDArray[np.float64] | None:
    """Powers of two in each value, where these do not just follow the value's size."""
    whole = [int(v) for v, number in zip(levels, numbers, strict=True) if number and float(v).is_integer() and v > 0]
    if len(whole) != len(levels) or len(whole) < 3 or all(v & (v - 1) == 0 for v in whole):
        return None
    found = np.array([min(_MOST_TWOS, (v & -v).bit_length() - 1) for v in whole], float)
    span = found.max() - found.min()
    return (found - found.min()) / span if span else None
