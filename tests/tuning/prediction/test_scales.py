"""Scales by likelihood: slopes are right, and what does not matter drops out."""

from __future__ import annotations

import numpy as np
import pytest

from ejkernel.ops.tuning.prediction import scales
from ejkernel.ops.tuning.prediction.scales import ModelScales, Points, fit


def made(calls):
    """Calls with two sizes, of which the first one decides between two cfgs, back and forth."""
    rng = np.random.default_rng(1)
    at = rng.uniform(-2, 2, (calls, 2))
    call, cfg = np.repeat(np.arange(calls), 3), np.tile(np.arange(3), calls)
    points = Points(at[:, None] - at[None], at, np.array([[1.0], [2.0], [3.0]]), np.array([0, 0, 1]), call, cfg)
    slower = np.where(cfg == 0, 0.2 * np.sin(2 * at[call, 0]), 0.1 * cfg) + rng.normal(0, 0.01, len(call))
    return points, slower


def test_slopes_of_the_likelihood_are_as_small_steps_show():
    """For lengths of calls, of cfgs, and all amplitudes."""
    points, slower = made(8)
    density = scales._Density(points, slower)
    before = ModelScales.before(2, 1)
    at = before.flat() + 0.1
    _, slope = density(before.like(at))
    steps = np.eye(len(at)) * 1e-5
    shown = [(density(before.like(at + s))[0] - density(before.like(at - s))[0]) / 2e-5 for s in steps]

    assert slope == pytest.approx(shown, rel=1e-3, abs=1e-3)


def test_a_size_that_does_not_matter_gets_a_long_length():
    """Longer than the one that decides."""
    found = fit(*made(40))

    assert found.calls[1] > found.calls[0] + 1.0


def test_noise_is_never_taken_for_less_than_half_a_percent():
    """Times without any noise would else make every difference count."""
    points, _ = made(10)
    found = fit(points, 0.1 * points.cfg)

    assert found.amplitudes[-1] >= np.log(0.005) - 1e-9


def test_some_calls_are_a_table_of_their_own():
    """Their pairs point into it."""
    points, _ = made(6)
    inside, kept = points.of(np.array([1, 4]))

    assert inside.call.tolist() == [0, 0, 0, 1, 1, 1]
    assert kept.tolist() == [3, 4, 5, 12, 13, 14]
    assert inside.apart[0, 1].tolist() == points.apart[1, 4].tolist()
