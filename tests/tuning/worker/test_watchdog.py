"""Which candidate is to blame for a worker's end, and how long each may take: fakes that die on cue, no process."""

from __future__ import annotations

import math
import signal
from types import SimpleNamespace

import pytest
from fakes_session import ALL, Scripted, back, done, session, starts, statuses

from ejkernel.ops import Isolation
from ejkernel.ops.core.errors import IsolationError
from ejkernel.ops.tuning.job import program_end
from ejkernel.ops.tuning.worker import watchdog


def test_the_one_at_work_is_out_and_the_others_are_sent_again():
    """The replacement gets all others."""
    second = Scripted([done(0, 2)])
    made, watch = session(Scripted([starts(1)], -signal.SIGSEGV), second)

    assert made.run(ALL).winner == 0
    assert statuses(made) == ["ok", "crash", "ok"]
    assert second.programs == second.order["runners"] == [0, 2]
    made.close()
    assert second.left
    assert ("lost", "b", "crash") in watch.told


def test_one_that_came_back_is_not_to_blame():
    """The end of a check, or the beginning of the next, clears the one before."""
    made, _ = session(
        Scripted([starts(0), back(0), starts(1), starts(2)], -signal.SIGSEGV),
        Scripted([done(0, 1)]),
    )
    made.run(ALL)

    assert statuses(made) == ["ok", "ok", "crash"]


def test_where_several_were_at_work_they_are_tried_one_by_one():
    """None is blamed for compiling beside the one that did it."""
    again = Scripted([starts(0, "compile"), back(0, "compile"), starts(1, "compile")], -signal.SIGABRT)
    made, _ = session(
        Scripted([starts(0, "compile"), starts(1, "compile")], -signal.SIGABRT), again, Scripted([done(0, 2)])
    )
    made.run(ALL)

    assert again.tuning["one_by_one"]
    assert again.programs == [0, 1, 2]
    assert statuses(made) == ["ok", "crash", "ok"]


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_one_kill_from_outside_is_forgiven(kill):
    """By a person, a scheduler, or the system for want of memory: the candidate gets a second chance, and no third."""
    once, _ = session(Scripted([starts(1)], -kill), Scripted([done(0, 1, 2)]))
    once.run(ALL)
    twice, _ = session(Scripted([starts(1)], -kill), Scripted([starts(1)], -kill), Scripted([done(0, 2)]))
    twice.run(ALL)

    assert (statuses(once), statuses(twice)) == (["ok"] * 3, ["ok", "crash", "ok"])


def test_a_worker_that_dies_of_nothing_is_given_up():
    """Three times without any candidate at work: the reason is not among them."""
    made, _ = session(*(Scripted([], 1) for _ in range(3)))

    with pytest.raises(IsolationError, match="while no candidate is at work"):
        made.run(ALL)


@pytest.mark.usefixtures("clock")
def test_a_hang_ends_with_the_limit_of_a_turn():
    """The one that did not come back is out for good."""
    made, watch = session(Scripted([starts(0)], None), Scripted([done(1, 2)]), run_seconds=0.01)
    made.run(ALL)

    assert statuses(made) == ["timeout", "ok", "ok"]
    assert ("lost", "a", "timeout") in watch.told


