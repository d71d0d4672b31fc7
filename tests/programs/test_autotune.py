"""Tuning whole programs: each call once, in the right order, within a budget, and what is done stays done.

Covers `programs/batch.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Asked, Counting, Picking, Times, executor_with, selector_with
from fakes_programs import QUIET, X, key_of, ops, three, timed

from ejkernel.ops import (
    AutotuneOptions,
    AutotunePolicy,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Invocation,
    OpsError,
    PersistentCache,
    Record,
    Trial,
    Tuner,
    autotune,
    autotune_lowered,
    autotune_recorded,
    check,
    explain,
    forward_autotune_only,
)
from ejkernel.ops.programs.batch_progress import BatchProgress

programs_autotune = importlib.import_module("ejkernel.ops.programs.autotune")

# Labels and names are read from compiled programs.
pytestmark = pytest.mark.usefixtures("own_text")


def test_every_call_is_tuned_once():
    """A second autotune has nothing to do: what is known stays."""
    executor = timed()
    fn = three(executor)
    first, second = autotune(fn, X, tuning=QUIET), autotune(fn, X, tuning=QUIET)
    assert executor.chooser.tuner.tuned == ["one@v0", "two@v0", "six@v0"]
    assert [e.source for e in first.entries] == ["autotune"] * 3
    assert [e.source for e in second.entries] == ["memory"] * 3
    assert first.by_key().keys() == second.by_key().keys()
    assert [e.cfg for e in first.entries] == [e.cfg for e in second.entries] == [5, 5, 5]


def test_what_is_known_is_tuned_again_where_that_is_asked():
    """`again=True` tunes every call."""
    executor = timed()
    fn = three(executor)
    for _ in range(2):
        autotune(fn, X, tuning=AutotuneOptions(again=True, progress=False))
    assert len(executor.chooser.tuner.tuned) == 6


def test_what_a_store_knows_is_not_tuned_and_has_its_record(tmp_path):
    """A second process finds the first one's work, times included."""
    store = PersistentCache("p", path=tmp_path / "p.json")
    autotune(three(timed(persistent=store)), X, tuning=QUIET)
    other = timed(persistent=PersistentCache("p", path=tmp_path / "p.json"))
    result = autotune(three(other), X, tuning=QUIET)
    assert other.chooser.tuner.tuned == []
    assert [e.source for e in result.entries] == ["persistent"] * 3
    assert all(e.is_measured for e in result.entries)


def test_a_function_that_was_compiled_before_has_the_new_cfgs_afterwards():
    """Its next call compiles again, with what was tuned."""
    executor, kernel = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False)), Times.fresh()()
    step = jax.jit(lambda x: executor(kernel, x))
    np.testing.assert_array_equal(step(X), X * 2)
    autotune(step, X, tuning=QUIET)
    np.testing.assert_array_equal(step(X), X * 5)
    np.testing.assert_array_equal(executor(kernel, X), X * 5)


def test_a_function_that_was_compiled_before_may_stay_as_it_is():
    """With `refresh=False` it keeps its program, and the result is in force inside `with` alone."""
    executor, kernel = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False)), Times.fresh()()
    step = jax.jit(lambda x: executor(kernel, x))
    step(X)
    result = autotune(step, X, tuning=AutotuneOptions(refresh=False, progress=False))
    np.testing.assert_array_equal(step(X), X * 2)
    with result:
        np.testing.assert_array_equal(step(X), X * 5)
    np.testing.assert_array_equal(step(X), X * 2)


def test_nothing_is_compiled_again_where_nothing_changed():
    """A tuning that finds the cfgs that were there leaves every program alone."""
    executor, kernel = executor_with(Picking()), Times.fresh()()
    step = jax.jit(lambda x: executor(kernel, x))
    step(X)
    seen = len(kernel.log)
    autotune(step, X, tuning=AutotuneOptions(again=True, progress=False))
    looked = len(kernel.log)
    step(X)
    assert seen < looked == len(kernel.log)


class Deep(Counting):
    """Its tuned cfg has a kernel inside that its heuristic one has not."""

    op_id = "deep"
    candidates = (1, 2)

    def __init__(self, executor):
        super().__init__()
        self.executor = executor

    def run(self, x, *, cfg):
        return x * 5 if cfg == 1 else self.executor(Level(), x)


class Level(Counting):
    op_id = "level"

    def run(self, x, *, cfg):
        return x * 5


