"""Searches where things are scarce or strange: small budgets, few that run, odd clocks, very many configs."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ejkernel.ops.tuning.search.features import space_of
from ejkernel.ops.tuning.search.guided import GuidedSearch, corners
from ejkernel.ops.tuning.search.loop import search

CFGS = [
    {"m": m, "n": n, "warps": w, "stages": s}
    for m, n, w, s in itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (1, 2, 4, 8), (1, 2, 3, 4))
]
SPACE = space_of(CFGS)


def slow(cfg):
    return 1 + abs(math.log2(cfg["m"] * cfg["n"]) - 12) + 0.3 * abs(cfg["stages"] - 3) + 0.2 * cfg["warps"]


TIMES = [slow(cfg) for cfg in CFGS]


def batches_of(most, times=TIMES, space=SPACE, **more):
    """The batches of one search."""
    found = []

    def measure(wanted):
        found.append(list(wanted))
        return {i: times[i] for i in wanted}

    search(space, measure, GuidedSearch(), most=most, **more)
    return found


def test_a_small_budget_has_a_small_design_and_small_batches():
    """Of 50 evaluations 16 are spread out, and the others come by fours; of 200 twice as many, by sixteens."""
    small, large = batches_of(50), batches_of(200)

    assert [len(batch) for batch in small[:4]] == [16, 4, 4, 4]
    assert [len(batch) for batch in large[:4]] == [16, 16, 16, 16]


def test_batches_are_larger_where_compiling_takes_the_time():
    """A driver that is short of time asks for more at once."""
    assert [len(batch) for batch in batches_of(50, wave=lambda left: 12)[:4]] == [16, 12, 12, 10]


def test_a_seeded_search_skips_the_design():
    """After the seeds and what is around them the model proposes: nothing is spread out, and no batch is of one."""
    starts = tuple(int(i) for i in np.argsort(TIMES)[[30, 50, 70]])
    batches = batches_of(30, space=replace(SPACE, starts=starts))

    assert tuple(batches[0]) == starts
    assert min(map(len, batches[:-1])) >= 3
    rest = [i for batch in batches[1:] for i in batch]
    assert np.mean([TIMES[i] for i in rest]) < 0.85 * np.mean(TIMES)


def test_what_runs_is_found_where_nearly_everything_fails():
    """With 2% that run, those next to the first one that ran are found with a few evaluations."""
    runs = [cfg["m"] <= 16 and cfg["n"] <= 32 and cfg["warps"] == 1 for cfg in CFGS]
    times = [t if ok else math.inf for t, ok in zip(TIMES, runs, strict=True)]
    assert np.mean(runs) == 0.02
    path = [i for batch in batches_of(100, times=times) for i in batch]
    first = next(place for place, i in enumerate(path) if runs[i])

    assert sum(runs[i] for i in path[: first + 24]) >= 4


def test_corners_are_ends_of_fields():
    """A corner has the least or the largest value of every size, and none comes twice."""
    found = corners(SPACE, np.arange(len(CFGS)), 8, np.random.default_rng(0))

    assert len(set(found)) == 8
    assert CFGS[found[0]]["m"] in (16, 256)
    assert CFGS[found[0]]["warps"] in (1, 8)


@pytest.mark.parametrize("shift", [0.0, -1.5, -100.0])
def test_times_of_zero_and_below_are_no_error(shift):
    """A clock that cannot tell so little says zero or less; the least is the best all the same."""
    times = [t - 1 + shift for t in TIMES]
    path = [i for batch in batches_of(96, times=times) for i in batch]

    assert len(path) == 96


def test_a_caller_that_raises_on_every_rounding_sees_none():
    """`np.errstate(all="raise")` around a search changes nothing."""
    times = [math.inf if i % 3 == 0 else t for i, t in enumerate(TIMES)]
    plain = batches_of(64, times=times)
    with np.errstate(all="raise"):
        assert batches_of(64, times=times) == plain


@dataclass(frozen=True)
class Tile:
    """A cfg of plain fields."""

    m: int
    n: int
    way: str
    deep: bool


def test_very_many_configs_become_numbers_soon():
    """A hundred thousand dataclasses take a few seconds of a busy machine at most, and the numbers are the same."""
    cfgs = [
        Tile(m, n, way, deep) for m in range(1, 251) for n in range(1, 101) for way in "ab" for deep in (True, False)
    ]
    start = time.process_time()
    space = space_of(cfgs)

    assert time.process_time() - start < 10
    few = space_of([vars(cfg) for cfg in cfgs[::997]])
    assert (space_of(cfgs[::997]).points == few.points).all()
    assert len(space) == 100_000
