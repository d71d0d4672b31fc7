"""Which clock times a race, how many calls make a sample, and what happens when a clock cannot be had."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import pytest
from fakes_tuning import Rounds, program

from ejkernel.ops import Tuner
from ejkernel.ops.timing import profiler, sampler
from ejkernel.ops.timing.clock import Run, WallClock, in_turns
from ejkernel.ops.timing.profiler import ProfilerClock, ProfilerUnavailable
from ejkernel.ops.timing.program import CompiledProgram
from ejkernel.ops.timing.race import Rules
from ejkernel.ops.timing.sampler import DEVICE_RULES, HOST_RULES, RoundSampler, once

X = jnp.ones(8)


class Calls:
    """A clock that answers with a constant and keeps how many calls it was asked for."""

    name = "calls"

    def __init__(self, seconds):
        self.seconds = seconds
        self.asked = []

    def time(self, call, leaves, calls):
        self.asked.append(calls)
        return self.seconds


def watch(programs, clock=None, **settings):
    return RoundSampler(clock, dict(enumerate(programs)), (X,), list(range(len(programs))), **{"warmup": 1, **settings})


# Which clock.


@pytest.mark.parametrize("platform", ["gpu", "cuda", "rocm", "tpu"])
def test_accelerators_have_their_own_clock(platform):
    """Programs for a GPU or TPU are timed by the profiler, with the rules of an exact clock."""
    found = watch([program("a", platform), program("b", platform)])

    assert isinstance(found.clock, ProfilerClock)
    assert (found.rules, found.clock_name) == (DEVICE_RULES, "profiler")


@pytest.mark.parametrize(
    "programs",
    [
        [program("a", "cpu"), program("b", "cpu")],
        [program("a", "gpu"), program("b", "cpu")],
        [program("a", "gpu"), program("a", "gpu")],
        [program("a", "gpu"), CompiledProgram(lambda x: x, "forward")],
        [program("a", "new")],
        [],
    ],
    ids=["cpu", "mixed", "equal names", "not compiled", "unknown", "none"],
)
def test_elsewhere_it_is_the_hosts_clock(programs):
    """Where the profiler could not tell programs apart, or knows nothing of the platform, the wall clock serves."""
    found = watch(programs)

    assert isinstance(found.clock, WallClock)
    assert (found.rules, found.clock_name) == (HOST_RULES, "wall")


def test_a_clock_for_whole_rounds_of_ones_own_has_the_rules_of_a_device():
    """It times on a device, so that noise has two sides; what a clock declares goes before that."""
    own = Rules(quantile=0.4)
    declared, host = Rounds({}), Calls(1.0)
    declared.rules = host.rules = own

    assert watch([program("a")], Rounds({})).rules == DEVICE_RULES
    assert watch([program("a")], Calls(1.0)).rules == HOST_RULES
    assert watch([program("a")], declared).rules is watch([program("a")], host).rules is own


def test_a_clock_that_is_given_is_used():
    """Nothing is chosen where the caller has chosen."""
    clock = Calls(1.0)

    assert watch([program("a")], clock).clock is clock


def test_the_record_of_a_race_on_a_cpu_says_wall():
    """The clock that was used is told."""
    tuner = Tuner(1, 1)
    tuner.autotune(lambda cfg: lambda x: x * cfg / cfg, (X,), {}, [1.0, 2.0])

    assert tuner.record.clock == "wall"


def test_a_clock_for_whole_rounds_gets_whole_rounds():
    """It is given every program of the round at once, by place and name, in the order of the turns."""
    clock = Rounds({"a": 1.0, "b": 2.0})
    found = watch([program("a"), program("b")], clock).round([1, 0])

    assert found == {0: 1.0, 1: 2.0}
    assert [(run.number, run.name) for run in clock.seen[0]] == [(1, "b"), (0, "a")]


def test_a_tuner_takes_a_clock_for_whole_rounds():
    """The fastest by that clock wins, and the record names it."""

    class Third:
        name = "third"

        def round(self, runs):
            return {run.number: 1.0 if run.number == 2 else 5.0 for run in runs}

    tuner = Tuner(clock=Third())

    assert tuner.autotune(lambda cfg: lambda x: x * cfg / cfg, (X,), {}, [2.0, 3.0, 4.0]) == 4.0
    assert tuner.record.clock == "third"


def test_a_tuner_measures_by_a_clock_for_whole_rounds():
    """`measure` takes any clock that `autotune` takes, one run a sample."""

    class Steps:
        name = "steps"

        def __init__(self):
            self.seen = []

        def round(self, runs):
            self.seen.append([(run.number, run.calls) for run in runs])
            return {0: float(len(self.seen))}

    clock = Steps()
    tuner = Tuner(0, 3, clock=clock)

    assert tuner.measure(jnp.sin, X) == 2.0
    assert clock.seen == [[(0, 1)]] * 3
    assert tuner.record.clock == "steps"


def test_what_a_program_raises_in_a_measured_round_is_raised():
    """An error that a clock hands over as data is the caller's where there is one program."""

    class Failing:
        name = "failing"

        def round(self, runs):
            return {0: OSError("gone")}

    with pytest.raises(OSError, match="gone"):
        once(Failing(), program("a"), (X,))


