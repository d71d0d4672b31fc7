"""Who is blamed when a worker dies: fakes that die on cue, without any process."""

from __future__ import annotations

import math
import signal
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from ejkernel.ops import Isolation, Record, Trial
from ejkernel.ops.core.errors import IsolationError
from ejkernel.ops.timing.program import CompiledProgram
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.worker import watchdog
from ejkernel.ops.tuning.worker.batch import WorkerBatch
from ejkernel.ops.tuning.worker.export import PortableProgram
from ejkernel.ops.tuning.worker.process import WorkerGone
from ejkernel.ops.tuning.worker.protocol import Message


class Watching:
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def starts(self, cfg, doing):
        self.told.append(("starts", cfg, doing))

    def ends(self, cfg, program=""):
        self.told.append(("ends", cfg))

    def failed(self, trial, program):
        self.told.append(("failed", trial.cfg, trial.status))

    def lost(self, trial, program):
        self.told.append(("lost", trial.cfg, trial.status))

    def timed(self, found, clock):
        self.told.append(("timed", list(found), clock))


class Candidates:
    """The part of a field that a heat needs: exported programs that nobody runs."""

    def __init__(self, names, watch):
        self.job = TuningJob(lambda cfg: cfg, (), {}, names, witness=watch)
        self.seed = 0
        self.objective = "forward"
        self.trials = [Trial(name) for name in names]
        self.texts = {}
        portable = [PortableProgram(name.encode(), (), 1, None) for name in names]
        self.programs = {n: CompiledProgram(None, "forward", portable=one) for n, one in enumerate(portable)}

    def sets(self):
        class Given:
            leaves = (jnp.ones(2),)
            expected = ()

        return [Given()]


class Scripted:
    """A worker that says what is written down for it, and then ends with this status; None: it hangs."""

    def __init__(self, says, status=0, memory=0):
        self.says = list(says)
        self.ended = status
        self.held = memory
        self.order = {}

    def send(self, verb, parts=(), **head):
        self.order = head

    def hear(self):
        if not self.says:
            if self.ended is None:
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


def says(verb, number=None, at=0.0, **head):
    return Message({"verb": verb, "number": number, "at": at, **head})


def starts(number, doing="check"):
    return says("starts", number, doing=doing)


def done(*numbers, winner=0):
    record = Record(trials=tuple(Trial(n) for n in numbers), winner=winner)
    return Message({"verb": "done"}, [record.dumps().encode()])


class Race(WorkerBatch):
    """A heat of all."""

    def run(self, deadline=math.inf, **settings):
        numbers = list(range(len(self.field.trials)))
        return super().run(settings.pop("numbers", numbers), deadline=deadline, **settings)


def heat(*workers, names=("a", "b", "c"), **limits):
    """A heat whose workers are these, one after the other; with what was told."""
    watch = Watching()
    queue = list(workers)
    limits = {"memory_bytes": 1000, **limits}
    field = Candidates(list(names), watch)
    return Race(field, lambda: queue.pop(0), Isolation(**limits), warmup=1, iters=1), watch


def statuses(made):
    return [trial.status for trial in made.field.trials]


def test_who_was_at_work_is_out_and_the_others_are_sent_again():
    """The replacement gets everybody else."""
    second = Scripted([done(0, 2)])
    made, watch = heat(Scripted([starts(1)], -signal.SIGSEGV), second)

    assert made.run().winner == 0
    assert statuses(made) == ["ok", "crash", "ok"]
    assert second.order["numbers"] == second.order["runners"] == [0, 2]
    made.close()
    assert second.left
    assert ("lost", "b", "crash") in watch.told


def test_who_came_back_is_not_to_blame():
    """The end of a check, or the beginning of the next, clears the one before."""
    made, _ = heat(
        Scripted([starts(0), says("ends", 0), starts(1), starts(2)], -signal.SIGSEGV),
        Scripted([done(0, 1)]),
    )
    made.run()

    assert statuses(made) == ["ok", "ok", "crash"]


