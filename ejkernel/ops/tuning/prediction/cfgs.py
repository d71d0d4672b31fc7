"""Cfgs of one call beside those of another, and which of them correspond. No JAX here."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..search.features import leaves


@dataclass(frozen=True)
class CfgPoint:
    """A cfg: its text, what in it is no size, and doublings of its sizes."""

    text: str
    kind: str
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
    sizes: list[float] = []
    for name, value in leaves(cfg) if isinstance(cfg, (dict, list)) else [("", cfg)]:
        is_size = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        names.append((name, "a size" if is_size else value))
        if is_size:
            sizes.append(math.log2(value))
    return CfgPoint(text, json.dumps(names, default=str), tuple(sizes))


class Matching(Protocol):
    """One way to find the cfgs of one call among those of another."""

    def __call__(self, wanted: Sequence[CfgPoint], known: Sequence[CfgPoint]) -> list[tuple[int, float] | None]:
        """For each wanted cfg the place of its counterpart and how far that is, in doublings; None where none is."""


def by_size(wanted: Sequence[CfgPoint], known: Sequence[CfgPoint]) -> list[tuple[int, float] | None]:
    """Matches a cfg with itself, or with the nearest of its kind by size."""
    exact = {cfg.text: place for place, cfg in enumerate(known)}
    found: list[tuple[int, float] | None] = []
    for cfg in wanted:
        place = exact.get(cfg.text)
        if place is not None:
            found.append((place, 0.0))
            continue
        apart = [
            (sum(abs(a - b) for a, b in zip(cfg.sizes, other.sizes, strict=True)), place)
            for place, other in enumerate(known)
            if other.kind == cfg.kind
        ]
        found.append((min(apart)[1], min(apart)[0]) if apart else None)
    return found


def by_rank(wanted: Sequence[CfgPoint], known: Sequence[CfgPoint]) -> list[tuple[int, float] | None]:
    """Matches a cfg with that of the same rank in its kind, the largest first: blocks that are a share of an axis."""
    there = {rank: place for place, rank in enumerate(ranks(known))}
    found: list[tuple[int, float] | None] = []
    for kind, rank in ranks(wanted):
        steps = [step for step in (0, 1, -1) if (kind, rank + step) in there]
        found.append((there[kind, rank + steps[0]], float(abs(steps[0]))) if steps else None)
    return found


def ranks(cfgs: Sequence[CfgPoint]) -> list[tuple[str, int]]:
    """The kind of each cfg, and its rank there, the largest first."""
    found: dict[int, tuple[str, int]] = {}
    counts: dict[str, int] = {}
    for place in sorted(range(len(cfgs)), key=lambda place: tuple(-size for size in cfgs[place].sizes)):
        kind = cfgs[place].kind
        found[place] = kind, counts.get(kind, 0)
        counts[kind] = counts.get(kind, 0) + 1
    return [found[place] for place in range(len(cfgs))]