class Unavailable(ProfilerClock):
    """A profiler that gives so many rounds and then no more."""

    def __init__(self, rounds=0):
        self.left = rounds

    def rounds(self, schedule):
        return [self.round(schedule[0])]

    def round(self, runs):
        if not self.left:
            raise ProfilerUnavailable("the profiler is in use")
        self.left -= 1
        return {run.number: 1e6 * (run.number + 1) for run in runs}


def test_each_turn_is_told_and_the_end_of_a_trace():
    """Each run is told before it is made, and what comes after the last one is told from it."""

    class Telling(ProfilerClock):
        def rounds(self, schedule):
            for run in schedule[0]:
                run.before()
            schedule[0][-1].after()
            return [{run.number: 1e-3 for run in schedule[0]}]

    told = []
    found = watch([program("a"), program("b")], Telling(), turn=lambda place, doing: told.append((place, doing)))
    found.round([0, 1])

    assert told[-3:] == [(0, "race"), (1, "race"), (1, "trace")]


def test_a_gpu_s_caches_are_emptied_before_each_call_of_a_sample(monkeypatch):
    """As often as the program runs, and the record says so."""
    log = []
    monkeypatch.setattr(sampler, "flush_for", lambda device: lambda: log.append("flush"))
    kinds = [program(name, call=lambda x, name=name: log.append(name)) for name in "ab"]
    found = watch(kinds, FlushingClock(), warmup=1)
    found.round([0, 1])
    del log[:]
    found.round([0, 1])

    assert len(log) >= 64
    assert set(log[::2]) == {"flush"}
    assert set(log[1::2]) == {"a", "b"}
    assert found.conditions.endswith("caches emptied before each call")


class FlushingClock(ProfilerClock):
    """Runs without a profiler, as the real one does."""

    def rounds(self, schedule):
        for run in (run for runs in schedule for run in runs):
            for _ in range(run.calls):
                profiler._flushed(run)
        return [{run.number: 1e-6 for run in runs} for runs in schedule]


def test_a_host_s_clock_empties_no_caches():
    """It would time that too."""
    found = watch([program("a", "cpu")])
    assert found.conditions.endswith("caches as the program before left them")


def test_what_is_dropped_is_told_with_its_ratio():
    """Seconds, and how many times those of the fastest they are."""
    told = []
    clock = Rounds({"a": 1.0, "b": 8.0})
    watch([program("a"), program("b")], clock, dropped=lambda *about: told.append(about)).race(least_rounds=3)

    assert told == [(1, pytest.approx(8.0), pytest.approx(8.0))]


@pytest.mark.parametrize("rounds", [0, 2])
def test_without_the_profiler_the_race_is_run_by_the_wall_clock(rounds):
    """From its start, by that clock's rules: times of two clocks do not compare. The note says why."""
    found = watch([program("a"), program("b")], Unavailable(rounds))
    outcome = found.race(least_rounds=3)

    assert found.clock_name == "wall (the profiler is in use)"
    assert found.rules == HOST_RULES
    # None of the weeks that the profiler spoke of.
    assert all(seconds < 1e6 for lane in outcome.lanes for seconds in lane.seconds)
    assert sorted(outcome.order) == [0, 1]


