"""Candidates whose products a GPU's compiler would time: compiled quickly, and for speed where they may win."""

from __future__ import annotations

import contextlib

import jax.numpy as jnp
import pytest
from fakes import Ran, TableClock

from ejkernel.ops import Tuner
from ejkernel.ops.timing import program
from ejkernel.ops.tuning.compile import CandidateCompiler
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.worker.export import LocalBuilder

X = jnp.arange(1.0, 9.0)


@pytest.fixture
def compiled(monkeypatch):
    """As on a GPU, for every candidate but the first; which were compiled, and whether for speed."""
    made = []
    compiling = program.Staged.compile

    def noted(self, lowered, *, for_speed=True):
        made.append((int(self.name.rpartition("_")[2]), for_speed))
        return compiling(self, lowered, for_speed=for_speed)

    monkeypatch.setattr(CandidateCompiler, "_begins_quickly", lambda self, number, staged, lowered: number != 0)
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
    assert record.trials[2].samples_s == pytest.approx((5.0,))
    assert record.trials[2].dropped_round == 1
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


def test_only_programs_with_products_begin_quickly():
    """Nothing is timed for a program without them, so compiling it twice would be for nothing."""
    import jax

    assert program.times_products(jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).as_text())
    assert not program.times_products(jax.jit(lambda x: x * 2).lower(jnp.ones((4, 4))).as_text())


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
