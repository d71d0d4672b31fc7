"""Which candidate is blamed when a worker dies: fakes that die on cue, without any process.

Covers `tuning/worker/export.py` and `tuning/worker/watchdog.py`.
"""

from __future__ import annotations

import math
import signal
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from ejkernel.ops import Isolation, Record, Trial
from ejkernel.ops.core.errors import IsolationError
from ejkernel.ops.core.record import Finding
from ejkernel.ops.timing.program import CompiledProgram
from ejkernel.ops.tuning.candidates import CandidateSet
from ejkernel.ops.tuning.check import CheckCase
from ejkernel.ops.tuning.job import TuningJob, program_end
from ejkernel.ops.tuning.worker import session as session_module
from ejkernel.ops.tuning.worker import watchdog
from ejkernel.ops.tuning.worker.export import PortableProgram
from ejkernel.ops.tuning.worker.process import WorkerGone
from ejkernel.ops.tuning.worker.protocol import Message
from ejkernel.ops.tuning.worker.session import WorkerSession


class Watching:
    """Keeps what it is told of outcomes."""

    def __init__(self):
        self.told = []

    def failed(self, trial, program):
        self.told.append(("failed", trial.cfg, trial.status))

    def lost(self, trial, program):
        self.told.append(("lost", trial.cfg, trial.status))

    def dropped(self, cfg, program, **about):
        self.told.append(("dropped", cfg, about["ratio"]))


ALL = [0, 1, 2]


class Scripted:
    """A worker that says what is written down for it, and then ends with this status; None: it hangs."""

    def __init__(self, says, status=0, memory=0, *, ahead=False, starts=False):
        self.says = list(says)
        # Does it never get ready?
        self.starts = starts
        self.compiles_ahead = ahead
        self.ended = status
        self.held = memory
        self.order = {}
        self.programs = []
        self.tuning = {}

    def send(self, verb, parts=(), **head):
        if verb == "program":
            self.programs.append(head["number"])
        elif verb == "tuning":
            self.tuning = head
        else:
            self.order = head

    def ready(self, is_too_late):
        """At once, or never."""
        while self.starts and not is_too_late():
            self.rest()
        return not self.starts

    # Done by each look that hears nothing.
    rest = staticmethod(lambda: None)

    def hear(self):
        if not self.says:
            if self.ended is None:
                self.rest()
                return None
            raise WorkerGone
        return self.says.pop(0)

    def memory(self):
        return self.held

    def kill(self):
        self.ended = -signal.SIGKILL

    def status(self):
        return self.ended

    def last_words(self):
        return f"status {self.ended}"

    def end(self):
        self.left = False

    def leave(self):
        self.left = True


@pytest.fixture
def clock(monkeypatch):
    """A clock that only waiting for a worker in vain moves: how busy the machine is does not count."""
    hands = SimpleNamespace(now=1000.0)
    hands.perf_counter = lambda: hands.now

    def rest():
        hands.now += 0.005

    monkeypatch.setattr(Scripted, "rest", staticmethod(rest))
    for module in (watchdog, session_module):
        monkeypatch.setattr(module, "time", hands)
    return hands


def says(verb, number=None, at=0.0, **head):
    return Message({"verb": verb, "number": number, "at": at, **head})


def starts(number, doing="check"):
    return says("trying", number, doing=doing)


def back(number, doing="check", at=0.0):
    return says("back", number, at, doing=doing)


def done(*numbers, winner=0):
    record = Record(trials=tuple(Trial(n) for n in numbers), winner=winner)
    return Message({"verb": "done"}, [record.dumps().encode()])


def session(*workers, names=("a", "b", "c"), falls_back=False, **limits):
    """A session whose workers are these, one after the other, with all candidates exported; and what was told."""
    watch = Watching()
    queue = list(workers)
    candidates = CandidateSet(watch)
    for number in candidates.enter(list(names)):
        portable = PortableProgram(names[number].encode(), (), 1, None)
        candidates.advance(number, "traced", name=names[number])
        candidates.advance(number, "compiled", program=CompiledProgram(None, "forward", portable=portable))
    cases = [CheckCase((jnp.ones(2),))]
    job = TuningJob(lambda cfg: cfg, (), {}, names, heuristic_first=falls_back)
    made = WorkerSession(
        *(job, candidates, lambda: cases, lambda: queue.pop(0), Isolation(**{"memory_bytes": 1000, **limits})),
        warmup=1,
        iters=1,
        seed=0,
        observer=watch,
    )
    return made, watch


def statuses(made):
    return [trial.status for trial in made.candidates.trials()]


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


def test_after_a_death_within_a_race_the_others_race_afresh(clock):
    """Times of two processes do not compare: what was timed in the dead one is forgotten."""
    rounds = [back(0), says("timed", found=[[0, 2.0], [1, 1.0], [2, 3.0]], clock="wall"), starts(1, "race")]
    made, _ = session(Scripted([starts(0), *rounds], -signal.SIGSEGV), Scripted([], None))

    assert made.run(ALL, deadline=clock.now + 0.1) is None
    assert (made.rows, made.clock) == ([], "wall")


def test_what_is_dropped_is_told_and_rounds_are_kept_until_the_race_is_over():
    """Should the time be up, they decide."""
    told = []
    drop = says("dropped", 1, seconds=3.0, ratio=1.5, clock="wall")
    row = says("timed", found=[[0, 2.0], [1, 3.0]], clock="wall")
    made, watch = session(Scripted([row, drop, done(0, 1)]))
    made.run([0, 1], told=told.append)

    assert ("dropped", "b", 1.5) in watch.told
    assert made.rows == told == [{0: 2.0, 1: 3.0}]