def test_the_record_says_why_it_is_the_wall_clock():
    """A tuning whose profiler cannot be had ends with an answer and the reason."""
    tuner = Tuner(clock=Unavailable())
    tuner.autotune(lambda cfg: lambda x: x * cfg / cfg, (X,), {}, [2.0, 3.0])

    assert tuner.record.clock == "wall (the profiler is in use)"
    assert tuner.record.winner is not None


def test_measuring_says_why_it_is_the_wall_clock():
    """The same for one function."""
    tuner = Tuner(clock=Unavailable())

    assert tuner.measure(jnp.sin, X) > 0
    assert tuner.record.clock == "wall (the profiler is in use)"


# How many calls make a sample, and how many come before.


@pytest.mark.parametrize(("seconds", "calls"), [(1e-2, 1), (1e-3, 1), (4e-4, 3), (1e-4, 10), (1e-6, 64), (0.0, 64)])
def test_a_sample_on_the_host_is_long_enough(seconds, calls):
    """Short calls are repeated until a sample has about a millisecond, and not without end."""
    clock = Calls(seconds)
    watch([program("a", "cpu")], clock).round([0])

    assert clock.asked == [1, calls]


@pytest.mark.parametrize(("seconds", "calls"), [(1e-3, 1), (50e-6, 2), (10e-6, 6), (1e-9, 16)])
def test_short_kernels_get_more_calls_on_a_device(seconds, calls):
    """What a kernel takes there is known after its first round; then short ones run several times a sample."""
    clock = Rounds({"a": seconds})
    found = watch([program("a")], clock)
    found.round([0])
    found.round([0])

    assert [run.calls for (run,) in clock.seen] == [1, calls]


@dataclass
class Traces:
    """A clock for several rounds at the price of one: each round of a program takes a second more than the last."""

    seconds: dict[str, float]
    name: str = "traces"
    seen: list[list[list[Any]]] = field(default_factory=list)

    def round(self, runs):
        return self.rounds([runs])[0]

    def rounds(self, schedule):
        before = sum(map(len, self.seen))
        self.seen.append([[run.name for run in runs] for runs in schedule])
        return [
            {run.number: self.seconds[run.name] * (1 + 1e-3 * (before + turn)) for run in runs}
            for turn, runs in enumerate(schedule)
        ]


def test_few_short_kernels_run_several_rounds_in_one_trace():
    """After the first round, which says how long they are; each round is still one round, in an order of its own."""
    clock = Traces({"a": 20e-6, "b": 21e-6})
    found = watch([program("a"), program("b")], clock)
    rounds = [found.round([0, 1]) for _ in range(10)]

    assert [len(trace) for trace in clock.seen] == [1, 8, 8]
    assert [round(times[0] / 20e-6, 6) for times in rounds] == [1 + 1e-3 * turn for turn in range(10)]
    assert {tuple(order) for order in clock.seen[1]} == {("a", "b"), ("b", "a")}


def test_who_has_left_the_race_does_not_show_in_rounds_measured_ahead():
    """A round holds those that were asked for, no more."""
    clock = Traces({"a": 20e-6, "b": 21e-6})
    found = watch([program("a"), program("b")], clock)
    for _ in range(2):
        found.round([0, 1])

    assert found.round([1]).keys() == {1}
    assert len(clock.seen) == 2


@pytest.mark.parametrize(
    ("seconds", "rounds"), [(20e-6, 8), (1e-3, 5), (4e-3, 1), (20e-3, 1)], ids=["short", "middle", "long", "very long"]
)
def test_long_kernels_run_one_round_a_trace(seconds, rounds):
    """Where the kernels take longer than the trace, every round is looked at before the next."""
    clock = Traces({"a": seconds, "b": seconds})
    found = watch([program("a"), program("b")], clock)
    for _ in range(2):
        found.round([0, 1])

    assert len(clock.seen[1]) == rounds


def test_many_candidates_run_one_round_a_trace():
    """While most are still to be dropped, rounds ahead would be wasted on them."""
    names = [f"p{number}" for number in range(40)]
    clock = Traces(dict.fromkeys(names, 1e-6))
    found = watch([program(name) for name in names], clock)
    for _ in range(2):
        found.round(list(range(40)))

    assert [len(trace) for trace in clock.seen] == [1, 1]


