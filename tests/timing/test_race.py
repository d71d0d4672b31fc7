"""The rules of the race, with candidates whose times stand in a table."""

from __future__ import annotations

import itertools
import math
import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.ops.timing.race import Rules, conclude, race

# One percent is a tie, and the middle sample counts.
PLAIN = Rules(quantile=0.5, tie=0.01)


class Table:
    """A round that reads each candidate's times from a row, which stays at its last item."""

    def __init__(self, *rows, effects=()):
        self.rows = [list(row) if isinstance(row, (list, tuple)) else [row] for row in rows]
        self.effects = list(effects)
        self.orders: list[list[int]] = []

    def __call__(self, order):
        self.orders.append(list(order))
        at = len(self.orders) - 1
        effect = self.effects[min(at, len(self.effects) - 1)] if self.effects else 1.0
        return {i: self._time(i, at, effect) for i in order}

    def _time(self, place, at, effect):
        row = self.rows[place]
        value = row[min(at, len(row) - 1)]
        return value if isinstance(value, Exception) else value * effect

    @property
    def runs(self):
        return sum(map(len, self.orders))


def run(*rows, effects=(), **settings):
    """The outcome of a race between these rows, and the table that was read."""
    table = Table(*rows, effects=effects)
    return race(len(rows), table, **{"rules": PLAIN, **settings}), table


def counts(outcome):
    return [len(lane.samples) for lane in outcome.lanes]


# The winner.


def test_the_fastest_is_first_and_the_others_follow():
    """`order` goes from the fastest to the slowest of those that stayed, then to those that dropped out."""
    outcome, _ = run(3.0, 1.0, 2.0)

    assert outcome.order == (1, 2, 0)


def test_of_those_that_dropped_out_the_faster_comes_first():
    """They are told apart by their times, not by when they went."""
    outcome, _ = run(1.0, 90.0, 40.0, 1.5)

    assert outcome.order == (0, 3, 2, 1)


@pytest.mark.parametrize("faster", [0.991, 0.995, 0.999])
def test_less_than_the_tie_is_never_believed(faster):
    """However often it is measured, a difference below the limit goes to the earlier candidate."""
    outcome, _ = run(1.0, faster)

    assert outcome.order == (0, 1)
    assert outcome.tied == (0, 1)


@pytest.mark.parametrize("faster", [0.98, 0.95, 0.5])
def test_more_than_the_tie_is_believed_where_there_is_no_noise(faster):
    """Two percent without any spread decide."""
    outcome, _ = run(1.0, faster)

    assert outcome.order == (1, 0)
    assert outcome.tied == ()


def test_the_earlier_of_equals_wins():
    """Of several within the tie the first given wins, whichever looked fastest."""
    outcome, _ = run(2.0, 1.002, 1.0, 1.001)

    assert outcome.order[0] == 1
    assert outcome.tied == (1, 2, 3)


@pytest.mark.parametrize("protected", [0, 1, 2])
def test_the_protected_candidate_wins_ties(protected):
    """The heuristic is kept among equals, wherever it stands."""
    outcome, _ = run(1.0, 1.0, 1.0, protected=protected)

    assert outcome.order[0] == protected


@pytest.mark.one_leg
def test_nobody_beats_the_protected_candidate_by_less_than_nothing():
    """On a machine with spikes: the winner was as fast in the rounds that had both, which is what a gain tells."""
    told = []
    for seed in range(300):
        noise = random.Random(seed)

        def spiky(order, noise=noise):
            return {i: (1 + 0.02 * i) * math.exp(abs(noise.gauss(0, 0.5)) * (noise.random() < 0.6)) for i in order}

        lanes = race(6, spiky, least_rounds=5, protected=0, seed=seed)
        first, mine = (lanes.lanes[i].samples for i in (lanes.order[0], 0))
        told.append(median(mine[r] - first[r] for r in mine.keys() & first.keys()))

    assert min(told) >= 0


