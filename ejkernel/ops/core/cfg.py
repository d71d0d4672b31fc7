"""Equality of cfgs, and lists of cfgs without repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def same(one: Any, other: Any) -> bool:
    """Are these one cfg? 1, 1.0 and True are three."""
    return one is other or (_form(one) == _form(other) and _equal(one, other))


def distinct(cfgs: Sequence[Any]) -> list[Any]:
    """The cfgs without repetitions, in order; 1, 1.0 and True are three."""
    firsts = sorted(place for same in _alike(cfgs).values() for place in same)
    return [cfgs[place] for place in firsts]


def places(cfgs: Sequence[Any], wanted: Sequence[Any]) -> list[int]:
    """Indices at which the wanted cfgs first stand among `cfgs`, each once, in the order of `wanted`."""
    alike = _alike(cfgs)
    found = [place for cfg in wanted for place in alike.get(_form(cfg), ()) if _equal(cfg, cfgs[place])]
    return list(dict.fromkeys(found))


def _alike(cfgs: Sequence[Any]) -> dict[tuple[type, str], list[int]]:
    """The distinct cfgs by their printed form: only those with one form need to be compared with each other."""
    alike: dict[tuple[type, str], list[int]] = {}
    for place, cfg in enumerate(cfgs):
        same = alike.setdefault(_form(cfg), [])
        if not any(_equal(cfg, cfgs[other]) for other in same):
            same.append(place)
    return alike


def _form(cfg: Any) -> tuple[type, str]:
    return type(cfg), repr(cfg)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    # An array inside a cfg makes its comparison an array; then the printed form, equal by now, has to do.
    except ValueError:
        return True
