"""Searches whose candidates run in a worker process: real faults, kills, and the path that they take."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections import deque
from dataclasses import dataclass, replace

import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Isolation, Record, Trial, Tuner
from ejkernel.ops.core.errors import IsolationError
from ejkernel.ops.timing import sampler
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.search import driver
from ejkernel.ops.tuning.search.effort import EFFORTS
from ejkernel.ops.tuning.tuner import IsolationWarning
from ejkernel.ops.tuning.worker import runner
from ejkernel.ops.tuning.worker.ahead_compiler import AheadCompiler
from ejkernel.ops.tuning.worker.main import Worker
from ejkernel.ops.tuning.worker.process import WorkerGone, WorkerProcess
from ejkernel.ops.tuning.worker.protocol import Message
from ejkernel.ops.tuning.worker.session import WorkerSession
from ejkernel.ops.tuning.worker.watchdog import KillReason, Watchdog

X = jnp.arange(8.0)


@dataclass(frozen=True)
class Plan:
    """A cfg with two fields."""

    steps: int
    mode: str


CFGS = [Plan(steps, mode) for steps, mode in itertools.product((9, 1, *range(2, 9), *range(10, 17)), "abcd")]
# Where the space holds what is broken: one in each batch of a search that goes from the first to the last.
BROKEN = {CFGS[7]: "sleep", CFGS[20]: "exit", CFGS[40]: "segfault", CFGS[60]: "hog"}
BEST = Plan(1, "b")


def make_fn(cfg):
    """Twice the argument after some work, the least of it for the best one; every program is another one."""
    rank = 0 if cfg == BEST else cfg.steps * 4 + "abcd".index(cfg.mode)
    return lambda x: faults.slow(x, 20 + 500 * rank)


def make_broken(cfg):
    return faults.faulty(BROKEN[cfg]) if cfg in BROKEN else make_fn(cfg)


class FirstToLast:
    """A strategy that leaves none out."""

    def propose(self, space, known, count, rng):
        return [i for i in range(len(space)) if i not in known][:count]


@pytest.fixture
def small(monkeypatch):
    """Two batches of four and two more, and all the time that a busy machine needs."""
    monkeypatch.setattr(driver, "BATCH", 4)
    monkeypatch.setitem(EFFORTS, "quick", replace(EFFORTS["quick"], evaluations=10, seconds=300.0))


@pytest.fixture
def workers(monkeypatch):
    """The workers that a test starts."""
    started = []
    begin = WorkerProcess._begin
    monkeypatch.setattr(WorkerProcess, "_begin", lambda self: (started.append(self), begin(self))[1])
    return started


def outcome(record):
    return {trial.cfg: trial.status for trial in record.trials}


# Real processes.


@pytest.mark.one_leg
def test_one_that_takes_the_worker_down_is_a_failed_trial_and_the_search_goes_on(workers, monkeypatch):
    """One sleeps for ever, one calls `os._exit`, one segfaults, one takes too much memory: the best that works wins."""
    real, verdicts = Watchdog.blame, []
    monkeypatch.setattr(Watchdog, "blame", lambda *args, **how: (verdicts.append(real(*args, **how)), verdicts[-1])[1])
    limits = Isolation(memory_bytes=1 << 30, imports=["faults"])
    # Time enough for a busy machine, and a deadline all the same. A first run may wait for a processor, and is untimed.
    tuner = Tuner(1, 3, isolate=limits, strategy=FirstToLast(), effort="full")
    record = tuner.tune(TuningJob(make_broken, (X,), {}, CFGS, heuristic_first=True))

    assert (record.cfg, record.space, len(record.trials)) == (BEST, 64, 64)
    assert record.clock == "wall (in a worker process)"
    kinds = {"sleep": "timeout", "exit": "crash", "segfault": "crash", "hog": "memory"}
    assert outcome(record) == {cfg: kinds[BROKEN[cfg]] if cfg in BROKEN else "ok" for cfg in CFGS}
    assert all(trial.samples_s for trial in record.trials if trial.status == "ok")
    said = {BROKEN[trial.cfg]: trial.message for trial in record.failures}
    # Not the minute that a turn may take: some searches have no more than that.
    told = re.search(r"within (\S+) s \(check\) where another one took (\S+) (\S+)", said["sleep"])
    took = float(told[2]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[told[3]]
    assert float(told[1]) == pytest.approx(max(5.0, 100 * took), rel=0.06)
    assert "exit status 3" in said["exit"]
    assert "SIGSEGV" in said["segfault"]
    assert "1,024 are allowed" in said["hog"]
    assert record.gain[0] > 1
    # One for each death, and the one that is left serves all other batches. Where others still compiled, which is a
    # matter of time, a death has no culprit yet.
    assert len(workers) == 1 + len(verdicts)
    assert sorted(verdict.number for verdict in verdicts if verdict) == [CFGS.index(cfg) for cfg in BROKEN]
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.usefixtures("small")
def test_a_worker_that_is_killed_in_the_middle_of_a_search_is_replaced(workers, monkeypatch):
    """Offline tuning searches in a worker by itself; a kill from outside costs no candidate its place."""
    real, heard = WorkerSession._note, []

    def noting(self, message):
        real(self, message)
        heard.append(message.verb)
        # In the second batch, which has two rounds, as all have.
        if heard.count("timed") == 3 and len(workers) == 1:
            os.kill(workers[0].pid, signal.SIGKILL)

    monkeypatch.setattr(WorkerSession, "_note", noting)
    record = Tuner(0, 1, effort="quick").tune(TuningJob(make_fn, (X,), {}, CFGS, heuristic_first=True, offline=True))

    assert len(workers) == 2
    assert record.clock == "wall (in a worker process)"
    assert set(outcome(record).values()) == {"ok"}
    assert len(record.trials) == 10
    # By what was measured on this machine, as busy as it is: no other was surely faster by far.
    assert record.winner is not None
    fastest = min(record.trials[record.winner].samples_s)
    assert fastest <= 2 * min(max(trial.samples_s) for trial in record.trials)


# The same worker without a process: what it does is known to the letter.


class AtHome:
    """A worker of this process; it can be told what to say last before it dies."""

    def __init__(self, last=lambda message: False, status=-signal.SIGKILL):
        self.inbox = deque()
        self.last = last
        self.ended = status
        self.runs = []
        self.dead = False
        self.worker = Worker(self, AheadCompiler())

    def send(self, verb, parts=(), **head):
        """Both ways, as the wire does it."""
        head = json.loads(json.dumps({**head, "verb": verb}))
        if verb not in ("tuning", "program", "run"):
            self.inbox.append(Message(head, list(parts)))
            return
        self.runs.append(head)
        self.worker.obey(Message(head, list(parts)))

    def ready(self, is_too_late):
        """At once."""
        return True

    def hear(self):
        if self.dead:
            raise WorkerGone
        message = self.inbox.popleft()
        self.dead = self.last(message)
        return message

    def memory(self):
        return 0

    def status(self):
        return self.ended

    def last_words(self):
        return str(self.ended)

    def end(self):
        self.dead = True

    leave = end
    compiles_ahead = False


class TableClock:
    """Knows a candidate by what it gives: the third decimal is its place in the space."""

    name = "table"

    def time(self, call, leaves, calls):
        return seconds_of(CFGS[round(float(jax.tree_util.tree_leaves(call(*leaves))[0][0]) * 1e3)])


def seconds_of(cfg):
    return 1 + abs(cfg.steps - 3) + 0.5 * "cbda".index(cfg.mode)


def numbered(cfg):
    place = CFGS.index(cfg)
    return lambda x: x * 2 + place * 1e-3


def search_at_home(monkeypatch, *, abroad=True, worker=None, strategy=None, **job):
    """A search by a table, in a worker or in this process."""
    started = []

    def start():
        started.append(AtHome() if worker is None or started else worker)
        return started[-1]

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "_automatic", lambda programs, names: TableClock())
        patch.setattr(runner, "starter", lambda device, limits: start)
        tuner = Tuner(0, 1, effort="quick", isolate=abroad, strategy=strategy)
        # Counted from zero, so that the first output is the place alone; they are all right within this tolerance.
        own = {"heuristic_first": True, "tolerance": 100.0, "fresh_floats": False, **job}
        return tuner.tune(TuningJob(own.pop("make_fn", numbered), (X,), {}, CFGS, **own)), started


@pytest.mark.usefixtures("small")
def test_the_same_seed_and_the_same_times_take_the_same_path_wherever_they_run(monkeypatch):
    """In this process, in a worker, and in a worker that dies and is replaced."""
    rounds = []

    def third_round(message):
        rounds.extend([message] * (message.verb == "timed"))
        return len(rounds) == 3

    here, _ = search_at_home(monkeypatch, abroad=False)
    steps = []
    there, [worker] = search_at_home(monkeypatch, watch=steps.append)
    again, [first, second] = search_at_home(monkeypatch, worker=AtHome(third_round))
    paths = [[trial.cfg for trial in record.trials] for record in (here, there, again)]

    assert paths[0] == paths[1] == paths[2]
    assert {record.cfg for record in (here, there, again)} == {min(paths[0], key=seconds_of)}
    assert outcome(here) == outcome(there) == outcome(again)
    assert [trial.samples_s for trial in here.trials] == [trial.samples_s for trial in there.trials]
    # An onlooker sees as much.
    assert {step.stage for step in steps} == {"compiling", "checking", "timing"}
    assert steps[-1].gain == pytest.approx(there.gain[0])
    # Inputs are sent once, and each program is: none that runs along or is raced at the end is compiled again.
    assert [sent["verb"] for sent in worker.runs[:2]] == ["tuning", "program"]
    assert sorted(sent["number"] for sent in worker.runs if "number" in sent) == list(range(len(there.trials)))
    # What the first candidate gives is right in every worker: it is checked there, and need not run.
    assert first.dead
    assert second.runs[1]["number"] == 0
    assert 0 not in next(sent["runners"] for sent in second.runs if sent["verb"] == "run")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("says_so", [True, False], ids=["too late", "dead"])
def test_where_no_time_is_left_for_the_race_the_best_so_far_wins(monkeypatch, says_so):
    """By what its batch has shown; the worker that should have raced it had no time, or was ended with the time."""

    class Late(AtHome):
        def send(self, verb, parts=(), **head):
            if verb == "run" and head["looks"] is None:
                trials = tuple(Trial(number, "timeout", "still compiling") for number in head["runners"])
                parts = [Record(trials=trials, stop="failed").dumps().encode()]
                verb = "done" if says_so else "late"
            super().send(verb, parts, **head)

        def hear(self):
            message = super().hear()
            if message.verb == "late":
                raise WorkerGone(KillReason("deadline", "still at work when the time was up"))
            return message

    record, _ = search_at_home(monkeypatch, worker=Late())

    assert record.cfg == min((trial.cfg for trial in record.trials), key=seconds_of)
    assert (record.stop, set(outcome(record).values())) == ("deadline", {"ok"})


@pytest.mark.usefixtures("small")
def test_what_cannot_be_exported_from_the_start_is_searched_here(monkeypatch, workers):
    """As for few candidates: the record says why."""

    def callback(cfg):
        return lambda x: jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    record = Tuner(0, 1, effort="quick").tune(TuningJob(callback, (X,), {}, CFGS, offline=True))

    assert workers == []
    assert "not in a worker process: " in record.clock
    assert record.space == 64


@pytest.mark.usefixtures("small")
def test_what_cannot_be_exported_later_is_out_with_the_reason(monkeypatch):
    """A search in a worker does not begin anew for one candidate, wanted there or not."""
    odd = CFGS[7]

    def mixed(cfg):
        if cfg == odd:
            return lambda x: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return numbered(cfg)

    record, _ = search_at_home(monkeypatch, abroad=None, offline=True, make_fn=mixed, strategy=FirstToLast())

    assert [trial.cfg for trial in record.failures] == [odd]
    assert "callback" in record.failures[0].message
    assert record.clock == "table (in a worker process)"


@pytest.mark.usefixtures("small")
def test_where_the_worker_is_of_no_use_any_more_none_that_was_lost_runs_here(monkeypatch):
    """The rest is searched in this process, with a warning; the one that took a worker down is left out."""
    ran = []
    crashes = lambda said: said.head.get("doing") == "check" and said.head["number"] == 3  # noqa: E731 - one line
    started = iter([AtHome(crashes, -signal.SIGSEGV)])

    def start():
        for worker in started:
            return worker
        raise IsolationError("no more")

    monkeypatch.setattr(sampler, "_automatic", lambda programs, names: TableClock())
    monkeypatch.setattr(runner, "starter", lambda device, limits: start)

    def noting(cfg):
        ran.append(cfg)
        return numbered(cfg)

    job = TuningJob(noting, (X,), {}, CFGS, tolerance=9.0, offline=True)
    with pytest.warns(IsolationWarning, match="no more"):
        record = Tuner(0, 1, effort="quick").tune(job)

    [lost] = [trial for trial in record.trials if trial.status == "crash"]
    assert lost.cfg == ran[3]
    assert ran.count(lost.cfg) == 1
    assert "not in a worker process: no more" in record.clock