@pytest.mark.parametrize(("gap", "winner"), [(0.02, 0), (0.10, 1)])
def test_a_slight_gain_counts_where_its_interval_does_not_reach_below_one(gap, winner):
    """One in three rounds says that the heuristic is the faster; a large gain stands above that."""

    def unsure(order):
        turn = len(turns)
        turns.append(order)
        own = 1.0 + gap if turn % 3 else 0.98
        return {i: own if i == 0 else 1.0 for i in order}

    turns = []
    rules = Rules(tie=0.001, errors_to_declare=0.0, errors_to_tie=0.0, quantile=0.5, least_gaps=(9.0,) * 40)
    found = race(2, unsure, least_rounds=9, protected=0, rules=rules)
    assert found.order[0] == winner


def test_the_protected_candidate_wins_nothing_but_ties():
    """One that is slower by more than the tie loses."""
    outcome, _ = run(1.05, 1.0, protected=0)

    assert outcome.order == (1, 0)


def test_a_candidate_alone_wins_without_a_tie():
    """A race of one has its least number of rounds and no tie: that takes two."""
    outcome, table = run(1.0, least_rounds=4)

    assert (outcome.order, outcome.tied, len(table.orders)) == ((0,), (), 4)


def test_a_race_without_candidates_ends():
    """No candidate wins and nothing is asked."""
    outcome, table = run()

    assert (outcome.order, outcome.rounds, outcome.runs, table.orders) == ((), 0, 0, [])


def test_a_gap_within_the_noise_is_declared_as_a_tie():
    """A candidate that leads by less than the standard errors allow is told with those it could not be told from."""
    one = [1.00, 1.30, 1.02, 1.25, 1.01, 1.28]
    other = [1.28, 1.01, 1.25, 1.04, 1.30, 1.02]
    outcome, _ = run(one, other, rules=Rules(quantile=0.5, most_rounds=6))

    assert outcome.tied == (0, 1)
    assert outcome.noise > 0.05


def test_who_dropped_out_is_in_no_tie():
    """A tie holds those that were there at the end."""
    outcome, _ = run(1.0, 1.001, 10.0)

    assert outcome.tied == (0, 1)


@settings(deadline=None, max_examples=60)
@given(
    times=st.lists(st.floats(1e-6, 1e2), min_size=1, max_size=12),
    effects=st.lists(st.floats(0.5, 2.0), max_size=6),
    seed=st.integers(0, 1000),
    quantile=st.sampled_from([0.25, 0.5]),
    protected=st.sampled_from([None, 0]),
)
def test_without_noise_the_winner_is_as_good_as_the_best(times, effects, seed, quantile, protected):
    """Whatever each round does to all alike, the pick is within the tie of the best."""
    rules = Rules(quantile=quantile)
    outcome, _ = run(*times, effects=effects, seed=seed, rules=rules, protected=protected)

    assert math.log(times[outcome.order[0]] / min(times)) <= rules.tie + 1e-9


# Candidates that drop out, and when.


@pytest.mark.parametrize(
    ("slower", "dropped"),
    [(3.1, 1), (2.9, 2), (1.6, 2), (1.4, 3), (1.25, 4), (1.15, 5), (1.08, 6), (1.03, 7), (1.005, None)],
)
def test_the_more_samples_the_smaller_the_gap_that_ends_a_candidate(slower, dropped):
    """The limits by the number of samples, each just passed."""
    outcome, _ = run(1.0, slower, least_rounds=10, rules=Rules(least_gaps=(1.10, 0.45, 0.30, 0.20, 0.10, 0.06)))

    assert outcome.lanes[1].dropped_round == dropped


def test_a_candidate_that_dropped_out_runs_no_more():
    """It has as many samples as rounds that it took part in; the winner has its least number."""
    outcome, table = run(10.0, 1.0, least_rounds=6)

    assert counts(outcome) == [1, 6]
    assert table.orders[1:] == [[1]] * 5


def test_a_candidate_that_dropped_out_stays_out():
    """Even if those that stayed get slower later, it is behind them."""
    outcome, _ = run([4.0], [1.0, 1.0, 9.0, 9.0, 9.0], least_rounds=5)

    assert outcome.order == (1, 0)


