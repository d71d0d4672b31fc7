"""What a model says of itself, held against what came out."""

from __future__ import annotations

import math
import random

import pytest

from ejkernel.ops.tuning.prediction.calibration import NEAR, Calibration, Checked


def checked(count, chance, came_true, bound=0.05, slower=0.1):
    """Records of which the model stated one chance: so many of them came true."""
    return [Checked(chance, bound, 0.0 if number < came_true else slower) for number in range(count)]


def test_a_model_that_is_too_sure_of_itself_is_corrected():
    """It said 95% and was right in half of the cases."""
    assert Calibration(checked(40, 0.95, 20)).chance(0.95) == pytest.approx(0.5, abs=0.1)


def test_a_model_that_is_not_sure_enough_is_corrected():
    """It said 60% and was always right."""
    assert Calibration(checked(40, 0.6, 40)).chance(0.6) > 0.9


def test_few_records_change_little():
    """One that came true does not make a chance of 60% a certain one."""
    assert Calibration(checked(1, 0.6, 1)).chance(0.6) < 0.85


def test_a_surer_statement_is_never_the_less_likely_one():
    """Even where the records say so: that is chance."""
    odd = Calibration([*checked(20, 0.9, 2), *checked(20, 0.3, 18)])

    assert odd.chance(0.9) >= odd.chance(0.3)


def test_bounds_are_as_wide_as_those_of_similar_records_had_to_be():
    """Twice too narrow in a fifth of the records: twice as wide."""
    found = Calibration([Checked(0.8, 0.05, 0.1 if number % 5 == 0 else 0.01) for number in range(20)])

    assert found.bound(0.05) == pytest.approx(0.1)


def test_a_bound_holds_in_about_nine_of_ten():
    """Of other cases like the records."""
    rng = random.Random(0)
    cases = [Checked(0.8, 0.05, rng.expovariate(10)) for _ in range(600)]
    held = [case.slower <= Calibration(cases[at : at + 30]).bound(0.05) for at, case in enumerate(cases[30:])]

    assert 0.8 < sum(held) / len(held) < 0.97


def test_a_bound_is_never_beyond_what_a_failure_counts():
    """Records whose narrow bounds were far off, and a wide one."""
    found = Calibration([Checked(0.9, 0.0, 2.7)] * 8)

    assert found.bound(5.0) == pytest.approx(math.log(16))


def test_without_records_a_model_is_believed():
    """There is nothing to hold it against."""
    assert Calibration([]).chance(0.7) == pytest.approx(0.7)
    assert Calibration([]).bound(NEAR) == NEAR
