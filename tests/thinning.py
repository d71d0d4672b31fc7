"""Parametrised tests of which the default suite runs a part, and the campaigns all."""

from __future__ import annotations

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