def test_a_gap_within_its_standard_error_does_not_drop():
    """Where the samples scatter by as much as the gap, a candidate stays although the gap passes the limit."""
    steady = [1.0, 1.5, 1.0, 1.5, 1.0, 1.5, 1.0, 1.5]
    against = [1.5, 1.2, 1.6, 1.1, 1.5, 1.2, 1.6, 1.1]
    rules = Rules(quantile=0.5, least_gaps=(9.0, 0.01), most_rounds=8)
    sure, _ = run(steady, against, rules=Rules(quantile=0.5, least_gaps=(9.0, 0.01), errors_to_drop=0.0))
    careful, _ = run(steady, against, rules=rules)

    assert sure.lanes[1].dropped_round is not None or sure.lanes[0].dropped_round is not None
    assert [lane.dropped_round for lane in careful.lanes] == [None, None]


def test_what_a_round_does_to_all_is_divided_out():
    """Rounds that are slower by half for all candidates leave no noise and drop the same ones at the same time."""
    rows = [1.0, 1.02, 1.3]
    plain, _ = run(*rows, least_rounds=6)
    shaken, _ = run(*rows, least_rounds=6, effects=[1.0, 1.5, 0.9, 1.4, 1.1, 1.6])

    assert shaken.noise == pytest.approx(0.0, abs=1e-9)
    assert shaken.order == plain.order
    assert [lane.dropped_round for lane in shaken.lanes] == [lane.dropped_round for lane in plain.lanes]


@pytest.mark.parametrize("least_rounds", [2, 3, 5])
def test_the_protected_candidate_stays_for_the_least_rounds(least_rounds):
    """The gain is told against it, so that it needs samples, however slow it is; then it goes like any other."""
    outcome, _ = run(50.0, 1.0, 60.0, protected=0, least_rounds=least_rounds)

    assert counts(outcome) == [least_rounds, least_rounds, 1]
    assert outcome.order[0] == 1


@pytest.mark.parametrize(("quantile", "winner"), [(0.25, 0), (0.5, 1)])
def test_the_quantile_says_which_sample_stands_for_a_candidate(quantile, winner):
    """The host's noise only adds: three slow samples of five say nothing by a lower quantile, by the middle they do."""
    spiky = [1.5, 1.0, 1.5, 1.0, 1.5]
    rules = Rules(quantile=quantile, most_rounds=5, least_gaps=(9.0,) * 5)
    outcome, _ = run(spiky, 1.1, 1.1, least_rounds=5, rules=rules)

    assert outcome.order[0] == winner


def test_one_lucky_sample_does_not_win_by_the_middle():
    """A device's noise has two sides: one fast sample of five says nothing by the median."""
    lucky = [1.1, 1.1, 0.9, 1.1, 1.1]
    outcome, _ = run(lucky, 1.0, least_rounds=5, rules=Rules(quantile=0.5, most_rounds=5, least_gaps=(9.0,) * 5))

    assert outcome.order[0] == 1


# When it ends.


@pytest.mark.parametrize("least_rounds", [1, 3, 7])
def test_the_last_one_left_gets_its_rounds(least_rounds):
    """The winner has at least as many samples as asked, also where all others dropped at once."""
    outcome, _ = run(1.0, 10.0, least_rounds=least_rounds)

    assert counts(outcome) == [least_rounds, 1]


def test_equals_without_noise_end_after_the_least_rounds():
    """Where every candidate left is surely as good as the leader there is nothing more to learn."""
    outcome, _ = run(1.0, 1.0, 1.001, least_rounds=3)

    assert (outcome.rounds, outcome.finished) == (3, True)


def test_what_cannot_be_told_apart_goes_on_to_the_most_rounds():
    """Noise that hides which candidate is better is worth more rounds, not without end."""
    noisy = random.Random(1)
    rows = [[noisy.uniform(1.0, 1.3) for _ in range(200)] for _ in range(3)]
    outcome, _ = run(*rows, least_rounds=3, rules=Rules(quantile=0.5, most_rounds=15))

    assert (outcome.rounds, outcome.finished) == (15, True)
    assert len(outcome.tied) > 1


@pytest.mark.parametrize("most_runs", [5, 12, 17, 40])
def test_no_more_runs_than_allowed(most_runs):
    """A round that would pass the limit is not begun; the first one always is."""
    noisy = random.Random(2)
    rows = [[noisy.uniform(1.0, 1.3) for _ in range(50)] for _ in range(5)]
    outcome, table = run(*rows, least_rounds=3, most_runs=most_runs)

    assert outcome.runs == table.runs <= most_runs
    assert outcome.rounds >= 1
    assert outcome.order


