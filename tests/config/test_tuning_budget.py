"""The default budget of tunings that calls begin, and Ctrl-C in one of them.

Covers `tuning/interrupted.py`.
"""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import pytest
from fakes import Doubling, call_of, key_of

from ejkernel.ops import ConfigCache, ConfigSelectorChain, PersistentCache, Record, Trial, Tuner
from ejkernel.ops.config import tuning_budget
from ejkernel.ops.config.tuning_budget import TuningWarning
from ejkernel.ops.core.errors import OutOfTimeError
from ejkernel.ops.core.key import Key
from ejkernel.ops.tuning.interrupted import TuningInterrupted

X = jnp.ones(8)


class Noted:
    """A tuner of ours that notes what it was given, and measures nothing."""

    def __init__(self, stop="finished"):
        self.jobs = []
        self.stop = stop

    def tune(self, job, **turns):
        self.jobs.append(job)
        trials = tuple(Trial(cfg, samples_s=(1.0, 1.0)) for cfg in job.candidates)
        return Record(**job.about, trials=trials, winner=0, heuristic=0, stop=self.stop)


@pytest.fixture
def noted(monkeypatch):
    """Every selector's engine."""
    engine = Noted()
    monkeypatch.setattr("ejkernel.ops.config.tuning_runs.engine", lambda tuner: engine)
    monkeypatch.setattr(tuning_budget, "_inline", 0.0)
    monkeypatch.setattr(tuning_budget, "_said", False)
    return engine


def choose(tuner=None, kernel=None, x=X):
    """One call of a fresh selector."""
    kernel = kernel or Doubling((1, 2))
    return ConfigSelectorChain(ConfigCache(), tuner=tuner or Tuner()).decide(call_of(kernel, x), kernel)


def test_a_call_that_tunes_has_a_minute(noted):
    """Without any setting; a tuner with a budget of its own, or the setting, knows better."""
    choose()
    choose(Tuner(seconds=300))
    assert [job.seconds for job in noted.jobs] == [60.0, pytest.approx(600.0, abs=1)]


def test_the_setting_replaces_the_defaults(noted, monkeypatch):
    """Also to lift them."""
    monkeypatch.setenv("EJKERNEL_OPS_TUNE_SECONDS", "inf")
    choose()
    assert noted.jobs[0].seconds is None


def test_a_tuning_that_was_asked_for_has_no_default(noted):
    """`tune` and `autotune` take as long as they are given."""
    kernel = Doubling((1, 2))
    ConfigSelectorChain(ConfigCache(), tuner=Tuner()).tune(call_of(kernel, X), kernel)
    assert noted.jobs[0].seconds is None


def test_a_minute_that_is_used_up_is_said(noted):
    """With what to do."""
    noted.stop = "deadline"
    with pytest.warns(TuningWarning, match=r"was stopped after 60 s, the default for a call; .* Give Tuner\(seconds="):
        choose()


def test_a_minute_in_which_the_guess_alone_was_measured_is_said(noted, monkeypatch):
    """Nothing is kept then, and the warning says what is used."""

    def late(job, **turns):
        trials = tuple(Trial(cfg, samples_s=(1.0,) if not at else ()) for at, cfg in enumerate(job.candidates))
        raise OutOfTimeError("late", ["late"], Record(**job.about, trials=trials, heuristic=0, stop="deadline"))

    monkeypatch.setattr(noted, "tune", late)
    with pytest.warns(TuningWarning, match="after 60 s, the default for a call; the heuristic cfg is used"):
        # Another call than the other tests': that it had no time is remembered.
        assert choose(x=jnp.ones(9)).tier == "heuristics"


@pytest.mark.parametrize(("others", "of_use"), [((), False), (((0.5,),), True)])
def test_an_interrupted_race_of_the_guess_alone_is_of_no_use(others, of_use):
    """Another candidate was timed, or nothing is known to be faster."""
    trials = (Trial("guess", samples_s=(1.0,)), *(Trial(n, samples_s=s) for n, s in enumerate(others)), Trial("late"))
    assert TuningInterrupted(Record(trials=trials, winner=0, heuristic=0)).is_of_use is of_use


def test_a_process_has_ten_minutes_and_says_once_that_they_are_over(noted, monkeypatch):
    """Then heuristics serve, and the reason names the setting."""
    monkeypatch.setattr(tuning_budget, "_inline", 601.0)
    with pytest.warns(
        TuningWarning, match=r"have spent 600 s on tuning, the default; from now on stores and heuristics"
    ):
        first = choose()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = choose()
    assert (first.tier, second.tier, noted.jobs) == ("heuristics", "heuristics", [])
    assert "EJKERNEL_OPS_TUNE_SECONDS" in dict(second.misses)["autotune"]


class Interrupted:
    """A clock that reads a table, and at which Ctrl-C is pressed after some rounds."""

    name = "table"

    def __init__(self, rounds, seconds):
        self.left = rounds
        self.seconds = seconds

    def round(self, runs):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return {run.number: self.seconds[run.number] for run in runs}


class Moved(Doubling):
    """Doubles in programs that differ, so that each is timed."""

    def run(self, x, *, cfg):
        return (x + cfg.size) * 2 - 2 * cfg.size


def test_ctrl_c_keeps_the_best_that_was_timed(tmp_path):
    """In memory and in the store; the interrupt goes on to the program, and the next call uses what was found."""
    kernel, store = Moved((1, 2, 4)), PersistentCache("ops", tmp_path / "ops.json")
    clock = Interrupted(2, [3.0, 1.0, 1.01])
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(iters=9, clock=clock), persistent=store)
    with pytest.raises(KeyboardInterrupt):
        selector.choose(call_of(kernel, X), kernel)
    found = selector.decide(call_of(kernel, X), kernel)
    key = Key(*key_of(kernel, call_of(kernel, X)))
    assert (found.tier, found.cfg.size) == ("memory", 2)
    record = store.record(*key)
    assert (record.stop, record.gain[0]) == ("interrupted", pytest.approx(3.0))
    assert [len(trial.samples_s) for trial in record.trials] == [2, 2, 2]


def test_ctrl_c_before_anything_was_timed_keeps_nothing(tmp_path):
    """The next call tunes."""
    kernel, store = Doubling((1, 2, 4)), PersistentCache("ops", tmp_path / "ops.json")
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(clock=Interrupted(0, [])), persistent=store)
    with pytest.raises(KeyboardInterrupt):
        selector.choose(call_of(kernel, X), kernel)
    assert (store.keys(), selector.cache.keys()) == ([], [])
    assert selector.preview(call_of(kernel, X), kernel).tier == "autotune"
