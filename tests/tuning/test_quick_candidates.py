"""Which quickly compiled candidates may win, as numbers alone."""

from __future__ import annotations

import pytest

from ejkernel.ops.tuning.quick_candidates import HOPELESS, NEAR, QuickCandidates


def candidates(*seconds, parts=None, kept=None):
    """Those of candidates with these seconds; all have the same parts unless told."""
    places = range(len(seconds))
    return QuickCandidates(dict(enumerate(seconds)), places, (parts or ["products"] * len(seconds)).__getitem__, kept)


def test_before_a_gain_is_known_only_what_is_far_behind_cannot_win():
    """Nothing is taken off a time then."""
    made = candidates(1.0, HOPELESS - 0.01, HOPELESS + 0.01)
    assert made.why_hopeless(1) is None
    assert made.why_hopeless(2).ratio == pytest.approx(HOPELESS + 0.01)
    assert "1.6 times as long as the fastest, before" in made.why_hopeless(2).message


def test_the_gain_of_equal_parts_decides_once_it_is_known():
    """Seconds, not a share: what differs between these candidates is their kernels."""
    made = candidates(1.0, 1.0 + 0.9 * (NEAR - 1) * 0.8, 1.2)
    made.note([0], {0: 0.8})
    assert made.why_hopeless(1) is None
    assert made.why_hopeless(2).ratio == pytest.approx(1.25)
    assert made.why_hopeless(2).is_estimated
    assert "1.25 times as long as the fastest, with the gain" in made.why_hopeless(2).message


def test_the_largest_gain_counts():
    """A run that was slow by chance costs no other candidate its place."""
    made = candidates(1.0, 1.0, 1.2)
    made.note([0, 1], {0: 0.99, 1: 0.8})
    assert made.why_hopeless(2).ratio == pytest.approx(1.25)


def test_one_that_does_not_run_is_no_measure():
    """Neither what it gained nor its time is known."""
    made = candidates(0.5, 1.0, 1.1)
    assert made.why_hopeless(2) is not None
    made.note([0], {})
    assert made.why_hopeless(2) is None


def test_the_one_that_is_kept_is_compiled_whatever_it_promises():
    """It is what runs without a tuning."""
    made = candidates(9.0, 1.0, kept=0)
    assert made.why_hopeless(0) is None
    assert made.in_order([1, 0]) == [0, 1]


def test_one_of_each_kind_of_parts_comes_first():
    """It shows what the others of its kind gain."""
    made = candidates(1.0, 1.1, 1.2, 1.3, parts=["a", "a", "b", "b"])
    assert made.in_order(range(4)) == [0, 2, 1, 3]


def test_a_loss_is_taken_into_account_like_a_gain():
    """A compiler may choose worse by its timing; a quick program is not what others are compared with then."""
    made = candidates(0.8, 0.84, 1.1)
    made.note([0], {0: 0.99})
    assert made.why_hopeless(1) is None
    assert made.why_hopeless(2).ratio == pytest.approx(1.29 / 0.99)


def test_a_device_that_has_become_slower_is_no_loss():
    """The heuristic, whose program was there at the first look, runs along at each later one."""
    made = QuickCandidates({0: 1.0, 1: 1.0, 2: 1.04}, [1, 2], lambda number: "products", kept=0)
    assert made.standard == 0
    # Everything takes 6% longer by now.
    made.note([1], {0: 1.06, 1: 1.06})
    assert made.why_hopeless(2) is None
    made.note([2], {0: 2.0, 2: 2.0})
    assert made._gained == pytest.approx({"products": 0.04})


def test_a_heuristic_that_failed_in_the_first_look_is_no_standard():
    """It has no time there, and runs no more."""
    assert QuickCandidates({1: 1.0, 2: 0.5}, [2], str, kept=0).standard == 1


def test_without_a_heuristic_the_fastest_program_that_stays_is_the_standard():
    """Where all were compiled quickly there is none, and looks are compared as they are."""
    assert QuickCandidates({0: 2.0, 1: 1.0, 2: 0.5}, [2], str, None).standard == 1
    assert QuickCandidates({0: 2.0, 1: 1.0}, [0, 1], str, 0).standard is None
