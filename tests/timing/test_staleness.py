"""Staleness, replayed: a loss of 3% is found, and without one there is hardly ever an alarm."""

from __future__ import annotations

import math
import random

import pytest

from ejkernel.ops.timing import staleness
from ejkernel.ops.timing.staleness import loss_of


def device(rng):
    """The noise of a device's own clock."""
    return rng.gauss(0, 0.006)


def host(rng):
    """The host's noise only adds: a little always, a lot in one sample of twelve."""
    return abs(rng.gauss(0, 0.04)) + (0.25 if rng.random() < 0.08 else 0.0)


def measured(rng, noise, loss):
    """Rounds on a machine that drifts as a whole, and for one of the two a little by itself, until it is sure."""
    kept, rival, drift, own = [], [], 0.0, 0.0
    while True:
        for _ in range(staleness.LEAST_ROUNDS):
            drift += rng.gauss(0, 0.02)
            own = 0.9 * own + rng.gauss(0, 0.002)
            kept.append(math.exp(drift + own + loss + noise(rng)))
            rival.append(math.exp(drift + noise(rng)))
        found = loss_of(kept, rival)
        if found.is_sure:
            return found


def alarm(rng, noise, loss):
    """As `remeasure` decides: a loss must be found twice."""
    return measured(rng, noise, loss).is_found and measured(rng, noise, loss).is_found


@pytest.mark.parametrize("noise", [device, host])
def test_a_loss_of_three_percent_is_found(noise):
    """In 95 of 100 tries at least."""
    rng = random.Random(1)
    assert sum(alarm(rng, noise, 0.03) for _ in range(100)) >= 95


@pytest.mark.parametrize(("noise", "tries"), [(device, 2000), (host, 150)])
def test_without_a_loss_there_is_no_alarm(noise, tries):
    """Not one in all these entries."""
    rng = random.Random(2)
    assert sum(alarm(rng, noise, 0.0) for _ in range(tries)) == 0


@pytest.mark.slow(at_length=True)
@pytest.mark.parametrize("noise", [device, host])
def test_a_hundred_runs_have_at_most_one_false_alarm(noise):
    """Of a hundred entries each."""
    rng = random.Random(3)
    assert sum(any(alarm(rng, noise, 0.0) for _ in range(100)) for _ in range(100)) <= 1


def test_a_small_loss_is_no_reason_to_tune_again():
    """One percent, known exactly."""
    rng = random.Random(4)
    assert not any(alarm(rng, device, 0.01) for _ in range(50))


def test_a_machine_that_is_too_noisy_is_called_so():
    """When the rounds are used up, and the loss that has to be found could hide in the error."""
    rng = random.Random(5)
    found = measured(rng, lambda rng: rng.gauss(0, 0.5), 0.0)
    assert (found.is_found, found.is_too_noisy) == (False, True)


def test_a_rival_that_is_far_behind_needs_few_rounds():
    """It is no rival."""
    found = measured(random.Random(6), host, -0.5)
    assert (found.is_found, found.rounds) == (False, staleness.LEAST_ROUNDS)


def test_the_loss_is_a_ratio_with_an_interval():
    """Middle, low and high end."""
    middle, low, high = measured(random.Random(7), device, 0.03).as_ratio()
    assert low < middle < high
    assert middle == pytest.approx(math.exp(0.03), rel=0.01)
