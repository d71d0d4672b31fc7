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


def mark_at_length(items: Iterable[pytest.Item]) -> None:
    """Of a test marked `thinned`, by default each value of each of its parameters is in one case at least."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("thinned"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        missing = set().union(*map(_ones, cases))
        while missing:
            best = max(cases, key=lambda case: len(_ones(case) & missing))
            cases.remove(best)
            missing -= _ones(best)
        for case in cases:
            case.add_marker(AT_LENGTH)


def of_later_legs(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests that run after an earlier leg: of those of one leg none, or the first case that the suite has."""
    left, begun = [], set()
    for item in items:
        mark = item.get_closest_marker("one_leg")
        test = item.nodeid.partition("[")[0]
        if mark is None:
            left.append(item)
        elif mark.kwargs.get("but_first") and test not in begun and not item.get_closest_marker("slow"):
            begun.add(test)
            left.append(item)
    return left


def _ones(item: Any) -> set[Any]:
    # Values of a product are the same objects in all its cases, and need not be hashable.
    left = {name: id(value) for name, value in item.callspec.params.items()}
    found = set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        found.add(tuple((name, left.pop(name)) for name in names))
    return found | set(left.items())


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
