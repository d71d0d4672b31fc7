"""Regions of calls: one where there are few records, else one around each of some centres."""

from __future__ import annotations

import numpy as np

from ejkernel.ops.tuning.prediction.regions import regions_of, telling
from ejkernel.ops.tuning.prediction.scales import ModelScales, Points


def made(calls, cfgs=12):
    """Calls on a line."""
    at = np.linspace(0, 10, calls)[:, None]
    call, cfg = np.repeat(np.arange(calls), cfgs), np.tile(np.arange(cfgs), calls)
    sizes, kinds = np.arange(cfgs, dtype=float)[:, None], np.zeros(cfgs, int)
    points = Points(at[:, None] - at[None], at / 10, sizes, kinds, call, cfg)
    return points, 0.01 * ((cfg + call // 10) % cfgs)


def test_few_calls_are_one_region():
    """All of them answer."""
    (region,) = regions_of(*made(20), ModelScales.before(1, 1))

    assert region.calls.tolist() == list(range(20))
    assert region.own == tuple(range(20))


def test_many_calls_are_regions_and_each_call_belongs_to_one():
    """Each is held against the records once."""
    regions = regions_of(*made(120), ModelScales.before(1, 1))
    own = [int(region.calls[number]) for region in regions for number in region.own]

    assert len(regions) > 1
    assert sorted(own) == list(range(120))


def test_a_region_holds_the_calls_around_its_centre():
    """As many as fit, and no others."""
    points, slower = made(120)
    for region in regions_of(points, slower, ModelScales.before(1, 1)):
        apart = np.abs(points.apart[region.centre, :, 0])
        outside = np.setdiff1d(np.arange(120), region.calls)

        assert len(region.calls) < 60
        assert apart[region.calls].max() <= apart[outside].min() + 1e-9


def test_scales_are_found_from_whole_calls_and_their_neighbours():
    """Of many calls a few with most of their cfgs: one time of a call says nothing."""
    points, slower = made(200)
    few = telling(points, slower)
    counts = np.bincount(points.call[few], minlength=200)
    used = np.flatnonzero(counts)

    assert len(few) <= 256
    assert counts[used].min() >= 6
    assert 1 in np.diff(used)
