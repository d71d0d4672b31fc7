"""Candidates whose parts a GPU's compiler would time: compiled quickly, and for speed where they may win."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from fakes import Ran, TableClock

from ejkernel.ops import Tuner
from ejkernel.ops.core.standing import standings
from ejkernel.ops.core.times import read_times
from ejkernel.ops.timing import program
from ejkernel.ops.tuning import compile as compile_module
from ejkernel.ops.tuning import runner
from ejkernel.ops.tuning.builder import LocalBuilder
from ejkernel.ops.tuning.compile import CandidateCompiler
from ejkernel.ops.tuning.job import TuningJob

X = jnp.arange(1.0, 9.0)
MANY = {"heuristic": 1.0} | {f"c{n}": 1.2 - 0.01 * n for n in range(15)}


@pytest.fixture
def compiled(monkeypatch):
    """As on a GPU, for every candidate but the first; which were compiled, and whether for speed."""
    made = []
    compiling = program.Staged.compile

    def noted(self, lowered, *, for_speed=True):
        made.append((int(self.name.rpartition("_")[2]), for_speed))
        return compiling(self, lowered, for_speed=for_speed)

    monkeypatch.setattr(CandidateCompiler, "_parts_to_time", lambda self, number, *_: f"of {number}" if number else "")
    monkeypatch.setattr(program.Staged, "compile", noted)
    return made


def tuned(seconds, *, make=None):
    """The record of a tuning whose clock reads this table; the first candidate is the heuristic."""
    ran, own = Ran(), make or {}
    job = TuningJob(lambda cfg: own.get(cfg, ran.make_fn(cfg)), (X,), {}, list(seconds), heuristic_first=True)
    return Tuner(clock=TableClock(ran, seconds), isolate=False).tune(job)


def test_a_candidate_far_behind_is_never_compiled_for_speed(compiled):
    """Its first look is in the record, with the reason why it was not raced."""
    record = tuned({"heuristic": 1.0, "near": 0.9, "far": 5.0})
    assert record.cfg == "near"
    assert (1, True) in compiled
    assert (2, True) not in compiled
    assert record.trials[2].samples_s == pytest.approx((5.0,) * 2)
    assert record.trials[2].dropped_round == 0
    assert "5.6 times as long as the fastest" in record.trials[2].message


def test_what_wins_was_compiled_for_speed(compiled):
    """A quickly compiled program is not the one that runs later, so its samples do not count."""
    record = tuned({"heuristic": 1.0, "near": [1.5, 0.5]})
    assert record.cfg == "near"
    assert max(record.trials[1].samples_s) == pytest.approx(0.5)
    assert compiled.count((1, True)) == 1


def test_the_heuristic_is_compiled_for_speed_at_once(compiled):
    """It is what runs without a tuning, however far behind it is."""
    record = tuned({"heuristic": 9.0, "near": 1.0})
    assert [pair for pair in compiled if pair[0] == 0] == [(0, True)]
    assert record.trials[0].samples_s
    assert record.cfg == "near"


def test_a_candidate_that_is_wrong_is_not_compiled_twice(compiled):
    """The check comes before the first look."""
    record = tuned({"heuristic": 1.0, "wrong": 0.1}, make={"wrong": lambda x: x * 3})
    assert record.trials[1].status == "wrong"
    assert (1, True) not in compiled


def test_a_heuristic_that_cannot_run_ends_no_tuning(compiled):
    """The others have their first look, and race, without it."""

    def fails(x):
        raise ValueError("not here")

    record = tuned({"heuristic": 1.0, "near": 0.9, "nearer": 0.8}, make={"heuristic": fails})
    assert record.trials[0].status == "compile"
    assert record.cfg == "nearer"


@pytest.fixture
def sharing(compiled, monkeypatch):
    """All candidates but the heuristic have the same products beside their kernels."""
    monkeypatch.setattr(CandidateCompiler, "_parts_to_time", lambda self, number, *_: "products" if number else "")
    return compiled


def test_what_equal_products_gain_is_known_from_one_candidate(sharing):
    """The others gain as many seconds, so most of them need not be compiled for speed."""
    record = tuned(MANY | {"c14": [*[1.06] * 4, 0.86]})
    assert record.cfg == "c14"
    # The fifth is within a few percent of the fastest then; all others are within 1.4 times as they are.
    assert set(for_speed(sharing)) == {11, 12, 13, 14, 15}
    dropped = [trial for trial in record.trials if "with the gain of equal parts" in trial.message]
    assert len(dropped) == 10
    assert all(trial.samples_s for trial in dropped)


def test_a_candidate_that_may_win_with_the_gain_of_equal_products_is_compiled_for_speed(sharing):
    """The shortest of a few runs differs by some noise."""
    near = {"heuristic": 1.0} | {f"c{n}": 1.2 - 0.002 * n for n in range(15)}
    record = tuned(near | {"c14": [*[1.172] * 4, 0.9]})
    assert sorted(for_speed(sharing)) == list(range(1, 16))
    assert record.cfg == "c14"


def test_one_candidate_for_each_kind_of_product_is_compiled_for_speed_first(compiled, monkeypatch):
    """It says what the compiler gains there; the fastest ones, all of one kind, would say nothing of the others."""

    def parts(self, number, *_):
        return f"kind {min(number, 4)}" if number else ""

    monkeypatch.setattr(CandidateCompiler, "_parts_to_time", parts)
    tuned(MANY)
    assert set(for_speed(compiled)[:4]) == {1, 2, 3, 15}


def test_what_is_compiled_for_speed_is_not_disturbed(compiled, monkeypatch):
    """Programs of later tunings wait: beside them ten candidates took 13 s instead of 3 on an H200."""
    inside = []

    @contextlib.contextmanager
    def undisturbed(self):
        before = list(compiled)
        yield
        inside.extend(one for one in compiled if one not in before)

    monkeypatch.setattr(LocalBuilder, "undisturbed", undisturbed)
    tuned({"heuristic": 1.0, "near": 0.9, "far": 5.0})
    assert inside == [(1, True)]
    # Nor between the first few and the others.
    compiled.clear()
    inside.clear()
    tuned(MANY)
    assert sorted(inside) == [(number, True) for number in range(1, 16)]


def for_speed(compiled):
    """The candidates that were compiled for speed, without the heuristic, in the order in which that began."""
    return [number for number, fast in compiled if fast and number]


def test_a_few_are_compiled_for_speed_first_and_those_that_promise_most(compiled, monkeypatch):
    """Side by side each would have its compiler time the products that they share; then there are more at a time."""
    pools = []
    pool = compile_module.CompilePool

    def noted(workers):
        pools.append(len(for_speed(compiled)))
        return pool(workers)

    monkeypatch.setattr(compile_module, "CompilePool", noted)
    record = tuned(MANY)
    assert record.cfg == "heuristic"
    assert [trial.status for trial in record.trials] == ["ok"] * 16
    # The pools of the first programs, behind none, four, and eight more.
    assert pools[-3:] == [0, 4, 12]
    assert set(for_speed(compiled)[:4]) == {12, 13, 14, 15}
    assert sorted(for_speed(compiled)) == list(range(1, 16))


def test_what_is_far_behind_one_that_was_compiled_for_speed_is_not_compiled_for_speed(compiled):
    """The first four show how fast a program is that may have its products timed."""
    record = tuned(MANY | {"c14": [*[1.06] * 4, 0.5]})
    assert record.cfg == "c14"
    assert set(for_speed(compiled)) == {12, 13, 14, 15}
    dropped = [trial for trial in record.trials if "before the compiler has timed its parts" in trial.message]
    assert len(dropped) == 11
    assert all(trial.samples_s for trial in dropped)


def test_those_for_which_there_is_no_time_are_out_and_the_record_says_so(compiled, monkeypatch):
    """No others are begun with: they would be compiled beside the race, and end the worker."""
    later = SimpleNamespace(perf_counter=lambda: time.perf_counter() + (900.0 if for_speed(compiled) else 0.0))
    monkeypatch.setattr(runner, "time", later)
    ran = Ran()
    job = TuningJob(ran.make_fn, (X,), {}, list(MANY), heuristic_first=True, seconds=1000.0)
    record = Tuner(clock=TableClock(ran, MANY), isolate=False).tune(job)
    assert sorted(for_speed(compiled)) == [12, 13, 14, 15]
    assert record.cfg == "heuristic"
    assert record.stop == "deadline"
    late = [trial for trial in record.trials if trial.status == "timeout"]
    assert len(late) == 11
    assert {trial.message for trial in late} == {"still compiling when the time was up"}
    assert not any(trial.samples_s for trial in late)


def test_a_candidate_that_fails_when_compiled_for_speed_is_no_measure_for_others(sharing, monkeypatch):
    """Its quick program is gone: what is compared with is there."""
    compiling = program.Staged.compile

    def failing(self, lowered, *, for_speed=True):
        if for_speed and self.name.endswith("_1"):
            raise ValueError("not for speed")
        return compiling(self, lowered, for_speed=for_speed)

    monkeypatch.setattr(program.Staged, "compile", failing)
    seconds = {f"c{n}": [*[0.78 + 0.01 * n] * 4, 0.73 + 0.01 * n] for n in range(2, 5)}
    record = tuned({"heuristic": 1.0, "c1": 0.7} | seconds | {"c5": [*[0.83] * 4, 0.6]})
    assert record.trials[1].status == "compile"
    assert record.cfg == "c5"


def test_parts_that_get_slower_are_no_reason_to_leave_one_as_it_is(sharing):
    """A compiler may choose worse by its timing: then nothing is gained, and the others have their turn."""
    seconds = {"heuristic": 1.0} | {f"c{n}": [*[0.8 + 0.01 * n] * 4, 0.99] for n in range(4)}
    record = tuned(seconds | {"c4": [*[0.85] * 4, 0.7]})
    assert 5 in for_speed(sharing)
    assert record.cfg == "c4"


def test_a_quick_time_is_not_compared_with_those_of_programs_for_speed(sharing):
    """A candidate that was dropped by an estimate has its samples, and no ratio; nothing is learned from its time."""
    record = tuned(MANY | {"c14": [*[1.06] * 4, 0.7]})
    dropped = [place for place, trial in enumerate(record.trials) if trial.dropped_round == 0]
    assert len(dropped) == 11
    assert all(standings(record)[place].ratio is None for place in dropped)
    assert "dropped before the race" in record.table()
    cfgs = [cfg for cfg, seconds in read_times(record.summary())]
    assert not {record.trials[place].cfg for place in dropped} & set(cfgs)


def test_a_later_tuning_knows_by_how_much_a_candidate_was_behind_with_the_gain(sharing, tmp_path):
    """Not by its quick program's time over that of one that was compiled for speed."""
    ran, about = Ran(), {"key": {"device": "gpu|x", "op_id": "op@v1", "call_key": "0123"}}

    def again(seconds):
        cfgs = list(seconds)
        job = TuningJob(ran.make_fn, (X,), {}, cfgs, heuristic_first=True, about=about, journal=tmp_path)
        return Tuner(clock=TableClock(ran, seconds), isolate=False).tune(job)

    first = again(MANY | {"c14": [*[1.06] * 4, 0.86]})
    assert "1.16 times as long as the fastest, with the gain" in first.trials[1].message
    second = again(MANY | {"c14": 0.86, "new": 2.0})
    assert second.trials[1].status == "skipped"
    assert second.trials[1].message == "took 1.16 times as long as the best in an earlier tuning"