def test_calls_that_a_tuned_cfg_brings_are_part_of_the_result():
    """The program is looked through again once it has another cfg."""
    executor = timed()
    result = autotune(lambda x: executor(Deep(executor), x), X, tuning=QUIET)
    assert sorted(ops(result)) == ["deep", "level"]


def test_two_selectors_with_one_call_share_its_tuning():
    """The first one tunes, and both know."""
    kernel, tuner = Times.fresh()(), Picking()
    one, other = executor_with(tuner), executor_with(tuner)
    result = autotune(lambda x: one(kernel, x) + other(kernel, x), X, tuning=QUIET)
    assert (len(result.entries), tuner.calls) == (1, 1)
    assert one.chooser.cache.keys() == other.chooser.cache.keys() == list(result.by_key())


def test_another_selector_may_tune():
    """A selector given in the options tunes and keeps, instead of those of the calls."""
    executor, other = timed(), timed()
    autotune(three(executor), X, tuning=AutotuneOptions(selector=other.chooser, progress=False))
    assert executor.chooser.cache.size() == 0
    assert other.chooser.cache.size() == 3


@pytest.mark.parametrize("scoped", [False, True])
def test_another_selector_tunes_for_what_the_program_asks(scoped):
    """A call that is tuned forward and backward stays one: for less, the program would not take the answer."""
    kernel, other = Times.fresh()(), selector_with(Tuner(warmup=1, iters=1))
    executor = executor_with(policy=AutotunePolicy(allow_autotune=False, validate_backward=True))
    with forward_autotune_only() if scoped else contextlib.nullcontext():
        result = autotune(executor, kernel, X, tuning=AutotuneOptions(selector=other, progress=False))
    assert [entry.record.objective for entry in result.entries] == ["forward" if scoped else "forward+backward"]


def test_keywords_reach_the_function():
    """`tuning` is the only one that does not."""
    seen = []

    def fn(x, *, selector, seconds):
        seen.append((selector, seconds))
        return x

    autotune(fn, X, selector="mine", seconds=3, tuning=QUIET)
    assert seen[0] == ("mine", 3)


def test_a_program_without_kernels_gives_an_empty_result():
    """Nothing found, nothing tuned."""
    result = autotune(jnp.sin, X, tuning=QUIET)
    assert tuple(result.entries) == ()
    assert "no times" in str(result)


def test_calls_of_other_choosers_are_named():
    """They are counted in the notes."""
    result = autotune(lambda x: Executor(Asked(3))(Times.fresh()(), x), X, tuning=QUIET)
    assert result.notes == ("calls of an executor with a chooser of its own: 1, not tuned",)


def test_a_call_whose_candidates_all_fail_keeps_every_reason():
    """The entry has the heuristic cfg and the record of the failure."""
    executor = timed(seconds={"one@v0": "fails"})
    with pytest.warns(UserWarning, match="left no candidate"):
        result = autotune(three(executor), X, tuning=QUIET)
    entry = next(e for e in result.entries if e.op_id_v == "one@v0")
    assert (entry.cfg, entry.source, entry.is_measured) == (2, "heuristics", False)
    assert [t.message for t in entry.record.failures] == ["no 2", "no 3", "no 5"]
    assert "candidates failed" in entry.note


# Lowered programs, files and calls.


def test_a_lowered_program_is_tuned_by_its_labels(monkeypatch):
    """As far as its calls were recorded; lowered, compiled and traced programs will do."""
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    for form in (lambda t: t, lambda t: t.lower(), lambda t: t.lower().compile()):
        executor = executor_with(Picking(), policy=AutotunePolicy(allow_autotune=False))
        kernel = Times.fresh()()
        traced = jax.jit(lambda x, call=executor, kernel=kernel: call(kernel, x)).trace(X)
        options = AutotuneOptions(selector=executor.chooser, progress=False)
        assert [e.cfg for e in autotune(form(traced), tuning=options).entries] == [5]


def test_a_labelled_call_that_nobody_recorded_is_named():
    """The notes say what to set."""
    executor = executor_with()
    lowered = jax.jit(lambda x: executor(Times.fresh()(), x)).lower(X)
    result = autotune_lowered(executor.chooser, lowered)
    assert "EJKERNEL_OPS_RECORD" in result.notes[0]
    assert "times@v0" in result.notes[0]


def test_calls_can_be_given():
    """Pairs of kernel and invocation; equal ones are tuned once."""
    kernel, tuner = Times.fresh()(), Picking()
    calls = [(kernel, Invocation("times", (x,), {})) for x in (X, X, X[:2])]
    result = autotune(calls, tuning=AutotuneOptions(selector=selector_with(tuner), progress=False))
    assert (len(result.entries), tuner.calls) == (2, 2)


