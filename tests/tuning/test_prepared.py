"""A tuning in two parts: traced on one thread, measured later, on that thread or another."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from fakes import Ran, TableClock

from ejkernel.ops import Record, Trial, Tuner
from ejkernel.ops.core.errors import OutOfTimeError
from ejkernel.ops.timing.program import Staged
from ejkernel.ops.tuning import compile as compile_module
from ejkernel.ops.tuning.interrupted import TuningInterrupted
from ejkernel.ops.tuning.job import TuningJob, program_end
from ejkernel.ops.tuning.journal.file import Journal, path_for
from ejkernel.ops.tuning.prepared import _refuse_unless_measured
from ejkernel.ops.tuning.runner import InProcessRunner

X = jnp.arange(4.0)
TIMES = {"a": 3.0, "b": 1.0, "c": 2.0}
ABOUT = {"key": {"device": "cpu|test", "op_id": "double@v1", "call_key": "00"}}


@pytest.fixture
def compiled(monkeypatch):
    """The programs that were compiled, by name."""
    names, real = [], Staged.compile
    monkeypatch.setattr(
        Staged, "compile", lambda self, lowered, **more: names.append(self.name) or real(self, lowered, **more)
    )
    return names


def in_a_thread(function):
    """What a function gives in another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same thread", "another thread"])
def test_what_is_prepared_is_traced_and_not_compiled_before_it_is_measured(compiled, elsewhere):
    """So that the device and its timings are left alone; the outcome is that of `tune`."""
    ran, traced = Ran(), []
    tuner = Tuner(0, 1, clock=TableClock(ran, TIMES))

    def make_fn(cfg):
        traced.append(cfg)
        return ran.make_fn(cfg)

    prepared = tuner.prepare(TuningJob(make_fn, (X,), {}, list(TIMES), heuristic_first=True))
    assert (traced, compiled, ran.log) == (list(TIMES), [], [])
    record = in_a_thread(prepared.measure) if elsewhere else prepared.measure()

    assert (record.cfg, traced) == ("b", list(TIMES))
    assert record.gain[0] == pytest.approx(3.0)
    assert len(compiled) == 3


def test_settings_of_the_thread_that_prepares_hold_where_it_is_measured():
    """Numbers of 64 bits stay numbers of 64 bits."""
    with jax.enable_x64(True):
        x = jnp.arange(4, dtype=jnp.float64)
        prepared = Tuner(0, 1).prepare(
            TuningJob(lambda n: lambda x: x * n / n, (x,), {}, [1.0, 2.0], fresh_floats=True)
        )
    record = in_a_thread(prepared.measure)

    assert {trial.status for trial in record.trials} == {"ok"}


def test_the_end_of_a_program_s_budget_is_that_of_the_thread_that_measures(monkeypatch):
    """It was not known when the tuning was prepared; until then a worker is waited for."""
    seen, check = [], InProcessRunner.check
    monkeypatch.setattr(InProcessRunner, "check", lambda self, end: seen.append(program_end.get()) or check(self, end))
    tuner = Tuner(0, 1, clock=TableClock(ran := Ran(), TIMES))
    prepared = [tuner.prepare(TuningJob(ran.make_fn, (X,), {}, list(TIMES))) for _ in range(2)]

    def measured(one):
        token = program_end.set(1e9)
        try:
            return one.measure()
        finally:
            program_end.reset(token)

    in_a_thread(lambda: measured(prepared[0]))
    measured(prepared[1])
    assert seen == [1e9, 1e9]
    assert program_end.get() is None


