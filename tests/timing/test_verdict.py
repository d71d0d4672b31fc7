"""The verdict on the numbers of a comparison, and its sentences.

Covers `timing/check.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from ejkernel.ops.core.record import Finding
from ejkernel.ops.timing.check import compare, judge
from ejkernel.ops.timing.deviation import Deviations
from ejkernel.ops.timing.rounding import limits_of

LIMITS = limits_of(np.float32)
MANY = 1e6


@pytest.mark.parametrize(
    ("found", "test", "ratio", "said"),
    [
        (
            Deviations(rows=0.5, segments=MANY),
            "segments",
            8.0,
            "50.0% of the segments of 16 neighbours along rows are off by over 0.002 of the size of their values; "
            "6.2% may be",
        ),
        (
            Deviations(columns=0.125, segments=MANY),
            "segments",
            2.0,
            "12.5% of the segments of 16 neighbours along columns are off by over 0.002 of the size of their values; "
            "6.2% may be",
        ),
        (
            Deviations(level=4.4, segments=MANY),
            "whole",
            1.998,
            "off by 0.0021 of the size of the values on the whole; 0.0011 is allowed",
        ),
        (
            Deviations(element=12.0, level=0.1, segments=MANY),
            "element",
            2.0,
            "an element is off by 0.0059 of the size of the values around it; 0.0029 is allowed",
        ),
        (
            Deviations(bias=25.0, segments=MANY),
            "factor",
            10.0,
            "off by a common factor of 0.012; 0.0012 is allowed",
        ),
    ],
    ids=["rows", "columns", "whole", "element", "factor"],
)
def test_a_reason_is_one_sentence_with_what_is_and_what_may_be(found, test, ratio, said):
    """And the finding has the test and how far it is over its limit."""
    reason, finding = judge(found, LIMITS, 100)

    assert reason == said
    assert finding.test == test
    assert finding.ratio == pytest.approx(ratio, rel=1e-2)


def test_what_is_right_has_the_test_that_came_nearest():
    """With how much of its limit it took."""
    reason, finding = judge(Deviations(rows=1 / 32, level=0.1, bias=0.1, segments=MANY), LIMITS, 100)

    assert (reason, finding) == ("", Finding("segments", 0.5))


@pytest.mark.parametrize("field", ["rows", "columns", "level", "element", "bias", "unlike"])
def test_no_number_is_wrong(field):
    """NaN is never within a limit, and has no ratio."""
    reason, finding = judge(Deviations(**{field: math.nan}), LIMITS, 100)

    assert reason
    assert finding.ratio is None


def test_a_difference_among_zeros_is_called_so():
    """There is no size to be relative to."""
    reason, finding = judge(Deviations(element=math.inf, segments=MANY), LIMITS, 100)

    assert reason == "an element differs where all values around it are zero"
    assert finding.ratio is None


def test_a_wider_limit_is_said():
    """Where the noise of a plain run has widened it, and where not."""
    found = Deviations(bias=25.0, segments=MANY)

    reason, finding = judge(found, LIMITS, 100, bias=1.0, wider=0.25)
    assert reason == (
        "off by a common factor of 0.012; 0.0022 is allowed (wider already in 25% of the segments, where a plain run "
        "is noisy too)"
    )
    assert finding.widened == 0.25


def test_a_few_segments_may_be_noisier_than_many():
    """Sixteen are off by more than a million may be."""
    found = Deviations(level=2.5)

    assert judge(found._replace(segments=16), LIMITS, 100)[0] == ""
    assert judge(found._replace(segments=MANY), LIMITS, 100)[0] != ""


def test_noise_of_a_first_query_is_compared_with_the_next_queries():
    """Its gradient under a causal mask is zero in all heads, and kernels leave noise there."""
    rng = np.random.default_rng(0)
    want = rng.standard_normal((2, 40, 4, 16)).astype(np.float32)
    want[:, 0] = 0
    got = want + 1e-6 * rng.standard_normal(want.shape).astype(np.float32)
    assert compare(got, want).reason == ""
    # A first query that is really wrong is found.
    got[:, 0] = 1
    assert compare(got, want).reason != ""
