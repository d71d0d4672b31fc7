"""The times of all candidates in a summary: small, and read back whatever a file holds."""

from __future__ import annotations

import json
import math

import pytest

from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.core.times import MOST_KEPT, read_times, times_of


def trial(n, *samples, **more):
    return Trial({"n": n, "way": "tiles"}, samples_s=samples, **more)


def times(*trials, raced=False, quantile=0.5):
    return read_times({"times": times_of(trials, raced=raced, quantile=quantile)})


def test_times_come_back_with_their_cfgs_the_fastest_first():
    """Failures are behind, without seconds; what was not measured is not there."""
    found = times(
        trial(1, 2e-5),
        trial(2, 1e-5),
        trial(3, status="memory"),
        trial(4, status="timeout"),
        trial(5, status="skipped"),
    )

    assert [(cfg["n"], seconds and round(seconds, 8)) for cfg, seconds in found] == [(2, 1e-5), (1, 2e-5), (3, None)]
    assert found[0][0] == {"n": 2, "way": "tiles"}


def test_a_race_compares_round_by_round():
    """A candidate that was dropped after a slow round is not slower for that."""
    slow_first = trial(1, 4e-5, 1e-5, 1e-5), trial(2, 4.4e-5)

    (_, best), (_, other) = times(*slow_first, raced=True)
    assert other / best == pytest.approx(1.1, rel=0.01)


def test_cfgs_without_fields_are_kept_as_they_are():
    """Numbers, texts and lists are cfgs too."""
    found = times(Trial("a", samples_s=(2.0,)), Trial("b", samples_s=(1.0,)))

    assert found == [("b", 1.0), ("a", 2.0)]


def test_one_time_alone_says_nothing():
    """Then the summary has no times."""
    assert "times" not in Record(trials=(trial(1, 1.0), trial(2, status="compile")), winner=0).summary()


def test_a_summary_stays_small():
    """Of a thousand candidates the fastest and a sample of the others are kept, in some kilobytes."""
    record = Record(trials=tuple(trial(n, 1e-6 * (n + 1)) for n in range(1000)), winner=0, space=5000)
    found = read_times(record.summary())

    assert len(found) == MOST_KEPT
    assert [cfg["n"] for cfg, _ in found[:8]] == list(range(8))
    assert len(json.dumps(record.summary())) < 4000


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"times": 3},
        {"times": {"cfgs": 1, "us": []}},
        {"times": {"fields": ["a"], "cfgs": [[1, 2]], "us": [1.0]}},
        {"times": {"fields": 3, "cfgs": [[1]], "us": [1.0]}},
        {"times": {"cfgs": ["a", "b", "c"], "us": ["1", math.nan, -1]}},
    ],
)
def test_damaged_times_are_none(damaged):
    """A file may hold anything."""
    assert read_times(damaged) == []