def test_the_orders_of_rounds_in_one_trace_follow_the_seed():
    """The same seed gives the same orders."""

    def orders(seed):
        clock = Traces(dict.fromkeys("abc", 20e-6))
        found = watch([program(name) for name in "abc"], clock, seed=seed)
        for _ in range(2):
            found.round([0, 1, 2])
        return clock.seen

    assert orders(3) == orders(3)
    assert orders(3) != orders(4)


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_everybody_is_warmed_up_before_the_first_sample(kind, warmup):
    """So many runs of each come before any sample, once; one at least, which says how many calls make a sample."""
    log = []

    def noting(name):
        return lambda x: log.append(name) or x

    clock = Rounds({"a": 1.0, "b": 1.0}) if kind == "device" else WallClock()
    found = watch([program("a", call=noting("a")), program("b", call=noting("b"))], clock, warmup=warmup)
    runs = max(warmup, 1)
    found.round([0, 1])
    first, log[:] = list(log), []
    found._calls = dict.fromkeys(found._calls, 1)
    found.round([0, 1])

    assert first[: 2 * runs] == ["a"] * runs + ["b"] * runs
    assert log == ["a", "b"]


def test_who_fails_while_warming_up_is_told_and_not_timed():
    """The others of the round are timed."""

    def broken(x):
        raise OSError("no such device")

    clock = Rounds({"a": 1.0})
    found = watch([program("a"), program("b", call=broken)], clock).round([1, 0])

    assert found[0] == 1.0
    assert str(found[1]) == "no such device"
    assert [[run.number for run in runs] for runs in clock.seen] == [[0]]


def test_who_fails_while_timed_ends_alone():
    """A round by a clock for one program at a time goes on after an error."""

    class Second:
        name = "second"

        def time(self, call, leaves, calls):
            return call(*leaves)

    def broken(x):
        raise OSError("worn out")

    runs = [Run(0, "a", lambda x: 1.0, (X,)), Run(1, "b", broken, (X,)), Run(2, "c", lambda x: 3.0, (X,))]
    found = in_turns(Second(), runs)

    assert (found[0], str(found[1]), found[2]) == (1.0, "worn out", 3.0)


# When the time is up.


class Ticking:
    """A clock of the host's time that moves on by one with each look, for modules that ask `time.perf_counter`."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


def test_a_deadline_that_has_passed_leaves_one_to_time():
    """The first candidate, which wins ties, has its turn however late; the others have none."""
    clock = Calls(1.0)
    found = watch([program(name, "cpu") for name in "abc"], clock, deadline=-math.inf).round([2, 1, 0])

    assert found == {0: 1.0}


def test_a_deadline_that_passes_within_a_round_ends_it(monkeypatch):
    """A candidate that has not been timed by then is left out."""
    ticking = Ticking()
    monkeypatch.setattr("ejkernel.ops.timing.sampler.time", ticking)
    found = watch([program(name, "cpu") for name in "abcd"], Calls(1.0), deadline=5.5).round([3, 2, 1, 0])

    assert 0 in found
    assert 1 <= len(found) < 4


def test_if_the_first_fails_late_another_is_timed():
    """One time there must be."""

    def broken(x):
        raise OSError("no such device")

    found = watch(
        [program("a", "cpu", broken), program("b", "cpu"), program("c", "cpu")], WallClock(), deadline=-math.inf
    ).round([0, 1, 2])

    assert isinstance(found[0], OSError)
    assert found[1] >= 0
    assert 2 not in found


def test_without_a_deadline_turns_stay_as_they_are_given():
    """The order of a round is the race's alone."""
    clock = Rounds({"a": 1.0, "b": 1.0, "c": 1.0})
    watch([program(name) for name in "abc"], clock).round([2, 0, 1])

    assert [run.number for run in clock.seen[0]] == [2, 0, 1]


def test_slow_candidates_have_their_least_rounds(monkeypatch):
    """What a race costs ends it only beyond the least number of rounds."""
    monkeypatch.setattr("ejkernel.ops.timing.sampler._ENOUGH_SECONDS", -math.inf)
    outcome = watch([program("a", "cpu"), program("b", "cpu")], Calls(1.0)).race(least_rounds=4)

    assert (outcome.rounds, outcome.finished) == (4, True)
