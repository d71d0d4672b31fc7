"""Parametrised tests of which the default suite runs a part, and the campaigns all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

AT_LENGTH = pytest.mark.slow(at_length=True)


def each_once(one: Mapping[str, Any], other: Iterable[Any]) -> list[Any]:
    """Cases of two parameters: by default each value of both is in one at least."""
    others = list(other)
    by_default = {(i % len(one), i % len(others)) for i in range(max(len(one), len(others)))}
    return [
        pytest.param(one[name], value, id=f"{name}-{value}", marks=() if (i, j) in by_default else AT_LENGTH)
        for i, name in enumerate(one)
        for j, value in enumerate(others)
    ]


def any_two(*parameters: Mapping[str, Any]) -> list[Any]:
    """Cases of several parameters: by default few, in which any two values of two parameters occur together."""
    every = list(itertools.product(*(enumerate(values) for values in parameters)))
    missing = set().union(*map(_twos, every))
    by_default = set()
    while missing:
        best = max(every, key=lambda case: len(_twos(case) & missing))
        by_default.add(best)
        missing -= _twos(best)
    return [
        pytest.param(
            *(values[name] for values, (_, name) in zip(parameters, case, strict=True)),
            id="-".join(name for _, name in case),
            marks=() if case in by_default else AT_LENGTH,
        )
        for case in every
    ]


def _twos(case: tuple[tuple[int, str], ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(case), 2))