def test_ctrl_c_while_the_runner_is_let_go_keeps_what_was_measured(monkeypatch):
    """A worker that still compiles is given a moment, in which the record is known already."""

    def close(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(InProcessRunner, "close", close)
    ran = Ran()
    with pytest.raises(TuningInterrupted) as stopped:
        Tuner(0, 1, clock=TableClock(ran, TIMES)).tune(TuningJob(ran.make_fn, (X,), {}, list(TIMES)))
    assert stopped.value.record.cfg == "b"
    assert stopped.value.record.stop == "interrupted"


def test_a_race_without_candidates_that_there_was_no_time_to_trace_is_not_finished(monkeypatch):
    """Also where time is left for the race: the next run takes them up."""
    ran = Ran()
    hands = SimpleNamespace(perf_counter=lambda: time.perf_counter() + (900.0 if "b" in traced else 0.0))
    traced = []
    prepared = Tuner(0, 1, clock=TableClock(ran, TIMES)).prepare
    monkeypatch.setattr(compile_module, "time", hands)
    job = TuningJob(lambda cfg: traced.append(cfg) or ran.make_fn(cfg), (X,), {}, list(TIMES), seconds=1000.0)
    one = prepared(job)
    monkeypatch.setattr(compile_module, "time", time)
    record = one.measure()
    assert traced == ["a", "b"]
    assert [trial.status for trial in record.trials] == ["ok", "ok", "timeout"]
    assert record.stop == "deadline"


def test_what_is_prepared_in_a_worker_is_exported_before_it_is_measured():
    """The worker gets it when it is measured."""
    prepared = Tuner(0, 1, isolate=True).prepare(TuningJob(lambda n: lambda x: x * n / n, (X,), {}, [1.0, 2.0]))
    record = in_a_thread(prepared.measure)

    assert record.clock == "wall (in a worker process)"
    assert {trial.status for trial in record.trials} == {"ok"}


def test_what_cannot_be_exported_is_prepared_here():
    """As for a tuning in one part, and the record says why."""

    def calling_back(n):
        return lambda x: jax.pure_callback(lambda v: v * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * n / n

    prepared = Tuner(0, 1).prepare(TuningJob(calling_back, (X,), {}, [1.0, 2.0], offline=True))

    assert "not in a worker process" in prepared.measure().clock


def test_what_is_prepared_and_not_measured_is_let_go(tmp_path):
    """Its journal can be used by the next."""
    job = TuningJob(lambda n: lambda x: x * n / n, (X,), {}, [1.0, 2.0], about=ABOUT, journal=tmp_path)
    prepared = Tuner(0, 1).prepare(job)
    path = path_for(tmp_path, ABOUT["key"], "forward", {})
    with Journal(path) as second:
        assert not second.writable
    prepared.close()

    with Journal(path) as third:
        assert third.writable


def test_the_time_between_the_parts_is_not_the_tunings(monkeypatch):
    """A budget counts tracing and measuring; another tuning may lie between."""
    prepared = Tuner(0, 1, seconds=600.0).prepare(
        TuningJob(lambda n: lambda x: x * n / n, (X,), {}, [1.0, 2.0], heuristic_first=True)
    )
    left = prepared._left
    monkeypatch.setattr("ejkernel.ops.tuning.prepared.time.perf_counter", _later(3600.0))
    record = prepared.measure()

    assert 0 < left < 600.0
    assert record.stop == "finished"


def test_a_budget_that_tracing_has_spent_leaves_one_to_measure():
    """As in one part: the heuristic cfg, however late."""
    prepared = Tuner(0, 1, seconds=1e-9).prepare(
        TuningJob(lambda n: lambda x: x * n / n, (X,), {}, [1.0, 2.0], heuristic_first=True)
    )
    try:
        record = prepared.measure()
    except OutOfTimeError as error:
        record = error.record

    assert record.stop == "deadline"


@pytest.mark.parametrize(
    ("status", "samples", "is_kept"),
    [("timeout", (), False), ("skipped", (), True), ("ok", (2.0,), True), ("wrong", (), True)],
)
def test_a_guess_is_kept_where_it_was_compared_with_another(status, samples, is_kept):
    """Now, or in an earlier run of the same tuning; or where all others failed."""
    trials = (Trial(1, samples_s=(1.0,)), Trial(2, status=status, samples_s=samples))
    late = () if status == "wrong" else (Trial(3, status="timeout"),)
    record = Record(trials=(*trials, *late), winner=0, heuristic=0, stop="deadline")
    with contextlib.nullcontext() if is_kept else pytest.raises(OutOfTimeError, match="any of 2 candidates"):
        _refuse_unless_measured(record, heuristic_first=True)


def _later(seconds):
    import time

    real = time.perf_counter
    return lambda: real() + seconds
