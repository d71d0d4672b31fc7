"""Calls as numbers: what counts by size, what by name, and which columns are worth having."""

from __future__ import annotations

import math

import numpy as np

from ejkernel.ops.tuning.prediction.calls import CallTable, point_of


def test_sizes_count_by_doublings_and_all_else_by_name():
    """Axes and numbers are sizes; dtype, number of axes and texts are names."""
    point = point_of({"args[0]": "bfloat16[7,1024]", "kwargs['k']": "3", "kwargs['mode']": "'relu'"})

    assert point.sizes["args[0] axis 0"] == 3.0
    assert point.sizes["kwargs['k']"] == 2.0
    assert point.names == {"args[0]": "bfloat16, 2 axes", "kwargs['mode']": "'relu'"}


def test_leading_axes_are_rows_together():
    """A batch of sequences has as many rows as both axes make."""
    sizes = point_of({"args[0]": "float32[7,15,64]"}).sizes

    assert sizes["args[0] rows"] == 7.0


def test_a_table_leaves_out_what_is_the_same_or_repeats():
    """Inner sizes of a product are one column, and a common dtype is none."""
    calls = [{"args[0]": f"float32[8,{k}]", "args[1]": f"float32[{k},16]"} for k in (32, 64, 128)]
    table = CallTable.of([point_of(call) for call in calls])

    assert "args[0] axis 1" in table.sizes
    assert "args[1] axis 0" not in table.sizes
    assert table.names == ()
    assert table.common["args[0]"] == "float32, 2 axes"


def test_a_name_that_no_call_has_is_like_none_of_them():
    """Two known dtypes are one apart, and so is an unknown one from both."""
    points = [point_of({"args[0]": f"{dtype}[{size}]"}) for dtype in ("float32", "int8") for size in (8, 16)]
    table = CallTable.of(points)
    apart = table.apart(table.row(point_of({"args[0]": "float64[8]"}))[None], table.rows)

    assert np.all(apart[..., -1] == 1.0)


def test_a_number_beyond_any_float_is_a_size_all_the_same():
    """A file may say anything."""
    assert math.isfinite(point_of({"x": "1" + "0" * 400}).sizes["x"])
