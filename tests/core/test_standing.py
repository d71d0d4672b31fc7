"""Figures that agree with the verdict: times without drift, and one sentence for every place that shows them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import median

import pytest

from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.core.standing import standings, verdict
from ejkernel.ops.timing import race


def record(*samples, winner=0, heuristic=0, **fields):
    """A record of candidates with these samples."""
    trials = tuple(Trial({"block": 2**i}, samples_s=tuple(times)) for i, times in enumerate(samples))
    return Record(trials=trials, winner=winner, heuristic=heuristic, **fields)


def test_a_slow_minute_that_only_the_winner_ran_in_is_divided_out():
    """The loser left before the machine became slow: its raw median is shorter, its time without drift is longer."""
    drifting = record((1.0, 1.0, 3.0, 3.0, 3.0), (1.5, 1.5), clock="device")
    assert drifting.trials[1].seconds < drifting.trials[0].seconds
    assert standings(drifting)[1].ratio == pytest.approx(1.5)
    assert standings(drifting)[1].seconds == pytest.approx(4.5)
    assert verdict(drifting).kind == "same"


def test_the_heuristics_time_is_the_winners_times_the_gain():
    """Both figures and the gain beside them say the same."""
    told = record((4.0, 4.4), (1.0, 1.0), winner=1, gain=(4.1, 3.9, 4.3))
    assert standings(told)[0].seconds == pytest.approx(4.1)
    assert verdict(told).text == "4.10 times as fast as the heuristic cfg (3.90 to 4.30 with 95%)"


def test_what_is_never_believed_is_shown_as_equal():
    """Half a percent is below the race's own limit for a difference."""
    equal = record((1.0, 1.0, 1.0), (0.995, 0.995, 0.995))
    assert standings(equal)[1].seconds == standings(equal)[0].seconds
    assert verdict(equal).text == "nothing beats the heuristic cfg"


def test_where_noise_decides_the_text_says_so_and_what_to_do():
    """The heuristic stays beside a candidate that looks faster."""
    noisy = record((1.0, 1.3, 1.0), (0.9, 0.9, 1.4), tied=(0, 1))
    assert verdict(noisy).kind == "noisy"
    assert verdict(noisy).text.startswith("too noisy to tell: block=2 took up to")
    assert "the heuristic cfg stays; tune again on an idle machine" in verdict(noisy).text
    assert noisy.table().splitlines()[-1] == verdict(noisy).text


def test_a_gain_that_may_be_none_is_too_noisy_to_tell():
    """The interval reaches below one."""
    unsure = record((1.1, 1.1), (1.0, 1.0), winner=1, gain=(1.1, 0.97, 1.2))
    assert verdict(unsure).text.startswith("too noisy to tell: 1.10 times as fast as the heuristic cfg, 0.97 to 1.20")


def test_a_cfg_that_was_taken_back_has_its_own_reason():
    """The program decided, not the race."""
    back = record((2.0, 2.0), (1.0, 1.0), note="taken back: the program was not faster")
    assert verdict(back).text == "taken back: the program was not faster"


@pytest.mark.parametrize(
    ("left", "text"),
    [
        (Record(), "nothing was measured"),
        (Record(stop="failed"), "no candidate can be used"),
        (Record(stop="deadline"), "the time was up before anything was measured"),
        (Record(trials=(Trial("a"),), winner=0, stop="settled"), "another tuner or process decided"),
        (Record(trials=(Trial("a", samples_s=(1.0,)),), winner=0, heuristic=0), "the only one that could be timed"),
        (Record(trials=(Trial("a", samples_s=(1.0,)), Trial("b", samples_s=(2.0,))), winner=0), "the fastest of 2"),
    ],
)
def test_a_record_with_little_in_it_has_a_verdict(left, text):
    """It says what is missing."""
    assert text in verdict(left).text


def test_a_winner_that_failed_has_no_one_to_compare_with():
    """A file may say so; the figures are those of the samples."""
    odd = Record(trials=(Trial(1, "wrong", samples_s=(1.0,)), Trial(2, samples_s=(2.0,))), winner=0)
    assert [(one.seconds, one.ratio) for one in standings(odd)] == [(1.0, None), (2.0, None)]
    assert "the fastest of 2" in verdict(odd).text


def test_of_a_search_only_finalists_are_compared():
    """A candidate of an earlier batch ran in other rounds: it has a time and no ratio."""
    trials = (
        Trial(1, samples_s=(2.0, 2.0)),
        Trial(2, samples_s=(1.0,), dropped_round=1),
        Trial(3, samples_s=(3.0, 3.0)),
    )
    searched = Record(trials=trials, winner=0, heuristic=0, space=500)
    assert [one.ratio for one in standings(searched)] == [1.0, None, pytest.approx(1.5)]
    assert verdict(searched).kind == "same"
    assert "timed in an earlier batch" in searched.table()


def test_no_loser_of_a_race_is_shown_as_faster_without_a_word():
    """Two hundred races on a drifting, spiky machine: a time below the winner's comes with `too noisy to tell`."""
    silent = []
    for seed in range(200):
        rng = random.Random(seed)
        levels = [rng.uniform(1.0, 1.4) for _ in range(6)]
        drift = [math.exp(rng.gauss(0, 0.2)) for _ in range(60)]
        rounds = iter(drift)

        def sample(order, rng=rng, levels=levels, rounds=rounds):
            slow = next(rounds)
            spike = lambda: rng.choice([1.0] * 9 + [1.5])  # noqa: E731 - one line of noise
            return {i: levels[i] * slow * math.exp(rng.gauss(0, 0.03)) * spike() for i in order}

        outcome = race.race(6, sample, protected=0, seed=seed)
        trials = tuple(
            Trial(i, samples_s=lane.seconds, dropped_round=lane.dropped_round) for i, lane in enumerate(outcome.lanes)
        )
        left = Record(trials=trials, winner=outcome.order[0], heuristic=0, tied=outcome.tied)
        theirs, best = outcome.lanes[0].samples, outcome.lanes[outcome.order[0]].samples
        middle = median(math.exp(theirs[r] - best[r]) for r in theirs.keys() & best.keys())
        left = replace(left, gain=(middle, 0.99 * middle, 1.01 * middle))
        faster = [one for one in standings(left) if one.ratio is not None and one.ratio < 1.0]
        if faster and verdict(left).kind != "noisy":
            silent.append(seed)
    assert silent == []