def test_where_several_were_at_work_they_are_tried_one_by_one():
    """Nobody is blamed for compiling beside the one that did it."""
    again = Scripted([starts(0, "compile"), says("ends", 0), starts(1, "compile")], -signal.SIGABRT)
    made, _ = heat(
        Scripted([starts(0, "compile"), starts(1, "compile")], -signal.SIGABRT), again, Scripted([done(0, 2)])
    )
    made.run()

    assert again.order["one_by_one"]
    assert again.order["numbers"] == [0, 1, 2]
    assert statuses(made) == ["ok", "crash", "ok"]


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_one_kill_from_outside_is_forgiven(kill):
    """Somebody, a scheduler, or the system for want of memory: the candidate gets a second chance, and no third."""
    once, _ = heat(Scripted([starts(1)], -kill), Scripted([done(0, 1, 2)]))
    once.run()
    twice, _ = heat(Scripted([starts(1)], -kill), Scripted([starts(1)], -kill), Scripted([done(0, 2)]))
    twice.run()

    assert (statuses(once), statuses(twice)) == (["ok"] * 3, ["ok", "crash", "ok"])


def test_a_worker_that_dies_of_nothing_is_given_up():
    """Three times without any candidate at work: the reason is not among them."""
    made, _ = heat(*(Scripted([], 1) for _ in range(3)))

    with pytest.raises(IsolationError, match="while no candidate is at work"):
        made.run()


def test_a_hang_ends_with_the_limit_of_a_turn():
    """The one that did not come back is out for good."""
    made, watch = heat(Scripted([starts(0)], None), Scripted([done(1, 2)]), run_seconds=0.01)
    made.run()

    assert statuses(made) == ["timeout", "ok", "ok"]
    assert ("lost", "a", "timeout") in watch.told


