"""What a runner makes of what a worker has left when the time is up: fakes, without any process."""

from __future__ import annotations

import contextlib
import math
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from ejkernel.ops import Isolation, Record, Trial
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.worker import runner as worker_runner
from ejkernel.ops.tuning.worker.runner import WorkerRunner
from ejkernel.ops.tuning.worker.session import WorkerSession
from ejkernel.ops.tuning.worker.tracing import tracing_in_force

NAMES = (1.0, 2.0, 3.0)


def race(monkeypatch, run, *, deadline=math.inf, late=False):
    """The record of a race of three, the first of which is the heuristic cfg, by what this session finds."""
    monkeypatch.setattr(WorkerSession, "add", lambda self, number: None)
    monkeypatch.setattr(WorkerSession, "run", run)
    job = TuningJob(lambda n: lambda x: (x * n * 2) / n, (jnp.arange(4.0),), {}, NAMES, heuristic_first=True)
    runner = WorkerRunner(job, Isolation(), demanded=True, warmup=0, iters=3, seed=0)
    with contextlib.closing(runner):
        runner.candidates.enter(NAMES)
        runner.compile(math.inf)
        runner._compiler.late = late
        return runner.race(Record(), [0, 1, 2], deadline=deadline, heuristic=0)


def checked(session):
    for number in session.candidates.having("compiled"):
        session.candidates.advance(number, "checked")


def test_none_beats_the_heuristic_cfg_by_rounds_in_which_it_was_faster(monkeypatch):
    """Tuned is never slower than untuned, also where a worker was ended with the time."""

    def run(self, numbers, **settings):
        checked(self)
        self.rows = [{0: 1.0e-3, 1: 0.97e-3}, {0: 1.0e-3, 1: 1.05e-3}, {0: 1.0e-3, 1: 1.05e-3}]

    record = race(monkeypatch, run)

    assert (record.winner, record.stop, record.gain[0]) == (0, "deadline", 1.0)


def test_one_that_is_right_and_was_not_timed_has_not_won(monkeypatch):
    """Only what was measured is an answer."""
    record = race(monkeypatch, lambda self, numbers, **settings: checked(self))

    assert (record.winner, record.stop) == (None, "deadline")
    assert {trial.status for trial in record.trials} == {"timeout"}


def test_the_last_one_that_is_at_work_when_the_time_is_up_has_not_failed(monkeypatch):
    """Then nothing is known, which is no reason to call the kernel broken."""

    def run(self, numbers, **settings):
        self.candidates.advance(1, "wrong", message="another value")
        self.candidates.advance(2, "wrong", message="another value")
        self.candidates.advance(0, "timeout", message="still at work when the time was up")

    assert race(monkeypatch, run, deadline=time.perf_counter()).stop == "deadline"
    assert race(monkeypatch, run).stop == "failed"


def test_where_some_were_not_exported_in_time_a_race_has_not_finished(monkeypatch):
    """The heuristic cfg may be among them, and then none is known to be faster."""

    def run(self, numbers, **settings):
        checked(self)
        return Record(trials=tuple(Trial(n, samples_s=(1e-3,)) for n in numbers), winner=1, stop="finished")

    assert race(monkeypatch, run, late=True).stop == "deadline"
    assert race(monkeypatch, run).stop == "finished"


class NoneOfThem:
    """Processes that trace, and have nothing of this call."""

    def call(self, key, objective):
        return None


@pytest.mark.parametrize("tracing", [None, NoneOfThem()], ids=["alone", "beside-processes-that-trace"])
def test_a_worker_is_told_whether_other_processes_compile(tracing):
    """They are there for the whole program, whichever calls they trace."""
    job = TuningJob(lambda n: lambda x: x * n, (jnp.arange(4.0),), {}, NAMES)
    token = tracing_in_force.set(tracing)
    try:
        runner = WorkerRunner(job, Isolation(), demanded=True, warmup=0, iters=3, seed=0)
    finally:
        tracing_in_force.reset(token)
    with contextlib.closing(runner):
        heads = []
        runner.session._send_tuning(SimpleNamespace(send=lambda verb, parts=(), **head: heads.append(head)))
        assert [head["beside_others"] for head in heads] == [tracing is not None]


def test_what_a_first_look_tells_of_the_heuristic_alone_is_no_progress(monkeypatch):
    """A race of three is not nearly done then."""
    seen = []

    def run(self, numbers, *, told, **settings):
        checked(self)
        for row in ({0: 1.0e-3}, {0: 1.0e-3, 1: 2.0e-3, 2: 2.0e-3}):
            self.rows.append(row)
            told(row)

    monkeypatch.setattr(worker_runner, "told_with_gain", lambda watch, kept: lambda row, total: seen.append(len(row)))
    assert race(monkeypatch, run).cfg == 1.0
    assert seen == [3]
