"""Strategies on made-up spaces: they find what is there, never ask twice, and take the same path again.

Covers `tuning/search/effort.py`, `tuning/search/genetic.py`, `tuning/search/guided.py`, `tuning/search/loop.py`,
`tuning/search/model.py`, `tuning/search/random.py` and `tuning/search/strategy.py`.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from ejkernel.ops.core.errors import SettingError
from ejkernel.ops.tuning.search.effort import EFFORTS, effort_named
from ejkernel.ops.tuning.search.features import space_of
from ejkernel.ops.tuning.search.genetic import GeneticSearch
from ejkernel.ops.tuning.search.guided import GuidedSearch, spread_out
from ejkernel.ops.tuning.search.loop import search
from ejkernel.ops.tuning.search.random import RandomSearch
from ejkernel.ops.tuning.search.strategy import Strategy, neighbours, steps
from ejkernel.ops.tuning.tuner import Tuner

pytestmark = pytest.mark.one_leg

STRATEGIES = [GuidedSearch(), GeneticSearch(), RandomSearch()]
BLOCKS = (16, 32, 48, 64, 96, 128, 192, 256)
CFGS = [
    {"m": m, "n": n, "warps": w, "stages": s, "mode": mode}
    for m, n, w, s, mode in itertools.product(BLOCKS, BLOCKS, (1, 2, 4, 8), (1, 2, 3, 4), ("a", "b", "c"))
]
SPACE = space_of(CFGS)


def seconds_of(cfg):
    """A kernel as they are: products matter, odd sizes and large tiles are bad, and some tiles do not fit."""
    tile = cfg["m"] * cfg["n"] / cfg["warps"]
    if cfg["m"] * cfg["n"] * cfg["stages"] > 50_000:
        return math.inf
    time = 1 + abs(math.log2(tile) - 11) ** 1.5 + 0.3 * abs(cfg["stages"] - 3)
    time *= 1.5 if cfg["m"] & (cfg["m"] - 1) or cfg["n"] & (cfg["n"] - 1) else 1.0
    return time * {"a": 1.3, "b": 1.0, "c": 1.6}[cfg["mode"]] * (1 + 0.1 * abs(math.log2(cfg["m"] / cfg["n"])))


TIMES = [seconds_of(cfg) for cfg in CFGS]


def found(strategy, seed=0, most=120, space=SPACE, times=TIMES, batch=16):
    return search(space, lambda wanted: {i: times[i] for i in wanted}, strategy, most=most, batch=batch, seed=seed)


def best_of(path):
    return min(path.values()) / min(TIMES) - 1


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_every_strategy_keeps_the_interface(strategy):
    """So many distinct configs as are allowed, in an order that the seed alone decides."""
    path = found(strategy, seed=3)

    assert isinstance(strategy, Strategy)
    assert len(path) == 120
    assert list(path.items()) == list(found(strategy, seed=3).items())
    assert list(path) != list(found(strategy, seed=4))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("count", [1, 2, 33])
def test_a_small_space_is_evaluated_whole(strategy, count):
    """With more evaluations than configs, each is evaluated once and the search ends."""
    times = [float(i + 1) for i in range(count)]
    space = space_of([{"n": i} for i in range(count)])

    assert sorted(found(strategy, space=space, times=times)) == list(range(count))


def test_the_guided_search_ends_near_the_best():
    """In each of three runs 160 of 3,072 configs are enough to come within 5%."""
    assert max(best_of(found(GuidedSearch(), seed, most=160)) for seed in range(3)) <= 0.05


def test_the_guided_search_beats_chance_and_breeding():
    """With as many evaluations it ends nearer to the best, on average over three seeds."""
    guided, genetic, random = (np.mean([best_of(found(s, seed)) for seed in range(3)]) for s in STRATEGIES)

    assert guided < genetic < random


def test_the_guided_search_learns_where_configs_fail():
    """Of the last half of its evaluations fewer fail than of the space."""
    path = list(found(GuidedSearch(), most=128).values())
    share = np.mean(np.isinf(TIMES))

    assert share > 0.1
    assert np.mean(np.isinf(path[64:])) < share / 2


def test_a_space_where_everything_fails_is_no_error():
    """Then the search goes on as long as it may."""
    path = found(GuidedSearch(), times=[math.inf] * len(CFGS), most=64)

    assert set(path.values()) == {math.inf}
    assert len(path) == 64


def test_equal_times_are_no_error():
    """A space that is flat everywhere is searched like any other."""
    assert len(found(GuidedSearch(), times=[1.0] * len(CFGS), most=64)) == 64


def test_seeds_are_measured_first_and_looked_around():
    """With several configs from elsewhere, the first evaluations are they and their neighbours."""
    order = np.argsort(TIMES)
    starts = tuple(int(i) for i in order[[40, 60, 80]])
    path = list(found(GuidedSearch(), most=15, space=replace(SPACE, starts=starts)))

    assert tuple(path[:3]) == starts
    for place, i in enumerate(path[3:], 3):
        assert neighbours(SPACE, path[:place])[i]


def test_half_of_what_looks_around_seeds_are_small_steps():
    """Of the first batch after the seeds two of four differ by the next value of one field from a seed."""
    starts = tuple(int(i) for i in np.argsort(TIMES)[[40, 60, 80]])
    path = list(found(GuidedSearch(), most=7, space=replace(SPACE, starts=starts)))

    assert [bool(steps(SPACE, starts)[i]) for i in path[3:5]] == [True, True]


def test_a_step_goes_to_the_next_value_that_the_space_has():
    """Over a value that the other fields rule out, on both sides of each field, and to nothing else."""
    cfgs = [{"m": m, "n": n} for m in (16, 32, 64, 128) for n in (1, 2, 4) if (m, n) != (64, 2)]
    centre = cfgs.index({"m": 32, "n": 2})
    near = steps(space_of(cfgs), [centre])

    assert [cfg for cfg, is_step in zip(cfgs, near, strict=True) if is_step] == [
        {"m": 16, "n": 2},
        {"m": 32, "n": 1},
        {"m": 32, "n": 4},
        {"m": 128, "n": 2},
    ]


def test_a_lone_start_is_evaluated_with_the_first_batch():
    """The heuristic's config does not compile alone."""
    batches = []

    def measure(wanted):
        batches.append(list(wanted))
        return {i: TIMES[i] for i in wanted}

    search(replace(SPACE, starts=(7,)), measure, GuidedSearch(), most=40, seed=0)

    assert batches[0][0] == 7
    assert len(batches[0]) > 8


