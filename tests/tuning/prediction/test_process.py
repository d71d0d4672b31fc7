"""The Gaussian process over calls and cfgs: exact where it can be, and right about what it left out."""

from __future__ import annotations

import numpy as np
import pytest

from ejkernel.ops.tuning.prediction.process import Process
from ejkernel.ops.tuning.prediction.scales import ModelScales, Points, fit

CALLS, CFGS = 12, 5


def made(calls=CALLS):
    """Calls on a line, and two kinds of cfgs: the first kind is better the farther right a call is."""
    rng = np.random.default_rng(0)
    at = np.linspace(-2.0, 2.0, calls)
    sizes, kinds = np.arange(CFGS, dtype=float)[:, None], np.array([0, 0, 0, 1, 1])
    call, cfg = np.repeat(np.arange(calls), CFGS), np.tile(np.arange(CFGS), calls)
    points = Points(np.abs(at[:, None, None] - at[None, :, None]), at[:, None], sizes, kinds, call, cfg)
    slower = np.where(kinds[cfg] == 0, -0.1 * at[call], 0.05 * sizes[cfg, 0]) + rng.normal(0, 0.005, len(call))
    return points, slower


def centred(values):
    return values - values.mean()


def less(points, number):
    """All points but those of one call."""
    return np.flatnonzero(points.call != number)


@pytest.mark.parametrize("most", [CALLS * CFGS, 40])
def test_a_call_left_out_is_predicted_as_from_the_others_alone(most):
    """By a low rank update, without learning anew; with fewer points than there are it is about the same."""
    points, slower = made()
    scales = fit(points, slower)
    mean, covariance = Process(points, slower, scales, most).without(4)
    others, mine = less(points, 4), points.call == 4
    alone = Process(points.some(others), slower[others], scales, CALLS * CFGS)
    cfgs = points.cfg[mine]
    first, wanted, spread = alone.ask(points.apart[4], points.slopes[4], points.sizes[cfgs], points.kinds[cfgs], CFGS)

    assert first.tolist() == list(range(CFGS))
    assert centred(mean) == pytest.approx(centred(wanted), abs=2e-3)
    assert covariance - covariance.mean() == pytest.approx(spread - spread.mean(), abs=1e-3)


def test_the_trend_over_calls_and_the_order_of_cfgs_are_learned():
    """Left out at the right end, the first kind is still the better one, by about as much as it is."""
    points, slower = made()
    mean, _ = Process(points, slower, fit(points, slower), 100).without(CALLS - 1)

    assert centred(mean) == pytest.approx(centred(slower[points.call == CALLS - 1]), abs=0.06)


def test_only_the_most_promising_cfgs_are_looked_at_closely():
    """A space of many candidates costs no more than a few."""
    points, slower = made()
    found = Process(points, slower, fit(points, slower), 30)
    first, mean, covariance = found.ask(points.apart[0], points.slopes[0], points.sizes, points.kinds, 2)

    assert len(first) == 2
    assert mean.shape == (2,)
    assert covariance.shape == (2, 2)


def test_points_that_say_nothing_new_are_left_out():
    """The same call again, many times."""
    points, slower = made()
    again = Points(
        np.zeros((30, 30, 1)), np.zeros((30, 1)), points.sizes, points.kinds, np.arange(30), np.zeros(30, int)
    )

    assert len(Process(again, np.zeros(30), ModelScales.before(1, 1), 30).few.call) == 1
    assert len(Process(points, slower, ModelScales.before(1, 1), 60).few.call) > CFGS
