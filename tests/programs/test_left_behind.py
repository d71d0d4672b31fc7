"""A call with candidates that were still compiling when its time was up is tuned once more in the time that is left.

Covers `programs/left_behind.py`.
"""

from __future__ import annotations

import jax
import pytest
from fakes_execution import Times
from fakes_programs import Outer, Timed, X, ops, three

from ejkernel.ops import (
    AutotuneOptions,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Record,
    Trial,
    autotune,
    policy_override,
)
from ejkernel.ops.core.errors import OutOfTimeError
from ejkernel.ops.programs.left_behind import is_worth_more, raced

LATE = "still compiling when the time was up"


class Hasty(Timed):
    """A tuner that measures the heuristic cfg and one more in some tunings of an operation, and all in the others."""

    def __init__(self, first, second=None):
        super().__init__()
        self.measured = {"one@v0": [first, second], "two@v0": [None], "six@v0": [None]}
        self.winners = []

    def tune(self, job, **around):
        record = super().tune(job, **around)
        most = self.measured[job.about["key"]["op_id"]].pop(0)
        if most is None:
            return record
        trials = [t if at < most else Trial(t.cfg, "timeout", LATE) for at, t in enumerate(record.trials)]
        if most == 0:
            raise OutOfTimeError("nothing was measured", [LATE], Record(**dict(job.about), trials=tuple(trials)))
        winner = self.winners.pop(0) if self.winners else most - 1
        return Record(**dict(job.about), objective=job.objective, trials=tuple(trials), winner=winner, heuristic=0)


def tuned(tuner, seconds=1000.0):
    """The result of three operations, of which some may be tuned twice."""
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=tuner))
    fn = three(executor)
    return autotune(fn, X, tuning=AutotuneOptions(seconds=seconds, progress=False)), executor


def test_what_is_left_of_a_budget_is_for_candidates_that_were_left_behind():
    """The second tuning reaches them, and its cfg is the one that stays."""
    tuner = Hasty(2)
    result, executor = tuned(tuner)
    assert sorted(tuner.tuned) == ["one@v0", "one@v0", "six@v0", "two@v0"]
    assert tuner.tuned[-1] == "one@v0"
    assert sorted(ops(result)) == ["one", "six", "two"]
    (entry,) = [e for e in result.entries if e.op_id_v == "one@v0"]
    assert entry.cfg == 5
    assert not any(trial.status == "timeout" for trial in entry.record.trials)
    assert executor.choose_config(Times.fresh(op_id="one")(), X) == 5


def test_calls_of_which_nothing_was_measured_are_first():
    """Their part was too short for the compiler of the heuristic cfg; what others left of theirs may do."""
    tuner = Hasty(2)
    tuner.measured["six@v0"] = [0, None]
    result, _ = tuned(tuner)
    assert tuner.tuned[-2:] == ["six@v0", "one@v0"]
    assert len(tuner.tuned) == 5
    assert all(entry.is_measured for entry in result.entries)
    assert not result.notes


def test_a_kernel_inside_one_of_which_nothing_was_measured_stays_before_it():
    """The outer one is measured with the cfg that the inner one has in the end."""
    tuner = Hasty(None)
    tuner.measured = {"inner@v0": [2, None], "outer@v0": [0, None]}
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=tuner))
    outer = Outer(executor)
    result = autotune(lambda x: executor(outer, x), X, tuning=AutotuneOptions(seconds=1000.0, progress=False))
    assert tuner.tuned == ["inner@v0", "outer@v0"] * 2
    assert all(entry.is_measured for entry in result.entries)


def test_a_call_of_which_nothing_is_measured_twice_has_no_cfg_of_a_tuning():
    """It keeps its heuristic cfg, and the entry says why."""
    tuner = Hasty(None)
    tuner.measured["six@v0"] = [0, 0]
    result, _ = tuned(tuner)
    assert tuner.tuned.count("six@v0") == 2
    (entry,) = [e for e in result.entries if e.op_id_v == "six@v0"]
    assert not entry.is_measured
    assert "nothing was measured" in entry.note


def test_a_second_tuning_that_reaches_fewer_candidates_changes_nothing():
    """What the first one found is brought back, in the cache too."""
    tuner = Hasty(2, 1)
    result, executor = tuned(tuner)
    (entry,) = [e for e in result.entries if e.op_id_v == "one@v0"]
    assert len(tuner.tuned) == 4
    assert raced(entry) == 2
    assert executor.choose_config(Times.fresh(op_id="one")(), X) == entry.cfg


def test_a_change_that_is_brought_back_is_still_a_change():
    """Also where the second tuning, which is not kept, chose what the call was traced with: functions run anew."""
    tuner = Hasty(3, 2)
    tuner.winners = [2, 0]
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=tuner))
    one = Times.fresh(op_id="one", candidates=(2, 3, 5, 7, 11))()
    fn = jax.jit(lambda x: executor(one, x))
    with policy_override(executor.chooser, allow_autotune=False):
        assert (fn(X) == X * 2).all()
    result = autotune(fn, X, tuning=AutotuneOptions(seconds=1000.0, progress=False))
    (entry,) = result.entries
    assert tuner.tuned == ["one@v0", "one@v0"]
    assert (entry.cfg, raced(entry)) == (5, 3)
    assert (fn(X) == X * 5).all()


def test_without_a_budget_nothing_is_left_behind():
    """A limit of the tuner's own would be met once more."""
    tuner = Hasty(2)
    tuned(tuner, seconds=None)
    assert len(tuner.tuned) == 3


def entry_of(*statuses, winner=0):
    """An entry of candidates with these statuses."""
    trials = tuple(Trial(at, s, samples_s=(1.0,) if s == "ok" else ()) for at, s in enumerate(statuses))
    return Entry("x", "00", 0, Record(trials=trials, winner=winner, heuristic=0), "autotune")


@pytest.mark.parametrize(
    ("statuses", "took", "left", "is_worth"),
    [
        (("ok", "ok", "timeout"), 2.0, 4.0, True),
        (("ok", "ok", "timeout"), 2.0, 2.5, False),
        (("ok", "ok", "ok", "ok", "timeout"), 2.0, 4.0, False),
        (("ok", "wrong", "compile", "wrong"), 2.0, 4.0, False),
    ],
    ids=["many left", "no time for it", "a straggler", "failures"],
)
def test_a_second_tuning_must_promise_something(statuses, took, left, is_worth):
    """Many candidates that were not reached, and more time than the first one had."""
    assert is_worth_more(entry_of(*statuses), took, left) is is_worth


def test_a_call_that_cannot_be_measured_is_not_tuned_twice():
    """There is no record of it, or one without candidates that lacked time."""
    assert not is_worth_more(Entry("x", "00", 0, None, "heuristics"), 1.0, 100.0)
    failed = Entry("x", "00", 0, Record(trials=(Trial(0, "compile", "no"),)), "heuristics")
    assert not is_worth_more(failed, 1.0, 100.0)
