"""The rules of the race, with lanes that read a table and a clock that stands still."""

from __future__ import annotations

import itertools
import math

import pytest

from ejkernel.ops.tuning.race import Lane, race


def lane(times, log=None, name=None):
    """A lane with one time for all runs, or a list that is read from the front and stays at its last item."""
    row = list(times) if isinstance(times, (list, tuple)) else [times]

    def time(calls):
        if log is not None:
            log.append((name, calls))
        value = row.pop(0) if len(row) > 1 else row[0]
        if isinstance(value, Exception):
            raise value
        return value

    return Lane(time)


def run(lanes, *, warmup=1, rounds=3, seed=0, now=lambda: 0.0, deadline=math.inf):
    return race(lanes, warmup=warmup, rounds=rounds, seed=seed, now=now, deadline=deadline)


def over():
    """A `now` that ends every race as soon as it has its least."""
    return itertools.count(0, 1000.0).__next__


def test_the_fastest_is_first_and_the_others_follow():
    """`order` goes from the fastest to the slowest."""
    assert run([lane(3.0), lane(1.0), lane(2.0)]).order == (1, 2, 0)


def test_equal_lanes_keep_their_order():
    """The earlier lane wins a tie, and the tie is told."""
    outcome = run([lane(2.0), lane(1.0), lane(1.0)])

    assert outcome.order[0] == 1
    assert outcome.tied == (1, 2)


def test_a_lane_alone_is_not_tied():
    """A tie takes two."""
    assert run([lane(1.0)]).tied == ()
    assert run([lane(1.0), lane(5.0)]).tied == ()


def test_less_than_the_noise_floor_is_a_tie():
    """A difference of half a percent is never believed, one of five percent without spread is."""
    assert run([lane(1.005), lane(1.0)]).order[0] == 0
    assert run([lane(1.05), lane(1.0)]).order[0] == 1


def test_a_difference_within_the_spread_is_a_tie():
    """Where the rounds disagree about who is faster, the earlier lane wins."""
    assert (
        run([lane([1, 1.0, 1.3, 1.0, 1.3, 1.0]), lane([1, 1.2, 1.0, 1.1, 1.0, 1.1])], rounds=5, now=over()).order[0]
        == 0
    )


@pytest.mark.parametrize(("times", "dropped"), [(2.1, 1), (1.6, 2), (1.3, 3), (1.1, None)])
def test_the_clearly_slower_drop_out(times, dropped):
    """The more rounds have been run, the smaller the difference that ends a lane."""
    slow = lane(times)
    run([lane(1.0), slow], rounds=5)

    assert slow.dropped_round == dropped


def test_a_lane_with_one_fast_sample_stays():
    """Its fastest sample counts: one slow sample is the machine's doing."""
    noisy = lane([1.0, 5.0, 1.0])
    run([lane(1.0), noisy], rounds=1, now=over())
    assert noisy.dropped_round == 1
    noisy = lane([1.0, 1.0, 5.0])
    run([lane(1.0), noisy], rounds=2, now=over())

    assert noisy.dropped_round is None


def test_a_dropped_lane_runs_no_more():
    """It has as many samples as rounds that it took part in."""
    slow, fast = lane(10.0), lane(1.0)
    run([slow, fast], rounds=6)

    assert (len(slow.samples), len(fast.samples)) == (1, 6)


def test_a_dropped_lane_cannot_win():
    """Even if it looks faster later on, a lane that dropped out stays behind those that stayed."""
    early = lane([1.0, 3.0])
    other = lane([1.0, 1.0, 9.0])

    assert run([early, other], rounds=4).order == (1, 0)


@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_the_last_lane_left_gets_its_rounds(rounds):
    """The winner has at least as many samples as asked, also where all others dropped at once."""
    fast = lane(1.0)
    run([fast, lane(10.0)], rounds=rounds)

    assert len(fast.samples) == rounds


def test_unsettled_lanes_go_on_while_it_is_cheap():
    """Two that cannot be told apart get more rounds than the least, and not without end."""
    one, other = lane(1.0), lane(1.01)
    run([one, other], rounds=3)

    assert 3 < len(one.samples) <= 100


def test_unsettled_lanes_stop_when_it_is_dear():
    """Once time has passed there are no rounds beyond the least."""
    one, other = lane(1.0), lane(1.01)
    run([one, other], rounds=3, now=over())

    assert len(one.samples) == 3


@pytest.mark.parametrize("warmup", [1, 2, 4])
def test_every_lane_is_warmed_up(warmup):
    """So many runs of each lane come before the first sample of any."""
    log = []
    run([lane(1.0, log, "a"), lane(1.0, log, "b")], warmup=warmup, rounds=1, now=over())
    before = [name for name, _ in log[: 2 * warmup]]

    assert sorted(before) == ["a"] * warmup + ["b"] * warmup
    assert len(log) == 2 * warmup + 2


def test_a_warm_up_is_no_sample():
    """A first run that compiles or caches does not count."""
    slow_start = lane([100.0, 1.0])

    assert run([lane(2.0), slow_start]).order[0] == 1


def test_lanes_take_turns_within_each_round():
    """Every round runs every lane once, so that drift hits all alike."""
    log = []
    run([lane(1.0, log, name) for name in "abc"], warmup=1, rounds=4, now=over())
    names = [name for name, _ in log[3:]]

    assert len(names) == 12
    assert all(sorted(names[i : i + 3]) == ["a", "b", "c"] for i in range(0, 12, 3))


def test_one_seed_gives_one_order_of_turns():
    """Turns are shuffled by the seed and by nothing else."""

    def turns(seed):
        log = []
        run([lane(1.0, log, name) for name in "abcdef"], rounds=5, seed=seed, now=over())
        return log

    assert turns(1) == turns(1)
    assert turns(1) != turns(2)


def test_a_short_run_is_repeated_within_a_sample():
    """A sample of a call that takes a microsecond covers many calls, one of a slow call just one."""
    log = []
    run([lane(1e-6, log, "short"), lane(0.1, log, "long")], rounds=1, now=over())
    calls = dict(log[2:])

    assert calls["short"] > 1
    assert calls["long"] == 1


def test_a_lane_that_fails_ends_alone():
    """Whatever it raises, the others race on and it is in no order."""
    failing = lane([1.0, 1.0, RuntimeError("worn out")])
    outcome = run([failing, lane(2.0), lane(1.5)])

    assert outcome.order == (2, 1)
    assert str(failing.failure) == "worn out"


def test_a_lane_that_fails_while_warming_up_ends_alone():
    """It never gets a sample."""
    failing = lane(ValueError("at once"))
    outcome = run([failing, lane(2.0)])

    assert (outcome.order, failing.samples) == ((1,), [])


def test_if_all_fail_there_is_no_winner():
    """The order is empty."""
    assert run([lane(ValueError("a")), lane(ValueError("b"))]).order == ()


def test_a_race_without_lanes_ends():
    """Nobody wins."""
    assert run([]).order == ()


def test_the_deadline_ends_the_race_after_a_round():
    """There is always one round to judge by, and the outcome says that it was cut short."""
    ticks = itertools.count(0, 10.0).__next__
    one, other = lane(1.0), lane(1.05)
    outcome = run([one, other], rounds=50, now=ticks, deadline=5.0)

    assert (len(one.samples), len(other.samples)) == (1, 1)
    assert outcome.order[0] == 0
    assert not outcome.finished


def test_a_race_that_ran_its_rounds_is_finished():
    """Without a deadline every round is run."""
    assert run([lane(1.0), lane(1.05)], rounds=5).finished