@pytest.mark.parametrize(("took", "kind"), [(0.001, "timeout"), (60.0, "deadline")])
def test_under_a_deadline_a_turn_is_measured_by_those_of_others(monkeypatch, took, kind):
    """Who takes a hundred times as long hangs; where all are slow nobody does, and the deadline ends them."""
    monkeypatch.setattr(watchdog, "_HOPELESS_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 0.1)
    first = Scripted([starts(0), says("ends", 0, at=took), starts(1)], None)
    made, watch = heat(first, Scripted([done(0, 2)]), run_seconds=3600)
    found = made.run(deadline=time.perf_counter() + (0.5 if kind == "deadline" else 3600))

    assert statuses(made) == ["ok", "timeout", "ok"]
    assert (("lost", "b", "timeout") in watch.told, found is None) == ((True, False) if took < 1 else (False, True))


def test_the_first_turn_in_a_new_worker_is_not_measured_by_those_of_the_last_one(monkeypatch):
    """It also loads what all need; once somebody was checked there, the others are held to that."""
    monkeypatch.setattr(watchdog, "_HOPELESS_SECONDS", 0.01)
    watched = watchdog.Watchdog(Isolation(run_seconds=3600))
    watched.begin(time.perf_counter() + 3600)
    limits = []
    for _ in range(2):
        watched.new_worker()
        limits.append(watched._limit("check"))
        watched.starts(0, "check", 0.0)
        watched.ends(0, 0.001)
        limits.append(watched._limit("check"))

    assert limits == [3600, 0.1, 3600, 0.1]


@pytest.mark.parametrize(("doing", "limit"), [("run", 10.0), ("trace", 50.0), ("compile", 50.0)])
def test_the_end_of_a_trace_may_take_longer_than_a_run(monkeypatch, doing, limit):
    """But not for ever, and who ran last has to answer for it."""
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    watched = watchdog.Watchdog(Isolation(run_seconds=10, memory_bytes=1))
    watched.begin(math.inf)
    watched.starts(0, "run", 0.0)
    watched.starts(0, doing, 0.0)
    while (ended := watched.look(0, usable=True)) is None and now[0] < 1000:
        now[0] += 0.5

    assert (ended.number, ended.status, now[0]) == (0, "timeout", limit + 0.5)


def test_a_time_in_which_everything_stood_still_is_nobodys(monkeypatch):
    """Ctrl-Z stops a worker with its parent: an hour later nobody has hung, and who hangs then is found out."""
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    watched = watchdog.Watchdog(Isolation(run_seconds=10, memory_bytes=1))
    watched.begin(math.inf)
    watched.starts(0, "check", 0.0)
    seen = []
    for later in (0.05, 3600.0, *(3600 + step / 2 for step in range(1, 21))):
        now[0] = later
        seen.append(watched.look(0, usable=True))

    assert seen[:-1] == [None] * (len(seen) - 1)
    assert seen[-1].status == "timeout"


def test_nobody_waits_for_one_that_still_compiles_once_others_run():
    """Its time may be up; the others' race is not ended for that."""
    slow = Scripted([starts(0, "compile"), starts(1)], None)
    made, _ = heat(slow, Scripted([done(0, 2)]), run_seconds=0.01)
    made.run()

    assert statuses(made) == ["ok", "timeout", "ok"]


def test_too_much_memory_ends_the_one_at_work():
    """It counts as out of memory, and is not tried again."""
    made, watch = heat(Scripted([starts(2)], None, memory=2000), Scripted([done(0, 1)]))
    made.run()

    assert statuses(made) == ["ok", "ok", "memory"]
    assert ("lost", "c", "memory") in watch.told


def test_a_deadline_ends_a_worker_that_does_not():
    """Who was at work had no time; that is no crash."""
    say = [starts(0), says("ends", 0), starts(1)]
    made, watch = heat(Scripted(say, None))

    assert made.run(deadline=time.perf_counter() - 10) is None
    assert statuses(made) == ["ok", "timeout", "ok"]
    assert made.right == {0}
    assert not [line for line in watch.told if line[0] == "lost"]


def test_rounds_go_to_the_next_worker_without_the_dead():
    """The race goes on from what was timed."""
    second = Scripted([done(0, 2)])
    rounds = [says("timed", found=[[0, 2.0], [1, 1.0], [2, 3.0]], clock="wall"), starts(1, "run")]
    made, watch = heat(Scripted(rounds, -signal.SIGSEGV), second)
    made.run()

    assert second.order["rounds"] == [[(0, 2.0), (2, 3.0)]]
    assert second.order["clock"] == "wall"
    assert ("timed", [("a", 2.0), ("b", 1.0), ("c", 3.0)], "wall") in watch.told


def test_a_failure_is_told_and_not_sent_again():
    """What a worker found out before it died stays known."""
    second = Scripted([done(2)])
    failed = says("failed", 0, status="wrong", message="off", error=0.5, compile_s=1.0)
    made, watch = heat(Scripted([failed, starts(1)], -signal.SIGSEGV), second)
    made.run()

    assert statuses(made) == ["wrong", "crash", "ok"]
    assert second.order["numbers"] == [2]
    assert ("failed", "a", "wrong") in watch.told


def test_one_worker_serves_run_after_run():
    """It has what it was sent, and who was at work when a run ended is not waited for in the next one."""
    one = Scripted([starts(0), says("ends", 0), starts(1, "run"), done(0, 1), done(1, 2)])
    made, _ = heat(one)
    made.run(numbers=[0, 1])
    assert one.order["numbers"] == [0, 1]
    assert not made._vigil.at_work
    made.run(numbers=[1, 2])

    assert (one.order["numbers"], one.order["runners"]) == ([2], [1, 2])
    assert statuses(made) == ["ok"] * 3


def test_the_next_worker_knows_what_is_right():
    """The first that was right is checked before the others, and runs only where it is wanted."""
    second = Scripted([done(1, 2)])
    first = Scripted([starts(0), says("ends", 0), done(0), starts(1)], -signal.SIGKILL)
    made, _ = heat(first, second)
    made.run(numbers=[0])
    made.run(numbers=[2, 1])

    assert (second.order["numbers"], second.order["runners"]) == ([0, 1, 2], [2, 1])


def test_no_worker_is_started_when_the_time_is_up():
    """What was timed until then has to do."""
    made, _ = heat(Scripted([starts(0), says("ends", 0), starts(1)], -signal.SIGSEGV))

    assert made.run(deadline=time.perf_counter() + 1e-9) is None
    assert statuses(made) == ["ok", "crash", "ok"]


def test_when_all_are_dead_nobody_is_left():
    """Then there is nothing to send."""
    made, _ = heat(*(Scripted([starts(n)], -signal.SIGSEGV) for n in range(3)))

    assert made.run() is None
    assert statuses(made) == ["crash"] * 3
