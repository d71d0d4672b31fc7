"""Cfgs as numbers: sizes by their logarithm, and all else as a kind that is equal or not. No JAX here."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..search.features import Array, Places, leaves

# A cfg is known where one of its kind is within so many doublings of it.
_COUNTERPART = 1.5


@dataclass(frozen=True)
class CfgPoint:
    """A cfg: its text, what in it is no size, and doublings of its sizes by field."""

    text: str
    kind: str
    fields: tuple[str, ...]
    sizes: tuple[float, ...]


_text_of = json.JSONEncoder(sort_keys=True).encode


def cfg_point(cfg: Any) -> CfgPoint:
    """The numbers of an encoded cfg."""
    return _point(_text_of(cfg))


# The records of an operation have the same cfgs again and again.
@functools.lru_cache(maxsize=4096)
def _point(text: str) -> CfgPoint:
    cfg = json.loads(text)
    names: list[tuple[str, Any]] = []
    fields: list[str] = []
    sizes: list[float] = []
    for name, value in leaves(cfg) if isinstance(cfg, (dict, list)) else [("", cfg)]:
        is_size = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        names.append((name, "a size" if is_size else value))
        if is_size:
            fields.append(name)
            sizes.append(math.log2(value))
    return CfgPoint(text, json.dumps(names, default=str), tuple(fields), tuple(sizes))


class CfgTable:
    """The cfgs of some calls as rows: sizes, and the number of the kind.

    Where calls share few cfgs these are shares of an axis, as halves and quarters: the rank in the kind, the largest
    first, is one more column then, and the records show which of the two matters.
    """

    def __init__(self, calls: Sequence[Sequence[CfgPoint]]) -> None:
        self.ranked = not _share(calls)
        self._fields = {
            name: column
            for column, name in enumerate(dict.fromkeys(name for call in calls for cfg in call for name in cfg.fields))
        }
        self._kinds: dict[str, int] = {}
        rows: dict[tuple[str, int], int] = {}
        cfgs: list[tuple[CfgPoint, int]] = []
        # The row of each cfg of each call.
        self.places: list[list[int]] = []
        for call in calls:
            mine = []
            for cfg, rank in zip(call, self._ranks(call), strict=True):
                self._kinds.setdefault(cfg.kind, len(self._kinds))
                if (cfg.text, rank) not in rows:
                    rows[cfg.text, rank] = len(rows)
                    cfgs.append((cfg, rank))
                mine.append(rows[cfg.text, rank])
            self.places.append(mine)
        self._texts = {text for text, _ in rows}
        self.sizes, self.kinds = self._numbers([cfg for cfg, _ in cfgs], [rank for _, rank in cfgs])

    def _ranks(self, cfgs: Sequence[CfgPoint]) -> list[int]:
        return ranks(cfgs) if self.ranked else [0] * len(cfgs)

    def _numbers(self, cfgs: Sequence[CfgPoint], ranked: Sequence[int]) -> tuple[Array, Places]:
        sizes = np.zeros((len(cfgs), len(self._fields) + self.ranked))
        for place, (cfg, rank) in enumerate(zip(cfgs, ranked, strict=True)):
            for name, size in zip(cfg.fields, cfg.sizes, strict=True):
                if name in self._fields:
                    sizes[place, self._fields[name]] = size
            if self.ranked:
                sizes[place, -1] = rank
        return sizes, np.array([self._kinds.get(cfg.kind, -1) for cfg in cfgs], np.int64)

    def rows(self, cfgs: Sequence[CfgPoint]) -> tuple[Array, Places, NDArray[np.bool_]]:
        """Other cfgs as rows, and which of them the records know: by size, or by rank."""
        sizes, kinds = self._numbers(cfgs, self._ranks(cfgs))
        known = np.array([cfg.text in self._texts for cfg in cfgs])
        for place in np.flatnonzero(~known):
            alike = self.sizes[self.kinds == kinds[place]]
            apart = np.abs(alike - sizes[place])
            known[place] = bool((apart[:, : len(self._fields)].sum(axis=1) <= _COUNTERPART).any())
            if self.ranked:
                known[place] |= bool((apart[:, -1] <= 1.0).any())
        return sizes, kinds, known


def _share(calls: Sequence[Sequence[CfgPoint]]) -> bool:
    """Do most calls have the same cfgs?"""
    pairs = list(itertools.pairwise({cfg.text for cfg in call} for call in calls))
    return sum(len(one & other) for one, other in pairs) >= 0.8 * sum(min(map(len, pair)) for pair in pairs)


def ranks(cfgs: Sequence[CfgPoint]) -> list[int]:
    """The rank of each cfg in its kind, the largest first."""
    found: dict[int, int] = {}
    counts: dict[str, int] = {}
    for place in sorted(range(len(cfgs)), key=lambda place: tuple(-size for size in cfgs[place].sizes)):
        kind = cfgs[place].kind
        found[place] = counts.get(kind, 0)
        counts[kind] = found[place] + 1
    return [found[place] for place in range(len(cfgs))]