@pytest.mark.parametrize("program", ["calls.json", [], pytest.param("lowered", id="lowered")])
def test_who_tunes_must_be_said_where_the_calls_do_not_know(program, tmp_path, monkeypatch):
    """Without a selector it is a ValueError that says how to give one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calls.json").touch()
    program = jax.jit(jnp.sin).lower(X) if program == "lowered" else program
    with pytest.raises(ValueError, match=r"AutotuneOptions\(selector"):
        autotune(program)


def test_arguments_are_for_functions():
    """A lowered program has its arguments already."""
    with pytest.raises(ValueError, match="only a function takes arguments"):
        autotune(jax.jit(jnp.sin).lower(X), X, tuning=AutotuneOptions(selector=selector_with()))


def test_what_is_no_call_is_named():
    """Anything but a pair of kernel and invocation is a TypeError, and so is what holds no pairs at all."""
    with pytest.raises(TypeError, match="no program"):
        autotune(3, tuning=AutotuneOptions(selector=selector_with()))
    with pytest.raises(TypeError, match="pairs"):
        autotune([Times.fresh()()], tuning=AutotuneOptions(selector=selector_with()))


LOWERED = jax.jit(jnp.sin).lower(X)
NOT_THAT = {
    "options of a function": (lambda: autotune(jnp.sin, X, tuning="x"), "tuning='x' is no AutotuneOptions"),
    "options of the registry": (lambda: autotune_recorded(selector_with(), tuning="x"), "is no AutotuneOptions"),
    "options of a program": (lambda: autotune_lowered(selector_with(), LOWERED, tuning=1), "is no AutotuneOptions"),
    "a program": (lambda: autotune_lowered(selector_with(), 5), "5 is no program"),
    "a store": (lambda: AutotuningResult("d", ()).save("path"), "'path' is no store"),
    "a chooser": (lambda: Executor(5), "5 chooses nothing"),
    "a kernel to explain": (lambda: explain(5, X), "5 is no kernel"),
    "a kernel to choose for": (lambda: executor_with().choose_config(5, X), "5 is no kernel"),
    "a kernel to check": (lambda: check(5, X), "5 is no kernel"),
    "an executor": (lambda: explain(Asked(), X, executor=5), "executor=5 is no Executor"),
    "a file": (lambda: autotune("missing.json"), "no file of recorded calls at missing.json"),
}


@pytest.mark.parametrize(("act", "words"), NOT_THAT.values(), ids=NOT_THAT)
def test_what_is_something_else_is_named(act, words):
    """In a sentence that says what to give, where it is given."""
    with pytest.raises(OpsError, match=words):
        act()


@pytest.mark.parametrize(
    "settings", [{"seconds": 0}, {"seconds": math.nan}, {"repetitions": 0}, {"seconds": "1"}, {"objective": "backward"}]
)
def test_options_that_mean_nothing_are_refused(settings):
    """A ValueError names them."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        AutotuneOptions(**settings)


# Budgets.


def test_a_budget_goes_to_the_calls_that_cost_most():
    """By what their shapes say; a call that runs ten times counts ten times."""
    executor = timed(seconds={"one@v0": 2.0, "two@v0": 1.0, "six@v0": 0.5})
    result = autotune(three(executor), X, tuning=AutotuneOptions(seconds=1000.0, progress=False))
    tuner = executor.chooser.tuner
    assert tuner.tuned == ["two@v0", "one@v0", "six@v0"]
    given = tuner.budgets
    assert given["two@v0"] == pytest.approx(1000 * 10 / 12, rel=0.1)
    # The earlier ones took nothing of what they were given.
    assert given["one@v0"] == pytest.approx(1000 / 2, rel=0.1)
    assert given["six@v0"] == pytest.approx(1000, rel=0.1)
    assert result.totals.heuristic_s == pytest.approx(12.5)
    assert result.totals.tuned_s == pytest.approx(6.25)


def test_without_a_budget_calls_are_tuned_without_a_limit(monkeypatch):
    """No call's worth is asked for then."""
    monkeypatch.setattr("ejkernel.ops.programs.batch.share_of", lambda call: pytest.fail("asked"))
    executor = timed()
    autotune(three(executor), X, tuning=QUIET)
    assert set(executor.chooser.tuner.budgets.values()) == {None}