def test_being_out_of_time_ends_the_race_after_a_round():
    """There is always one round to judge by, and the outcome says that it was cut short."""
    outcome, table = run(1.0, 1.2, least_rounds=50, out_of_time=lambda: True)

    assert (len(table.orders), outcome.order, outcome.finished) == (1, (0, 1), False)


def test_time_may_run_out_later():
    """The race ends before the round that would begin too late."""
    ticks = itertools.count().__next__
    outcome, _ = run(1.0, 1.001, least_rounds=50, out_of_time=lambda: ticks() >= 3)

    assert (outcome.rounds, outcome.finished) == (4, False)


@pytest.mark.parametrize("least_rounds", [1, 3, 6])
def test_having_enough_never_takes_from_the_least_rounds(least_rounds):
    """Beyond the least number of rounds a race goes on while it is cheap; the least are run however dear they are."""
    noisy = random.Random(3)
    rows = [[noisy.uniform(1.0, 1.3) for _ in range(50)] for _ in range(2)]
    outcome, _ = run(*rows, least_rounds=least_rounds, enough=lambda: True)

    assert (outcome.rounds, outcome.finished) == (least_rounds, True)


def test_a_round_that_is_cut_short_is_the_last():
    """A candidate that had no turn has no sample and cannot win; the others are judged by what there is."""

    def cut(order):
        return {i: 1.0 + i for i in order if i != 0}

    outcome = race(3, cut, rules=PLAIN)

    assert outcome.order == (1, 2)
    assert (outcome.rounds, outcome.runs, outcome.finished) == (1, 2, False)
    assert counts(outcome) == [0, 1, 1]


def test_a_race_that_ran_its_rounds_is_finished():
    """Without a deadline the outcome says so."""
    outcome, _ = run(1.0, 1.05, least_rounds=5)

    assert outcome.finished


# Turns.


def test_everybody_has_one_turn_in_each_round():
    """Each round asks for every living candidate once, so that drift hits all alike."""
    outcome, table = run(*[1.0] * 6, least_rounds=5)

    assert all(sorted(order) == list(range(6)) for order in table.orders)
    assert (outcome.rounds, outcome.runs) == (5, 30)


def test_turns_are_shuffled():
    """No candidate is always first."""
    _, table = run(*[1.0] * 6, least_rounds=8)

    assert len({tuple(order) for order in table.orders}) > 1


def test_one_seed_and_the_same_times_give_one_path():
    """Orders, drops and outcome follow from seed and times alone; another seed takes other turns."""
    noisy = random.Random(4)
    rows = [[noisy.gauss(1.0 + 0.1 * i, 0.05) for _ in range(60)] for i in range(6)]
    (one, first), (same, second), (_, third) = (run(*rows, seed=seed) for seed in (1, 1, 2))

    assert first.orders == second.orders != third.orders
    assert one == same


# What fails.


def test_who_fails_ends_alone():
    """Whatever it raises, the others race on, it is in no order and its reason is kept."""
    outcome, _ = run([0.5, RuntimeError("worn out")], 2.0, 1.5)

    assert outcome.order == (2, 1)
    assert str(outcome.lanes[0].failure) == "worn out"
    assert counts(outcome)[0] == 1


def test_who_fails_at_once_has_no_sample():
    """It never counts."""
    outcome, _ = run(ValueError("at once"), 2.0)

    assert (outcome.order, counts(outcome)[0]) == ((1,), 0)


def test_if_all_fail_there_is_no_winner():
    """The order is empty, and the race ends at once."""
    outcome, table = run(ValueError("a"), ValueError("b"))

    assert (outcome.order, outcome.tied, len(table.orders)) == ((), (), 1)


def test_if_all_that_stayed_fail_one_that_dropped_out_wins():
    """A slow candidate that works is better than none."""
    outcome, _ = run([1.0, RuntimeError("gone")], 10.0, 30.0)

    assert outcome.order == (1, 2)


# What it says.


def test_the_noise_is_that_of_one_sample():
    """The figure is a share: the spread of single samples once round effects are divided out."""
    noisy = random.Random(5)
    rows = [[noisy.gauss(1.0, 0.02) for _ in range(40)] for _ in range(8)]
    outcome, _ = run(*rows, rules=Rules(quantile=0.5, most_rounds=40, least_gaps=(9.0,) * 40, errors_to_tie=9.0))

    assert 0.01 < outcome.noise < 0.03