@pytest.mark.parametrize(("took", "kind"), [(0.001, "timeout"), (60.0, "deadline")])
def test_under_a_deadline_a_turn_is_measured_by_those_of_others(monkeypatch, clock, took, kind):
    """One that takes a hundred times as long hangs; where all are slow none does, and the deadline ends them."""
    monkeypatch.setattr(watchdog, "_HOPELESS_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "_LEAST_GRACE_SECONDS", 0.1)
    first = Scripted([starts(0), back(0, at=took), starts(1)], None)
    made, watch = session(first, Scripted([done(0, 2)]), run_seconds=3600)
    found = made.run(ALL, deadline=clock.now + (0.5 if kind == "deadline" else 3600))

    assert statuses(made) == ["ok", "timeout", "ok"]
    assert (("lost", "b", "timeout") in watch.told, found is None) == ((True, False) if took < 1 else (False, True))


@pytest.mark.parametrize("worker", [Scripted([], None, starts=True), Scripted([starts(0, "compile")], None)])
def test_with_a_cfg_to_fall_back_on_a_deadline_ends_a_worker_that_has_nothing_yet(clock, worker):
    """One that is still starting, or compiling its first candidate, on a busy machine."""
    made, _ = session(worker, falls_back=True, run_seconds=3600)
    assert made.run(ALL, deadline=clock.now + 10) is None
    assert clock.now < 1011
    assert worker.ended == -signal.SIGKILL


def test_in_a_program_a_call_may_exceed_its_part_until_something_is_measured(clock):
    """What was begun is worth more than what is left for the next call; the program's own end is an end."""
    late = Scripted([starts(0)], None)
    late.rest = lambda: (setattr(clock, "now", clock.now + 5), late.says.append(done(0, 1, 2)))
    never = Scripted([starts(0)], None)
    token = program_end.set(clock.now + 20)
    try:
        first, _ = session(late, falls_back=True, run_seconds=3600)
        assert first.run(ALL, deadline=clock.now + 1) is not None
        second, _ = session(never, falls_back=True, run_seconds=3600)
        assert second.run(ALL, deadline=clock.now + 1) is None
    finally:
        program_end.reset(token)
    assert clock.now == pytest.approx(1020.8, abs=0.1)


def test_without_one_the_first_right_candidate_is_waited_for(clock):
    """One there must be, however late."""
    late = Scripted([starts(0)], None)
    late.rest = lambda: (setattr(clock, "now", clock.now + 10), late.says.append(done(0, 1, 2)))
    made, _ = session(late, run_seconds=3600)
    assert made.run(ALL, deadline=clock.now + 1) is not None


@pytest.mark.parametrize(("seconds", "grace"), [(1.0, 0.8), (30.0, 1.5), (600.0, 2.0), (math.inf, 2.0)])
def test_the_grace_of_a_worker_is_a_small_part_of_its_time(clock, seconds, grace):
    """A budget is kept to within a second, or to within a twentieth."""
    watched = watchdog.Watchdog(Isolation())
    watched.begin(clock.now + seconds)
    assert watched._grace == pytest.approx(grace)


def test_the_first_turn_in_a_new_worker_is_not_measured_by_those_of_the_last_one(monkeypatch, clock):
    """It also loads what all need; once one was checked there, the others are held to that."""
    monkeypatch.setattr(watchdog, "_HOPELESS_SECONDS", 0.01)
    watched = watchdog.Watchdog(Isolation(run_seconds=3600))
    watched.begin(clock.now + 3600)
    limits = []
    for _ in range(2):
        watched.new_worker()
        limits.append(watched._limit("check"))
        watched.starts(0, "check", 0.0)
        watched.ends(0, 0.001)
        limits.append(watched._limit("check"))

    assert limits == [3600, 0.1, 3600, 0.1]


@pytest.mark.parametrize(("doing", "limit"), [("race", 10.0), ("trace", 50.0), ("lower", 50.0), ("compile", 50.0)])
def test_the_end_of_a_trace_may_take_longer_than_a_run(monkeypatch, doing, limit):
    """But not for ever, and the one that ran last has to answer for it."""
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    watched = watchdog.Watchdog(Isolation(run_seconds=10, memory_bytes=1))
    watched.begin(math.inf)
    watched.starts(0, "race", 0.0)
    watched.starts(0, doing, 0.0)
    while (ended := watched.poll(0, usable=True)) is None and now[0] < 1000:
        now[0] += 0.5

    assert (ended.number, ended.status, now[0]) == (0, "timeout", limit + 0.5)


@pytest.mark.usefixtures("clock")
def test_one_that_still_compiles_is_not_waited_for_once_others_run():
    """Its time may be up; the others' race is not ended for that."""
    slow = Scripted([starts(0, "compile"), starts(1)], None)
    made, _ = session(slow, Scripted([done(0, 2)]), run_seconds=0.01)
    made.run(ALL)

    assert statuses(made) == ["ok", "timeout", "ok"]


def test_too_much_memory_ends_the_one_at_work():
    """It counts as out of memory, and is not tried again."""
    made, watch = session(Scripted([starts(2)], None, memory=2000), Scripted([done(0, 1)]))
    made.run(ALL)

    assert statuses(made) == ["ok", "ok", "memory"]
    assert ("lost", "c", "memory") in watch.told


def test_a_deadline_ends_a_worker_that_does_not(clock):
    """The one at work had no time; that is no crash."""
    say = [starts(0), back(0), starts(1)]
    made, watch = session(Scripted(say, None))

    assert made.run(ALL, deadline=clock.now - 10) is None
    assert statuses(made) == ["ok", "timeout", "ok"]
    assert made.candidates.having("checked") == [0]
    assert not [line for line in watch.told if line[0] == "lost"]


@pytest.mark.parametrize(
    "about", [{"status": -signal.SIGSEGV}, {"status": None, "memory": 2000}], ids=["crash", "memory"]
)
def test_a_death_beside_programs_of_later_tunings_costs_a_candidate_its_place_the_second_time(about):
    """One of those may have done it: all run once more, in a fresh worker."""
    first, second = Scripted([starts(1)], ahead=True, **about), Scripted([starts(1)], ahead=True, **about)
    made, watch = session(first, second, Scripted([done(0, 2)]))
    made.run(ALL)
    assert second.programs == [0, 1, 2]
    assert [(what, cfg) for what, cfg, _ in watch.told] == [("lost", "b")]