def test_the_search_ends_when_the_time_is_up():
    """A batch of which something was not measured is the last one; so is one after which it is late."""
    assert len(search(SPACE, lambda wanted: {wanted[0]: 1.0}, RandomSearch(), most=100)) == 1
    measured = search(SPACE, lambda w: dict.fromkeys(w, 1.0), RandomSearch(), most=100, out_of_time=lambda: True)
    assert len(measured) == 16


class Stubborn:
    """A strategy of the user's own that repeats itself and points outside of the space."""

    def __init__(self):
        self.turns = 0

    def propose(self, space, known, count, rng):
        self.turns += 1
        return [5, 5, -1, len(space), np.int64(self.turns)] if self.turns < 4 else []


def test_what_a_strategy_proposes_is_looked_through():
    """Repetitions, known configs and places outside of the space are passed over; no proposal ends the search."""
    assert list(found(Stubborn())) == [5, 1, 2, 3]


def test_the_first_batch_is_spread_out():
    """It has more of the values of each field than configs by chance have, on average."""
    rng = np.random.default_rng(0)
    spread = [spread_out(SPACE, {}, 8, rng) for _ in range(20)]
    chance = [RandomSearch().propose(SPACE, {}, 8, rng) for _ in range(20)]

    def nearest(batch):
        return min(int(SPACE.distance(a)[b]) for a, b in itertools.combinations(batch, 2))

    assert np.mean([nearest(b) for b in spread]) > np.mean([nearest(b) for b in chance])


def test_a_proposal_from_many_configs_is_cheap():
    """A batch of 16 out of 30,000 with 300 known: a few tenths of a second, with room for a busy machine."""
    many = space_of([{"a": i % 30, "b": i // 30 % 32, "c": i // 960} for i in range(30_000)])
    known = {i * 97: 1.0 + (i * 31 % 17) for i in range(300)}
    start = time.process_time()
    batch = GuidedSearch().propose(many, known, 16, np.random.default_rng(0))

    assert len(set(batch) - known.keys()) == 16
    assert time.process_time() - start < 20


@pytest.mark.parametrize("name", ["fast", "", None, 3])
def test_an_unknown_effort_names_those_there_are(name):
    """The error is a ValueError that lists all four."""
    with pytest.raises(ValueError, match=r"quick.*default.*full.*exhaustive") as caught:
        effort_named(name)
    assert isinstance(caught.value, SettingError)


def test_efforts_grow():
    """Each effort has more seconds and more evaluations than the one before; the last one has no limits."""
    efforts = [EFFORTS[name] for name in ("quick", "default", "full", "exhaustive")]

    assert sorted(efforts, key=lambda e: (e.seconds, e.evaluations)) == efforts


def test_what_an_effort_covers_is_raced_whole():
    """A few candidates always are, and twice the evaluations of an effort are searched."""
    tuners = [Tuner(effort=name) for name in ("quick", "default", "full", "exhaustive")]

    assert not tuners[-1].searches(10**6)
    assert [tuner.searches(32) for tuner in tuners] == [False] * 4
    assert all(tuner.searches(1001) for tuner in tuners[:-1])
