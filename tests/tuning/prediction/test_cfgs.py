"""Cfgs as numbers: sizes by field, kinds, and which cfgs of another call the records know."""

from __future__ import annotations

from ejkernel.ops.tuning.prediction.cfgs import CfgTable, cfg_point, ranks


def points(*cfgs):
    return [cfg_point(cfg) for cfg in cfgs]


def block(size):
    return {"way": "tiles", "block": size}


def test_sizes_count_by_field_and_all_else_is_the_kind():
    """Two blocks are of one kind, another way to compute is not."""
    one, other, plain = points(block(16), block(64), {"way": "plain", "block": None})

    assert (one.fields, one.sizes, other.sizes) == (("block",), (4.0,), (6.0,))
    assert one.kind == other.kind != plain.kind


def test_a_cfg_near_one_of_its_kind_is_known():
    """Within a doubling and a half; of another kind, or farther, it is not."""
    table = CfgTable([points(block(16), block(32), "plain")] * 4)
    *_, known = table.rows(points(block(16), block(64), block(256), {"way": "other", "block": 16}, "plain"))

    assert known.tolist() == [True, True, False, False, True]


def test_the_same_cfg_is_one_row_for_all_calls():
    """However many calls have it."""
    table = CfgTable([points(block(16), block(32)), points(block(32), block(16))])

    assert table.places == [[0, 1], [1, 0]]
    assert len(table.sizes) == 2


def test_blocks_that_are_shares_of_an_axis_are_known_by_rank():
    """Halves are like halves, however long the axis is; where calls share their cfgs, ranks do not count."""
    shares = CfgTable([points(block(size), block(size // 2)) for size in (64, 512, 4096)])
    shared = CfgTable([points(block(64), block(32))] * 3)

    assert shares.ranked
    assert shares.rows(points(block(1 << 20), block(1 << 19)))[2].all()
    assert not shared.ranked
    assert not shared.rows(points(block(1 << 20), block(1 << 19)))[2].any()


def test_ranks_are_by_kind_and_the_largest_comes_first():
    """A cfg of another kind does not count."""
    assert ranks(points(block(24), "plain", block(48))) == [1, 0, 0]


def test_cfgs_without_fields_are_kinds_and_sizes_too():
    """A text or a number is a cfg."""
    *_, known = CfgTable([points("b", "a", 3)] * 2).rows(points("a", 3, 400, "c"))

    assert known.tolist() == [True, True, False, False]
