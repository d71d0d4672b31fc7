"""When two cfgs are one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops.core import codec
from ejkernel.ops.core.cfg import distinct, key, places, same


@dataclass(frozen=True)
class Tiles:
    """A cfg with a nested part."""

    size: Any
    more: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize("make", [lambda: 1, lambda: "a", lambda: (1, 2.0), lambda: {"a": [1]}, lambda: Tiles(3)])
def test_equal_cfgs_of_one_type_are_the_same(make):
    """However often they are made."""
    assert same(make(), make())
    assert key(make()) == key(make())


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), (Tiles(1), Tiles(True)), ((1,), [1])])
def test_what_python_calls_equal_may_be_two_cfgs(one, other):
    """1, 1.0 and True are three to a kernel, at any depth."""
    assert not same(one, other)
    assert len(distinct([one, other])) == 2


@pytest.mark.parametrize("make", [np.arange, jnp.arange], ids=["numpy", "jax"])
def test_arrays_inside_a_cfg_are_compared_by_value(make):
    """Printed, two large arrays that differ in the middle look alike."""
    one, equal, other = (Tiles(1, {"table": [make(5000)]}) for _ in range(3))
    other.more["table"][0] = make(5000) + (make(5000) == 2500)
    assert repr(one) == repr(other)
    assert same(one, equal)
    assert not same(one, other)
    assert places([other, one], [equal]) == [1]


def test_the_key_of_a_cfg_is_that_of_what_a_file_gives_back():
    """A store without a cfg_type gives plain JSON."""
    cfg = Tiles(2, {"b": 1, "a": (1, 2)})
    assert key(cfg) == key(codec.encode(cfg))
    assert key({"a": 1, "b": 2}) == key({"b": 2, "a": 1})
    assert key(Tiles(1)) != key(Tiles(1.0))


def test_a_cfg_without_json_has_a_key_of_its_own():
    """It is known by its printed form."""
    assert key(Tiles({1})) == repr(Tiles({1}))