def test_a_failure_is_told_and_not_sent_again():
    """What a worker found out before it died stays known."""
    second = Scripted([done(2)])
    found = {"test": "element", "ratio": 3.0, "output": "output", "widened": 0.0}
    failed = says("failed", 0, status="wrong", message="off", error=0.5, compile_s=1.0, check=found)
    made, watch = session(Scripted([failed, starts(1)], -signal.SIGSEGV), second)
    made.run(ALL)

    assert statuses(made) == ["wrong", "crash", "ok"]
    assert second.programs == [2]
    assert ("failed", "a", "wrong") in watch.told
    assert made.candidates.trial(0).check == Finding(**found)


def test_one_worker_serves_run_after_run():
    """It has what it was sent, and one that was at work when a run ended is not waited for in the next one."""
    one = Scripted([starts(0), back(0), starts(1, "race"), done(0, 1), done(1, 2)])
    made, _ = session(one)
    made.run([0, 1])
    assert one.programs == [0, 1]
    assert not made.watchdog.at_work
    made.run([1, 2])

    assert (one.programs, one.order["runners"]) == ([0, 1, 2], [1, 2])
    assert statuses(made) == ["ok"] * 3


def test_a_worker_that_still_compiles_does_not_serve_the_next_tuning():
    """It would tell of numbers that are others' by then, and may hold the compiler's lock."""
    worker = Scripted([starts(2, "compile"), starts(0), back(0), done(0, 1)])
    made, _ = session(worker)
    made.run(ALL)
    made.close()
    assert not worker.left


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


def test_the_next_worker_knows_what_is_right():
    """The first that was right is checked before the others, and runs only where it is wanted."""
    second = Scripted([done(1, 2)])
    first = Scripted([starts(0), back(0), done(0), starts(1)], -signal.SIGKILL)
    made, _ = session(first, second)
    made.run([0])
    made.run([2, 1])

    assert (second.programs, second.order["runners"]) == ([0, 1, 2], [2, 1])


def test_the_first_program_with_gradients_sends_the_tuning_once_more():
    """Behind its cotangents, and marked as the same one."""
    worker = Scripted([done(0, 1, 2)])
    made, _ = session(worker)
    made.add(0)
    assert not worker.tuning["again"]
    program = made.candidates.program(1)
    object.__setattr__(program, "portable", PortableProgram(b"b", (jnp.ones(2),), 1, None, "forward+backward"))
    made.add(1)
    assert worker.tuning["again"]
    assert worker.programs == [0, 0, 1]


def test_programs_are_sent_before_the_run():
    """As soon as each is exported, so that the worker compiles while others are exported; none is sent twice."""
    one = Scripted([done(0, 1, 2)])
    made, _ = session(one)
    made.add(1)
    assert (one.programs, one.order) == ([1], {})
    made.run(ALL)

    assert one.programs == [1, 0, 2]


def test_no_worker_is_started_when_the_time_is_up(clock):
    """What was timed until then has to do."""
    made, _ = session(Scripted([starts(0), back(0), starts(1)], -signal.SIGSEGV))

    assert made.run(ALL, deadline=clock.now) is None
    assert statuses(made) == ["ok", "crash", "ok"]


def test_when_all_are_dead_none_is_left():
    """Then there is nothing to send."""
    made, _ = session(*(Scripted([starts(n)], -signal.SIGSEGV) for n in range(3)))

    assert made.run(ALL) is None
    assert statuses(made) == ["crash"] * 3


def test_a_worker_that_still_compiles_is_given_a_moment_and_kept(clock):
    """Another one takes longer to start, and has none of the programs that this one has compiled ahead."""
    worker = Scripted([starts(1, "compile"), done(0, 2), back(1, "compile")], None)
    made, _ = session(worker)
    made.run(ALL)
    made.close()
    assert worker.left


@pytest.mark.parametrize("end", [math.inf, 0.5])
def test_a_worker_that_compiles_on_is_ended_after_that_moment(clock, end):
    """It may hold the compiler's lock, and would speak of candidates of this tuning; nor is a budget overrun for it."""
    worker = Scripted([starts(1, "compile"), done(0, 2)], None)
    made, _ = session(worker)
    made.run(ALL, deadline=clock.now + end)
    before = clock.now
    made.close()
    assert not worker.left
    assert clock.now - before == pytest.approx(min(2.0, end), abs=0.01)


def test_a_worker_that_dies_while_it_is_given_a_moment_is_ended(clock):
    """Nothing waits for it, and no candidate is to blame any more."""
    worker = Scripted([starts(1, "compile"), done(0, 2)], -signal.SIGSEGV)
    made, _ = session(worker)
    made.run(ALL)
    made.close()
    assert not worker.left
    assert statuses(made) == ["ok", "ok", "ok"]


def test_ctrl_c_while_a_worker_is_given_a_moment_ends_it(clock):
    """Else it would live, with the memory that it holds, as long as this process."""
    worker = Scripted([starts(1, "compile"), done(0, 2)], None)
    made, _ = session(worker)
    made.run(ALL)

    def hear():
        raise KeyboardInterrupt

    worker.hear = hear
    with pytest.raises(KeyboardInterrupt):
        made.close()
    assert not worker.left
