"""Equality of cfgs, and lists of cfgs without repetitions. No JAX here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import codec
from .errors import ConfigTypeError


def same(one: Any, other: Any) -> bool:
    """Are these one cfg to a kernel, of one type? 1, 1.0 and True are three."""
    return one is other or (_form(one) == _form(other) and _equal(one, other))


def same_kept(one: Any, other: Any) -> bool:
    """Would a file hold these as one cfg? A store without its kernel gives plain JSON back, and no type."""
    return key(one) == key(other)


def key(cfg: Any) -> str:
    """The cfg as a file holds it: one text for a cfg and for what a store gives back of it, in every process."""
    try:
        return json.dumps(codec.encode(cfg), sort_keys=True)
    # A cfg that JSON cannot hold: as Python prints it.
    except ConfigTypeError:
        return repr(cfg)


def distinct(cfgs: Sequence[Any]) -> list[Any]:
    """The cfgs without repetitions, in order; 1, 1.0 and True are three."""
    firsts = sorted(place for alike in _alike(cfgs).values() for place in alike)
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
        known = alike.setdefault(_form(cfg), [])
        if not any(_equal(cfg, cfgs[other]) for other in known):
            known.append(place)
    return alike


def _form(cfg: Any) -> tuple[type, str]:
    return type(cfg), repr(cfg)


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return bool(one == other)
    # An array inside a cfg makes its comparison an array, and the printed form of a large one leaves values out.
    except ValueError:
        return _equal_in_parts(one, other)


def _equal_in_parts(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        return all(_equal(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(part, other[name]) for name, part in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "__array__"):
        mine, theirs = one.__array__(), other.__array__()
        return (mine.shape, mine.dtype, mine.tobytes()) == (theirs.shape, theirs.dtype, theirs.tobytes())
    return False