def test_times_of_quick_programs_are_not_told_as_rounds(compiled, monkeypatch):
    """A tuning that is cut off goes by the rounds that were told: a program that is compiled anew was not measured."""
    told, began = [], runner.InProcessRunner.__init__

    def telling(self, *args, **settings):
        began(self, *args, **settings, told_rounds=lambda seconds, clock: told.append((dict(seconds), len(compiled))))

    monkeypatch.setattr(runner.InProcessRunner, "__init__", telling)
    tuned({"heuristic": 1.0, "near": [1.2, 1.2, 1.2, 1.2, 0.9], "far": 9.0})
    before = [seconds for seconds, count in told if count == 3]
    assert before
    assert all(set(seconds) == {0} for seconds in before)
    assert {1} <= {number for seconds, count in told if count == 4 for number in seconds} <= {0, 1}


def test_a_heuristic_that_fails_when_it_is_timed_ends_no_tuning(compiled):
    """It passes the check; the others, of which there are more than are compiled at once, are compared without it."""
    ran, runs = Ran(), []

    class Failing(TableClock):
        def time(self, call, leaves, calls):
            seconds = super().time(call, leaves, calls)
            if self.ran.log[-1] == "heuristic":
                runs.append(seconds)
                raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return seconds

    job = TuningJob(ran.make_fn, (X,), {}, list(MANY), heuristic_first=True)
    record = Tuner(clock=Failing(ran, MANY), isolate=False).tune(job)
    assert len(runs) == 1
    assert record.trials[0].status == "memory"
    # The last one is not a whole percent faster.
    assert record.cfg == "c13"