def test_calls_that_a_budget_does_not_reach_are_named_and_left_out():
    """They have no entry, so that a later tuning is not in the way of a guess."""
    executor = timed()
    result = autotune(three(executor), X, tuning=AutotuneOptions(seconds=1e-6, progress=False))
    assert tuple(result.entries) == ()
    assert len(result.notes) == 3
    assert all("the budget of 1e-06 s is too short to tune any call" in note for note in result.notes)
    assert executor.chooser.cache.size() == 0


def test_a_call_that_a_budget_does_not_reach_is_named_once(monkeypatch):
    """Also where the program is looked through again, since other calls changed."""
    monkeypatch.setattr(
        "ejkernel.ops.programs.batch.allotted",
        lambda call, *rest: 9.0 if call.key.op_id == "one@v0" else None,
    )
    result = autotune(three(timed()), X, tuning=AutotuneOptions(seconds=1000.0, progress=False))
    assert ops(result) == ["one"]
    assert len(result.notes) == 2


@pytest.mark.parametrize(("seconds", "looks"), [(1e-6, 1), (1000.0, 2)])
def test_a_program_is_looked_through_again_only_while_there_is_time(monkeypatch, seconds, looks):
    """Tracing a large one takes seconds, and no call that it brings could be tuned."""
    seen, real = [], programs_autotune.find
    monkeypatch.setattr(programs_autotune, "find", lambda *args: (seen.append(1), real(*args))[1])
    monkeypatch.setattr("ejkernel.ops.programs.batch.allotted", lambda call, *rest: 9.0)
    result = autotune(three(timed()), X, tuning=AutotuneOptions(seconds=seconds, progress=False))
    assert sorted(ops(result)) == ["one", "six", "two"]
    assert len(seen) == looks


# Ctrl-C.


def test_ctrl_c_keeps_what_is_done(tmp_path):
    """What was tuned before is in the result, in memory and on disk; the rest is named; nothing is raised."""
    store = PersistentCache("p", path=tmp_path / "p.json")
    executor = timed(stop_at="six@v0", persistent=store)
    result = autotune(three(executor), X, tuning=QUIET)
    assert result.interrupted
    assert ops(result) == ["one", "two"]
    assert len(store.keys()) == executor.chooser.cache.size() == 2
    assert "six@v0" in result.notes[0]
    assert "interrupted" in str(result)
    executor.chooser.tuner.stop_at = None
    again = autotune(three(executor), X, tuning=QUIET)
    assert (again.interrupted, len(again.entries)) == (False, 3)
    assert executor.chooser.tuner.tuned == ["one@v0", "two@v0", "six@v0"]


class Stopping(Counting):
    """The user presses Ctrl-C while its last candidate is traced."""

    op_id = "stopping"
    armed = True

    def run(self, x, *, cfg):
        if self.armed and cfg == 5:
            signal.raise_signal(signal.SIGINT)
        return x * 2


def test_a_real_ctrl_c_in_the_middle_of_a_tuning_leaves_everything_usable(monkeypatch):
    """What came before it is kept, no lock is held, and the next autotune goes on."""
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=Tuner(iters=1)))

    def fn(x):
        return executor(Stopping(), executor(Level(), x))

    result = autotune(fn, X, tuning=QUIET)
    assert result.interrupted
    assert ops(result) == ["level"]
    monkeypatch.setattr(Stopping, "armed", False)
    again = autotune(fn, X, tuning=QUIET)
    assert not again.interrupted
    assert [(e.op_id_v, e.source) for e in again.entries] == [("level@v0", "memory"), ("stopping@v0", "autotune")]


# Progress.


class Terminal(io.StringIO):
    """A stream that people look at."""

    def isatty(self):
        return True


ENTRY = Entry("op@v0", "00", 3, Record(trials=(Trial(3, samples_s=(2e-3,)),), winner=0), "autotune")


def told(stream):
    """What a short campaign says on a stream."""
    progress = BatchProgress(on=True, stream=stream)
    progress.total = 2
    progress.tuning(key_of("op@v0"))
    progress.tuned(ENTRY)
    progress.skipped(key_of("other@v0"), "no time")
    progress.finished(AutotuningResult("cpu|x", (ENTRY,)))
    return stream.getvalue()


def test_a_log_has_one_line_a_call():
    """No control characters, no passing lines; then the totals."""
    lines = told(io.StringIO()).splitlines()
    assert len(lines) == 3
    assert lines[0] == "1 of 2: op@v0 00: 3: 2 ms (1 candidates)"
    assert lines[1] == "2 of 2: other@v0 00: not tuned: no time"
    assert lines[2].startswith("done after ")


