"""The benchmark of pools: its simulation runs the schedule of the code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import pool as benchmark


def stopped():
    """A clock for runs without the cost of the schedule's own code."""
    return 0.0


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_no_simulated_worker_is_idle_while_others_have_more_than_the_longest_call(workers):
    """Without other costs the end is at most one longest call after a perfect split, and never before it."""
    free = benchmark.Costs(before=0.0, each=0.0)
    run = benchmark.simulated(200, workers, free, start_seconds=0.0, clock=stopped)
    assert run.calls / workers <= run.seconds * 1.001
    assert run.seconds <= run.calls / workers + run.longest
    assert run.own == 0.0


def test_a_slow_parent_is_the_limit_of_the_simulation():
    """With a second of its own for each call, more workers do not help."""
    slow = benchmark.Costs(before=0.0, each=1.0)
    for workers in (100, 200):
        run = benchmark.simulated(200, workers, slow, start_seconds=0.0, clock=stopped)
        assert run.seconds >= 200.0
        assert run.limit == "this process"


def test_the_seconds_of_the_schedule_count_for_the_parent():
    """A clock on which each piece of it takes a tenth of a second."""
    ticks = iter(range(10**9))
    free = benchmark.Costs(before=0.0, each=0.0)
    run = benchmark.simulated(50, 10, free, start_seconds=0.0, clock=lambda: 0.1 * next(ticks))
    # A turn for each task, and one for each answer.
    assert run.own == run.schedule >= 50 * 0.2


def test_a_thousand_calls_on_many_workers_come_to_an_end():
    """The longest call is the limit there, not the number of workers; the schedule's own seconds are counted."""
    free = benchmark.Costs(before=0.0, each=0.0)
    run = benchmark.simulated(1000, 256, free, start_seconds=8.0)
    assert run.limit == "the longest call"
    assert run.longest <= run.seconds < 3 * run.longest
