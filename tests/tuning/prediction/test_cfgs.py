"""Cfgs of one call beside those of another: the same, the nearest by size, or that of the same rank."""

from __future__ import annotations

from ejkernel.ops.tuning.prediction.cfgs import by_rank, by_size, cfg_point


def points(*cfgs):
    return [cfg_point(cfg) for cfg in cfgs]


def block(size):
    return {"way": "tiles", "block": size}


def test_the_same_cfg_is_its_own_counterpart():
    """Whatever else is near."""
    assert by_size(points(block(64)), points(block(32), block(64))) == [(1, 0.0)]


def test_another_cfg_has_the_nearest_of_its_kind():
    """In doublings; another way to compute is never near."""
    known = points({"way": "plain", "block": None}, block(16), block(128))

    assert by_size(points(block(64)), known) == [(2, 1.0)]
    assert by_size(points({"way": "other", "block": None}), known) == [None]


def test_blocks_that_are_shares_of_an_axis_match_by_rank():
    """Halves match halves, however long the axis is."""
    assert by_rank(points(block(48), block(24)), points(block(512), block(1024))) == [(1, 0.0), (0, 0.0)]


def test_a_rank_that_is_missing_has_the_next_one():
    """With some doubt."""
    assert by_rank(points(block(4), block(2)), points(block(8))) == [(0, 0.0), (0, 1.0)]


def test_cfgs_without_fields_match_as_they_are():
    """A text or a number is a cfg too."""
    assert by_size(points("a", 3), points("b", "a", 3)) == [(1, 0.0), (2, 0.0)]