def test_a_terminal_has_a_live_line():
    """What is being done now is overwritten by what comes of it."""
    text = told(Terminal())
    assert text.count("\n") == 3
    assert "\r\x1b[K1 of 2: tuning op@v0 00\r\x1b[K1 of 2: op@v0 00: 3" in text


def test_progress_goes_to_the_error_stream(capsys):
    """Where it is on, which it is by default; else there is silence."""
    autotune(three(timed()), X)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split(":")[0] for line in shown.err.splitlines()[:3]] == ["1 of 3", "2 of 3", "3 of 3"]
    assert "3 measured calls take 12 s with heuristics, 6 s tuned (2.00x)" in shown.err
    autotune(three(timed()), X, tuning=QUIET)
    assert capsys.readouterr() == ("", "")


def test_a_real_tuning_within_a_budget_measures_something():
    """The tuner of the package, on a real clock."""
    selector = ConfigSelectorChain(ConfigCache(), tuner=Tuner(iters=1))
    executor = Executor(selector)
    kernel = Level()
    result = autotune(lambda x: executor(kernel, x), X, tuning=AutotuneOptions(seconds=60, progress=False))
    (entry,) = result.entries
    assert entry.record.budget_s <= 60
    assert [t.status for t in entry.record.trials] == ["ok"] * 3


def test_nothing_is_measured_where_tuning_is_off(monkeypatch):
    """The environment turns tunings off; the entries say so."""
    monkeypatch.setenv("EJKERNEL_OPS_AUTOTUNE", "off")
    executor = timed()
    monkeypatch.setattr(executor.chooser.tuner, "tune", lambda job, **around: pytest.fail("measured"))
    result = autotune(three(executor), X, tuning=AutotuneOptions(seconds=60, progress=False))
    assert {e.source for e in result.entries} == {"heuristics"}
    assert all("EJKERNEL_OPS_AUTOTUNE" in e.note for e in result.entries)


def test_ctrl_c_while_the_budget_is_split_gives_what_is_known(monkeypatch):
    """What was known before is in the result, every other call is named once."""
    executor = timed()
    fn = three(executor)
    (first, *_) = autotune(fn, X, tuning=QUIET).by_key()
    executor.chooser.cache.clear()
    executor.chooser.cache.put(*first, 3)

    def interrupt(call):
        raise KeyboardInterrupt

    monkeypatch.setattr("ejkernel.ops.programs.batch.share_of", interrupt)
    result = autotune(fn, X, tuning=AutotuneOptions(seconds=60, progress=False))
    assert result.interrupted
    assert [(e.cfg, e.source) for e in result.entries] == [(3, "memory")]
    assert len(result.notes) == 2


# Only what was measured.


def test_a_tuning_that_had_no_time_has_no_winner_in_the_result():
    """Whatever its record says: the entry is a guess, keeps the record, and counts nowhere."""
    executor = timed(seconds={"one@v0": "late"})
    result = autotune(three(executor), X, tuning=QUIET)
    entry = next(e for e in result.entries if e.op_id_v == "one@v0")
    assert (entry.cfg, entry.source, entry.is_measured) == (2, "heuristics", False)
    assert (entry.record.winner, len(entry.record.trials)) == (None, 3)
    assert "before the heuristic cfg was timed" in entry.note
    assert result.totals.calls == 2
    assert result.totals.tuned_s == pytest.approx(0.5 * 11)
    assert executor.chooser.cache.size() == 2


def test_a_tuning_that_had_no_time_is_taken_up_by_the_next_process(tmp_path):
    """Nothing was stored for it, so that the next autotune measures it."""
    path = tmp_path / "p.json"
    late = timed(seconds={"one@v0": "late"}, persistent=PersistentCache("p", path=path))
    autotune(three(late), X, tuning=QUIET)
    other = timed(persistent=PersistentCache("p", path=path))
    result = autotune(three(other), X, tuning=QUIET)
    assert other.chooser.tuner.tuned == ["one@v0"]
    assert all(entry.is_measured for entry in result.entries)


def test_a_tuning_that_had_no_time_is_not_saved_and_has_no_time_in_the_table(tmp_path):
    """Its row has no time, no share and no gain, and a store does not get it."""
    result = autotune(three(timed(seconds={"one@v0": "late"})), X, tuning=QUIET)
    (row,) = [line for line in str(result).splitlines() if line.startswith("one@v0")]
    assert row.split()[3:7] == ["-", "1", "-", "-"]
    assert result.save(PersistentCache("p", path=tmp_path / "p.json")) == 2
