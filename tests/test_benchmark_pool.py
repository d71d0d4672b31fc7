"""The benchmark of pools: its simulation runs the schedule of the code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import pool as benchmark


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_no_simulated_worker_is_idle_while_others_have_more_than_the_longest_call(workers):
    """Without other costs the end is at most one longest call after a perfect split, and never before it."""
    free = benchmark.Costs(before=0.0, each=0.0)
    seconds, useful, own = benchmark.simulated(200, workers, free, start_seconds=0.0)
    whole = seconds * workers * useful
    longest = 1.3 * max(benchmark.TUNINGS)
    assert whole / workers <= seconds * 1.001
    assert seconds <= whole / workers + longest
    assert own == 0.0


def test_a_slow_parent_is_the_limit_of_the_simulation():
    """With a second of its own for each call, more workers do not help."""
    slow = benchmark.Costs(before=0.0, each=1.0)
    some, many = (benchmark.simulated(200, workers, slow, start_seconds=0.0)[0] for workers in (100, 200))
    assert some >= 200.0
    assert many >= 200.0
