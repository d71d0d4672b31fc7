"""Configs as numbers: which fields are found, and how their values become distances."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pydantic
import pytest

from ejkernel.ops.tuning.search.features import leaves, space_of


class Tile(NamedTuple):
    m: int
    n: int


@dataclass(frozen=True)
class Launch:
    warps: int
    tile: Tile
    extra: dict[str, Any] = field(default_factory=dict)


class Model(pydantic.BaseModel):
    warps: int
    mode: str = "a"


class Mode(enum.Enum):
    FAST = 1
    SAFE = 2


@pytest.mark.parametrize(
    ("cfg", "found"),
    [
        (Launch(4, Tile(64, 32), {"split": True}), {"warps": 4, "tile.m": 64, "tile.n": 32, "extra.split": True}),
        ({"a": 1, "b": {"c": "x"}}, {"a": 1, "b.c": "x"}),
        (Model(warps=8), {"warps": 8, "mode": "a"}),
        (Tile(1, 2), {"m": 1, "n": 2}),
        ((16, (32, 64)), {"0": 16, "1.0": 32, "1.1": 64}),
        (7, {}),
        (object, {}),
    ],
    ids=["dataclass", "dict", "pydantic", "named tuple", "tuple", "number", "class"],
)
def test_the_fields_of_a_config_are_found(cfg, found):
    """However a config is written, its named values are what counts; a value without fields has none."""
    assert dict(leaves(cfg)) == found


def test_fields_that_do_not_vary_are_left_out():
    """What all configs share tells nothing."""
    space = space_of([{"a": 1, "b": 2, "c": "x"}, {"a": 1, "b": 3, "c": "x"}])

    assert space.names == ("b",)
    assert space.codes.tolist() == [[0], [1]]


def test_sizes_are_measured_in_doublings():
    """From 16 to 32 is as far as from 64 to 128."""
    points = space_of([{"n": n} for n in (16, 32, 64, 128)]).points

    assert np.diff(points[:, 0]) == pytest.approx([1 / 3] * 3)


def test_how_often_two_divides_a_size_is_a_question_of_its_own():
    """96 lies between 64 and 128, but is laid out unlike them; among powers of two that says nothing new."""
    mixed, powers = space_of([{"n": n} for n in (64, 96, 128)]), space_of([{"n": n} for n in (64, 96 + 160, 128)])

    assert mixed.points.shape[1] == 2
    assert mixed.points[1, 1] == 0.0
    assert powers.points.shape[1] == 1


def test_names_are_as_far_from_each_other_as_any():
    """Strings, enums, None and values of the user's own have no order."""
    space = space_of([{"mode": mode} for mode in ("a", "b", Mode.FAST, None)])

    apart = np.linalg.norm(space.points[:, None] - space.points[None], axis=-1)
    assert apart[~np.eye(4, dtype=bool)] == pytest.approx(2**0.5)
    assert set(space.groups.tolist()) == {0}


def test_numbers_with_an_exception_keep_their_order():
    """`None` among sizes is told apart, and the sizes stay on their line."""
    space = space_of([{"n": n} for n in (1, 2, 4, None)])

    assert space.points[:3, 0].tolist() == pytest.approx([0.0, 0.5, 1.0])
    assert len({tuple(row) for row in space.points.tolist()}) == 4


def test_one_and_one_point_nought_and_true_are_three_values():
    """As everywhere, equal to Python is not the same."""
    assert space_of([{"a": 1}, {"a": 1.0}, {"a": True}]).sizes.tolist() == [3]


def test_odd_values_are_just_values():
    """What cannot be hashed, is not finite or does not fit a float still makes a space."""
    cfgs = [{"a": value} for value in ([], np.zeros(2), float("nan"), 10**400, {}, float("inf"))]
    space = space_of(cfgs)

    assert np.isfinite(space.points).all()
    assert space.sizes.tolist() == [6]


def test_configs_may_have_different_fields():
    """A field that a config does not have is one more value of it."""
    space = space_of([{"a": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 4}])

    assert space.names == ("a", "b")
    assert space.sizes.tolist() == [2, 3]


def test_names_that_are_hardly_ever_equal_cost_one_column():
    """A path in each config does not make the space as wide as it is long."""
    assert space_of([{"path": f"kernel_{i}"} for i in range(500)]).points.shape == (500, 1)


def test_twenty_thousand_configs_are_read_in_reasonable_time():
    """Each costs some microseconds: far from the minutes that comparing all with all would take."""
    cfgs = [Launch(warps, Tile(m, m % 7)) for m in range(10_000) for warps in (4, 8)]
    start = time.process_time()

    assert len(space_of(cfgs)) == 20_000
    assert time.process_time() - start < 20