def test_samples_are_seconds_in_the_order_of_rounds():
    """A lane gives back what was measured."""
    outcome, _ = run([1.0, 1.2, 1.1], 9.0, least_rounds=3)

    assert outcome.lanes[0].seconds == pytest.approx((1.0, 1.2, 1.1))


def test_a_time_of_zero_is_no_obstacle():
    """A clock that is too coarse for a candidate does not break the race."""
    outcome, _ = run(0.0, 1.0)

    assert outcome.order == (0, 1)


# What is told of a race, and a race that was cut off.


def test_each_that_is_dropped_is_told_once_with_its_ratio():
    """Its seconds, and how many times those of the leader they are; those that stay are not told."""
    told = []
    run(1.0, 5.0, 1.001, dropped=lambda i, seconds, ratio: told.append((i, seconds, ratio)))

    assert told == [(1, pytest.approx(5.0), pytest.approx(5.0))]


def test_rounds_that_were_cut_off_have_an_outcome():
    """The best of them by what was timed; a candidate that is in the later rounds alone is compared through them."""
    outcome = conclude(3, [{0: 2.0, 1: 4.0}, {0: 1.0, 2: 0.7}], rules=PLAIN)

    assert outcome.order == (2, 0, 1)
    assert (counts(outcome), outcome.finished) == ([2, 1, 1], False)


def test_in_rounds_that_were_cut_off_the_protected_one_wins_where_it_was_faster():
    """Tuned is never slower than untuned."""
    outcome = conclude(2, [{0: 1.0, 1: 0.97}, {0: 1.0, 1: 1.05}, {0: 1.0, 1: 1.05}], protected=0)

    assert outcome.order[0] == 0


def test_a_gain_that_is_slight_in_the_rounds_that_had_both_needs_an_interval_above_one():
    """The other's fastest rounds make a gap of all rounds, where those that had both say one hundredth and doubt it."""
    rows = [{0: 1.0, 1: 0.5}, {0: 1.0, 1: 1.6}, {0: 1.0, 1: 0.99}, {1: 0.5}, {1: 0.5}, {1: 0.5}]

    assert conclude(2, rows, protected=0).order[0] == 0


def test_without_any_round_nothing_has_won():
    """Then there is no order."""
    assert conclude(2, []).order == ()


def test_with_few_left_one_spike_ends_none():
    """A first sample five times too long does not cost the best its place where the rules say so."""
    first = {0: 1.0, 1: 4.5}
    rules = Rules(few=12)
    seen = []

    def sample(order):
        seen.append(list(order))
        return {i: first[i] if len(seen) == 1 else {0: 1.0, 1: 0.9}[i] for i in order}

    assert race(2, sample, rules=rules).order[0] == 1
    assert sorted(seen[1]) == [0, 1]


@pytest.mark.parametrize(("spike", "rounds"), [(None, 5), (1, 8)])
def test_the_protected_candidate_stays_until_it_is_surely_slower(spike, rounds):
    """One round in which the other one is held up keeps the gain's interval below one, until there are eight."""
    turns = []

    def sample(order):
        turns.append(list(order))
        held_up = 2.0 if len(turns) - 1 == spike else 1.0
        return {i: {0: 1.5, 1: held_up, 2: 9.0}[i] for i in order}

    outcome = race(3, sample, protected=0, least_rounds=5, rules=Rules(errors_to_drop=0.0, quantile=0.5))

    assert outcome.order[0] == 1
    assert sum(0 in turn for turn in turns) == rounds


def test_what_cannot_be_told_from_the_protected_one_does_not_replace_it():
    """A declared tie is the heuristic's, however the samples happen to lie."""
    rounds = itertools.cycle([(1.0, 0.9), (1.3, 1.0), (0.8, 1.1), (1.1, 0.85)])

    def sample(order):
        found = next(rounds)
        return {i: found[i] for i in order}

    outcome = race(2, sample, protected=0, rules=Rules(most_rounds=6, quantile=0.5))

    assert 0 in outcome.tied
    assert outcome.order[0] == 0
