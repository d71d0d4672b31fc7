"""The program itself, before and after: what makes it faster stays, what does not is taken back, call by call."""

from __future__ import annotations

import importlib
import itertools
import math
import threading
import time
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Counting, Picking, Times, executor_with
from fakes_programs import X, three, timed

from ejkernel.ops import AutotuneOptions, AutotunePolicy, AutotuningResult, PersistentCache, Record, Trial, autotune
from ejkernel.ops.programs import confirm as module
from ejkernel.ops.programs.batch import BatchTuner, _surely_gained
from ejkernel.ops.programs.confirm import Change, Confirmation, Ratio, confirm
from ejkernel.ops.programs.find import find
from ejkernel.ops.timing.profiler import ProfilerUnavailable

programs_autotune = importlib.import_module("ejkernel.ops.programs.autotune")

CONFIRM = AutotuneOptions(confirm=True, progress=False)
# Every call is tuned from 2 to 5.
HELPS = {(2, 2): 10.0, (5, 2): 8.0, (2, 5): 8.0, (5, 5): 5.0}
# The second call is fast alone and slow in the program.
PLANTED = {(2, 2): 10.0, (5, 2): 8.0, (2, 5): 14.0, (5, 5): 12.0}
# The same, so slow that the test's own time does not matter.
LONG = {cfgs: 1000 * seconds for cfgs, seconds in PLANTED.items()}


class Table:
    """Seconds of a program by its calls' cfgs, which its results show; time passes as the table says."""

    def __init__(self, seconds, noise=(1.0,)):
        self.seconds = seconds
        self.noise = itertools.cycle(noise)
        self.seen = []
        self.passed = 0.0

    def __call__(self, run, calls):
        cfgs = tuple(int(value[0]) for value in run())
        if cfgs not in self.seen:
            self.seen.append(cfgs)
        self.passed += self.seconds[cfgs] * calls
        return self.seconds[cfgs] * next(self.noise)

    def now(self):
        return time.perf_counter() + self.passed


@pytest.fixture
def table(monkeypatch):
    """Has programs take what a table says."""

    def install(seconds, **settings):
        made = Table(seconds, **settings)
        monkeypatch.setattr(module, "_seconds", made)
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=made.now))
        return made

    return install


class One(Times):
    op_id = "one"


class Two(Times):
    op_id = "two"


def program(executor):
    """Two calls whose results show their cfgs."""
    one, two = One.fresh()(), Two.fresh()()

    def fn(x):
        return executor(one, x), executor(two, x)

    return fn


def changes_of(fn, *args, before=2, after=5, savings=(0.5, 0.1)):
    """The changes of a program's calls."""
    calls = find(fn, args or (X,), {}).calls
    return {call.key: Change(before, after, saving) for call, saving in zip(calls, savings, strict=True)}


def taken_back(found):
    return [key.op_id for key in found.taken_back]


# What stays and what does not.


def test_changes_that_help_together_stay(table):
    """One comparison is enough, and the gain is that of the program."""
    seen = table(HELPS).seen
    fn = program(executor_with())
    found = confirm(fn, (X,), {}, changes_of(fn))
    assert (found.before_s, found.after_s, found.gain) == (10.0, 5.0, (2.0, 2.0, 2.0))
    assert (found.taken_back, found.note, found.rounds) == ((), "", 9)
    assert set(seen) == {(2, 2), (5, 5)}


def test_the_change_that_makes_the_program_slower_is_taken_back_alone(table):
    """The other one stays, and the gain is that of what stays."""
    table(PLANTED)
    fn = program(executor_with())
    found = confirm(fn, (X,), {}, changes_of(fn))
    assert taken_back(found) == ["two@v0"]
    assert (found.before_s, found.after_s, found.gain[0]) == (10.0, 8.0, 1.25)


def test_a_change_is_tried_on_top_of_those_that_were_kept(table):
    """Two that help alone and not together: the one that promises more stays."""
    table({(2, 2): 10.0, (5, 2): 9.0, (2, 5): 9.0, (5, 5): 12.0})
    fn = program(executor_with())
    assert taken_back(confirm(fn, (X,), {}, changes_of(fn))) == ["two@v0"]
    assert taken_back(confirm(fn, (X,), {}, changes_of(fn, savings=(0.1, 0.5)))) == ["one@v0"]


@pytest.mark.parametrize("slow", [10.0, 12.0])
def test_what_does_not_make_the_program_faster_is_taken_back(table, slow):
    """Equally fast is not faster; the program is then what it was."""
    table(dict.fromkeys(HELPS, slow) | {(2, 2): 10.0})
    fn = program(executor_with())
    found = confirm(fn, (X,), {}, changes_of(fn))
    assert taken_back(found) == ["one@v0", "two@v0"]
    assert (found.before_s, found.after_s, found.gain) == (10.0, 10.0, (1.0, 1.0, 1.0))


def test_a_single_change_is_compared_once(table):
    """What was tried together is what would be tried alone."""
    seen = table({(2,): 10.0, (5,): 12.0})
    executor, kernel = executor_with(), One.fresh()()

    def fn(x):
        return (executor(kernel, x),)

    found = confirm(fn, (X,), {}, changes_of(fn, savings=(0.5,)))
    assert taken_back(found) == ["one@v0"]
    assert found.note == ""
    # A look at both, and nine rounds of both.
    assert seen.passed == pytest.approx(10 * (10 + 12))


def test_noise_is_named(table):
    """Where the interval is too wide to tell, the change is taken back and the note says what to do."""
    table({(2,): 1.0, (5,): 0.99}, noise=(1.0, 1.3, 0.8, 1.2, 1.1, 0.7, 0.9))
    executor, kernel = executor_with(), One.fresh()()

    def fn(x):
        return (executor(kernel, x),)

    found = confirm(fn, (X,), {}, changes_of(fn, savings=(0.5,)))
    assert taken_back(found) == ["one@v0"]
    assert "too noisy to tell" in found.note
    assert "idle machine" in str(found)


def test_noise_of_one_of_several_changes_is_named(table):
    """Also where they are tried one by one."""
    table(HELPS | {(5, 5): 10.1, (5, 2): 9.99, (2, 5): 9.99}, noise=(1.0, 1.3, 0.8, 1.2, 1.1, 0.7, 0.9))
    fn = program(executor_with())
    found = confirm(fn, (X,), {}, changes_of(fn))
    assert taken_back(found) == ["one@v0", "two@v0"]
    assert "too noisy to tell" in found.note


def test_a_small_gain_that_is_sure_stays(table):
    """One part in a thousand, in every round."""
    table({**HELPS, (5, 5): 9.99})
    fn = program(executor_with())
    assert confirm(fn, (X,), {}, changes_of(fn)).taken_back == ()


@pytest.mark.parametrize(
    ("middle", "low", "high", "improves", "noisy"),
    [
        (0.9, 0.8, 0.95, True, False),
        (0.999, 0.995, 1.004, True, False),
        (0.99, 0.9, 1.02, False, True),
        (1.0, 1.0, 1.0, False, False),
        (1.1, 1.05, 1.2, False, False),
    ],
)
def test_an_improvement_is_surely_not_slower_and_faster_in_the_middle(middle, low, high, improves, noisy):
    """An interval that reaches far above one says nothing."""
    ratio = Ratio(middle, low, high, (1.0, 1.0), 9)
    assert (ratio.is_improvement, ratio.is_noisy) == (improves, noisy)


def test_programs_run_in_turns(table, monkeypatch):
    """In changing order, so that drift and caches hit both alike."""
    order = []
    read = table(HELPS)

    def noting(run, calls):
        seconds = read(run, calls)
        order.append(seconds)
        return seconds

    monkeypatch.setattr(module, "_seconds", noting)
    fn = program(executor_with())
    confirm(fn, (X,), {}, changes_of(fn))
    rounds = order[2:]
    assert [rounds[i : i + 2] for i in range(0, 8, 2)] == [[10.0, 5.0], [5.0, 10.0]] * 2
    assert rounds.count(5.0) == rounds.count(10.0) == 9


# What cannot be run.


def test_shapes_are_a_sentence():
    """There is nothing to run on."""
    fn = program(executor_with())
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    found = confirm(fn, (shape,), {}, changes_of(fn))
    assert str(found) == "not confirmed: it needs arguments with values, and got shapes"
    assert found.taken_back == ()


def test_an_array_that_was_donated_is_a_sentence():
    """Its values are gone."""
    fn = program(executor_with())
    gone = jnp.arange(1.0, 5.0)
    gone.delete()
    found = confirm(fn, (gone,), {}, changes_of(fn))
    assert str(found) == "not confirmed: an argument was donated or deleted; pass arrays that can be read"


def test_a_program_that_fails_with_its_arguments_is_a_sentence():
    """What it says is quoted, and nothing is taken back."""
    executor, fails = executor_with(), program(executor_with())

    def check(value):
        raise ValueError(f"too large: {value.max()}")

    def fn(x):
        bad = jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), x)
        return [part + bad for part in fails(x)]

    found = confirm(fn, (X,), {}, changes_of(fails))
    assert executor.chooser.cache.size() == 0
    assert found.note.startswith("the program fails with these arguments: ")
    assert found.taken_back == ()


def test_a_program_that_cannot_be_traced_with_the_new_cfgs_is_a_sentence():
    """Then nothing is known about it."""

    class Picky(One.fresh()):
        def run(self, x, *, cfg):
            if cfg == 5:
                raise ValueError("not here")
            return x

    executor = executor_with()

    def fn(x):
        return executor(Picky(), x)

    found = confirm(fn, (X,), {}, changes_of(fn, savings=(1.0,)))
    assert found.note == "the program cannot be traced: ValueError: not here"


def test_a_deadline_that_passes_while_the_program_is_compiled_is_a_sentence(monkeypatch):
    """It is not waited for."""
    release = threading.Event()
    real = jax.stages.Lowered.compile

    def held(self, *args, **kwargs):
        release.wait()
        return real(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", held)
    fn = program(executor_with())
    found = confirm(fn, (X,), {}, changes_of(fn), time.perf_counter() + 6.0)
    release.set()
    assert found.note == "the program was still being compiled when the time was up"
    assert found.taken_back == ()


def test_a_deadline_that_has_passed_compiles_nothing(monkeypatch):
    """The time went to tuning."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: pytest.fail("compiled"))
    fn = program(executor_with())
    found = confirm(fn, (X,), {}, changes_of(fn), time.perf_counter())
    assert found.note == "the time would be up before the program was compiled"


def test_a_second_form_that_would_be_traced_beyond_the_deadline_is_not_begun_with(monkeypatch):
    """Tracing cannot be stopped half-way; the second form takes what the first one took."""
    traced = []

    def lowered(self, cfgs):
        traced.append(cfgs)
        time.sleep(0.3)
        return "step", None

    monkeypatch.setattr(module.ProgramStep, "_lowered", lowered)
    found = confirm(lambda x: x, (X,), {}, {"a": Change(1, 2, 0.5)}, time.perf_counter() + 0.5)
    assert found.note == "the time would be up before the program was compiled"
    assert traced == [{"a": 1}]


def test_a_deadline_that_passes_in_the_first_rounds_takes_nothing_back(table):
    """Nothing is known about the changes then."""
    table(LONG)
    fn = program(executor_with())
    found = confirm(fn, (X,), {}, changes_of(fn), time.perf_counter() + 100e3)
    assert found.note == "the time would be up before the program was run often enough"
    assert found.taken_back == ()
    assert math.isnan(found.before_s)


@pytest.mark.parametrize(
    ("gains", "back"),
    [
        pytest.param((1.5, 1.02), ["two@v0"], id="a-slight-one"),
        pytest.param((1.35, 1.349), ["two@v0"], id="just-not-enough"),
        pytest.param((math.inf, 2.0), [], id="the-cfg-before-failed"),
        pytest.param((1.0, 0.99), ["one@v0", "two@v0"], id="none-that-is-sure"),
    ],
)
def test_slight_gains_stay_only_where_the_program_shows_them_in_time(monkeypatch, gains, back):
    """What is 1% faster alone may be slower in the program; half as fast again is kept."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *args, **kwargs: pytest.fail("compiled"))
    fn = program(executor_with())
    changes = {key: replace(c, gain=gain) for (key, c), gain in zip(changes_of(fn).items(), gains, strict=True)}
    found = confirm(fn, (X,), {}, changes, time.perf_counter())
    assert taken_back(found) == back
    assert found.note == "the time would be up before the program was compiled"


SAMPLES = {"guess": [2.0] * 9, "kept": [1.01] * 9, "winner": [1.0] * 9, "failed": []}


@pytest.mark.parametrize(
    ("place", "gain", "expected"),
    [
        pytest.param(0, (2.0, 1.9, 2.1), 1.9, id="over-the-heuristic"),
        pytest.param(1, (2.0, 1.9, 2.1), 1.01, id="over-what-was-kept"),
        pytest.param(3, (2.0, 1.9, 2.1), 1.0, id="over-what-was-not-timed"),
    ],
)
def test_a_gain_is_over_the_cfg_that_would_be_brought_back(place, gain, expected):
    """That may be a stored one, which is no heuristic."""
    trials = tuple(Trial(cfg, samples_s=tuple(samples)) for cfg, samples in SAMPLES.items())
    record = Record(trials=trials, winner=2, heuristic=0, gain=gain)
    assert _surely_gained(record, place) == pytest.approx(expected)


def test_slight_gains_stay_where_the_program_cannot_be_run():
    """As without confirming: more time would change nothing."""
    fn = program(executor_with())
    changes = {key: replace(change, gain=1.01) for key, change in changes_of(fn).items()}
    assert confirm(fn, (jax.ShapeDtypeStruct((4,), np.float32),), {}, changes).taken_back == ()


def test_a_change_that_was_not_tried_in_time_is_taken_back(table):
    """All together did not help: what cannot be shown to be harmless does not stay."""
    seen = table(LONG)
    fn = program(executor_with())
    # Enough for all together, for the first alone, and for what it gains in the end.
    found = confirm(fn, (X,), {}, changes_of(fn), time.perf_counter() + 700e3)
    assert (5, 5) in seen.seen
    assert taken_back(found) == ["two@v0"]
    assert found.gain[0] == 1.25
    assert "the time would be up" in str(found)
    assert "taken back: two@v0" in str(found)


def test_a_deadline_without_a_kept_change_takes_all_back(table):
    """The program is as it was, and the note says why not all were tried."""
    table(LONG)
    fn = program(executor_with())
    found = confirm(fn, (X,), {}, changes_of(fn), time.perf_counter() + 230e3)
    assert taken_back(found) == ["one@v0", "two@v0"]
    assert found.note.startswith("not every change was tried: the time would be up")


@pytest.mark.parametrize("budget", [30e3, 100e3, 230e3, 300e3, 480e3, 700e3, 900e3])
def test_no_round_is_begun_that_would_end_too_late(table, budget):
    """Runs cannot be stopped half-way, and what stays is compared in the time that is left for it."""
    seen = table(LONG)
    fn = program(executor_with())
    found = confirm(fn, (X,), {}, changes_of(fn), time.perf_counter() + budget)
    assert 0 < seen.passed < budget
    assert math.isnan(found.before_s) == (budget < 230e3)


# The whole of autotune.


def test_a_slight_gain_without_time_to_confirm_it_is_none(monkeypatch):
    """The call has its earlier cfg, and the record says why and which one was faster alone."""
    real = module.confirm
    monkeypatch.setattr("ejkernel.ops.programs.batch.confirm", lambda *args: real(*args[:-1], time.perf_counter()))
    result = autotune(program(timed(gain=(1.02, 1.01, 1.03))), X, tuning=CONFIRM)
    assert taken_back(result.confirmation) == ["one@v0", "two@v0"]
    for entry in result.entries:
        assert entry.cfg == entry.record.cfg == 2
        assert entry.record.trials[entry.record.runner_up].cfg == 5
        assert entry.record.note.startswith("taken back: the program itself was not seen to be faster")


def test_a_planted_cfg_is_taken_back_in_memory_in_the_store_and_in_the_result(table, tmp_path):
    """Fast alone, slow in the program; the other call keeps what was tuned."""
    table(PLANTED)
    store = PersistentCache("p", path=tmp_path / "p.json")
    executor = timed(persistent=store)
    fn = program(executor)
    result = autotune(fn, X, tuning=CONFIRM)
    entries = {entry.op_id_v: entry for entry in result.entries}
    assert taken_back(result.confirmation) == ["two@v0"]
    assert {op: entry.cfg for op, entry in entries.items()} == {"one@v0": 5, "two@v0": 2}
    for key, entry in result.by_key().items():
        assert executor.chooser.cache.get(*key) == store.get(*key) == entry.cfg
    record = entries["two@v0"].record
    assert (record.cfg, record.gain, record.trials[record.runner_up].cfg) == (2, (1.0, 1.0, 1.0), 5)
    assert record.note.startswith("taken back: the program itself was not faster")
    (key,) = result.confirmation.taken_back
    assert store.record(*key).note == record.note
    assert record.note in record.table()
    # Of one second before; taken back, so one second after.
    assert (result.totals.heuristic_s, result.totals.tuned_s) == (2.0, 1.5)


def test_what_was_taken_back_stays_so_for_the_next_process(table, tmp_path):
    """It is known, and is not tuned again."""
    table(PLANTED)
    path = tmp_path / "p.json"
    autotune(program(timed(persistent=PersistentCache("p", path=path))), X, tuning=CONFIRM)
    other = timed(persistent=PersistentCache("p", path=path))
    result = autotune(program(other), X, tuning=CONFIRM)
    assert other.chooser.tuner.tuned == []
    assert {entry.op_id_v: entry.cfg for entry in result.entries} == {"one@v0": 5, "two@v0": 2}


def test_a_function_that_was_compiled_before_has_what_stays(table):
    """The kept change reaches it, the one that was taken back does not."""
    table(PLANTED)
    executor = timed(policy=AutotunePolicy(allow_autotune=False))
    step = jax.jit(program(executor))
    step(X)
    autotune(step, X, tuning=CONFIRM)
    assert [int(value[0]) for value in step(X)] == [5, 2]


def test_nothing_is_compiled_again_where_everything_was_taken_back(table):
    """The program has the cfgs that it had."""
    table(dict.fromkeys(HELPS, 12.0) | {(2, 2): 10.0})
    executor = timed(policy=AutotunePolicy(allow_autotune=False))
    kernel = One.fresh()()
    step = jax.jit(lambda x: (executor(kernel, x), executor(Two.fresh()(), x)))
    step(X)
    autotune(step, X, tuning=CONFIRM)
    seen = len(kernel.log)
    assert [int(value[0]) for value in step(X)] == [2, 2]
    assert len(kernel.log) == seen


def test_the_result_says_what_the_program_gained(table, capsys):
    """In its table and at the end of the progress."""
    table(HELPS)
    result = autotune(program(timed()), X, tuning=AutotuneOptions(confirm=True))
    line = "the program takes 10 s before, 5 s after (2.000x, 2.000 to 2.000, 9 rounds in turns)"
    assert str(result.confirmation) == line
    assert line in str(result)
    assert capsys.readouterr().err.splitlines()[-1] == line


def test_without_a_change_there_is_a_sentence(monkeypatch):
    """A second run finds every cfg in place, and runs nothing."""
    executor = timed()
    fn = three(executor)
    autotune(fn, X, tuning=AutotuneOptions(progress=False))
    monkeypatch.setattr(module, "_seconds", lambda run, calls: pytest.fail("ran"))
    result = autotune(fn, X, tuning=CONFIRM)
    assert str(result.confirmation) == "not confirmed: every call kept the cfg that it had"


def test_without_confirm_the_program_is_not_run(monkeypatch):
    """As ever: it is traced alone."""
    monkeypatch.setattr(module, "_seconds", lambda run, calls: pytest.fail("ran"))
    assert autotune(program(timed()), X, tuning=AutotuneOptions(progress=False)).confirmation is None


@pytest.mark.parametrize("argument", ["shape", "deleted"])
def test_what_cannot_be_run_keeps_what_was_tuned(argument):
    """The result has every entry, and one sentence more."""
    executor = timed()
    x = jnp.arange(1.0, 5.0)
    if argument == "deleted":
        x.delete()
    given = jax.ShapeDtypeStruct(X.shape, X.dtype) if argument == "shape" else x
    result = autotune(program(executor), given, tuning=CONFIRM)
    assert [entry.cfg for entry in result.entries] == [5, 5]
    assert executor.chooser.cache.size() == 2
    assert str(result.confirmation).startswith("not confirmed: ")


def test_a_donated_argument_is_still_there_afterwards():
    """The step's own donation is left out while it is run again and again."""
    executor, kernel = executor_with(Picking()), One.fresh()()
    step = jax.jit(lambda w, x: w + executor(kernel, x), donate_argnums=0)
    w = jnp.ones(4)
    result = autotune(step, w, X, tuning=CONFIRM)
    assert result.confirmation.rounds >= 9
    assert not w.is_deleted()
    np.testing.assert_array_equal(w, np.ones(4))


def test_a_real_program_is_run_and_timed():
    """No table: times are positive, and what stays agrees with the verdict."""
    executor, kernel = executor_with(Picking()), One.fresh()()
    result = autotune(lambda x: executor(kernel, x), jnp.ones(64), tuning=CONFIRM)
    found = result.confirmation
    assert min(found.before_s, found.after_s, *found.gain) > 0
    assert [entry.cfg for entry in result.entries] == [2 if found.taken_back else 5]


def test_static_arguments_and_keywords_reach_the_program(table):
    """As they reach it outside."""
    table(HELPS)
    inner = program(timed())

    def fn(x, *, times, name):
        assert (times, name) == (1, "a")
        return inner(x * times)

    step = jax.jit(fn, static_argnames=("times", "name"))
    assert autotune(step, X, times=1, name="a", tuning=CONFIRM).confirmation.gain[0] == 2.0


def test_nothing_is_tuned_while_the_program_is_confirmed(table, monkeypatch):
    """A call for which the budget had no time has its heuristic cfg there, and is not tuned after all."""
    table({(2, 2): 10.0, (5, 2): 8.0})
    monkeypatch.setattr(
        "ejkernel.ops.programs.batch.allotted", lambda call, *rest: 9.0 if call.key.op_id == "one@v0" else None
    )
    executor = timed()
    result = autotune(program(executor), X, tuning=AutotuneOptions(seconds=1e6, confirm=True, progress=False))
    assert executor.chooser.tuner.tuned == ["one@v0"]
    assert result.confirmation.gain[0] == 1.25


def test_confirming_leaves_no_program_behind(table):
    """Inside `with result:` functions choose for themselves what the result does not name."""
    table({(2, 2): 10.0, (5, 2): 8.0})
    executor = executor_with(Picking())
    one, two = One.fresh()(), Two.fresh()()
    second = jax.jit(lambda x: executor(two, x))

    def fn(x):
        return executor(one, x), second(x)

    found = find(fn, (X,), {}).calls
    key = next(call.key for call in found if call.key.op_id == "one@v0")
    confirm(fn, (X,), {}, {key: Change(2, 5, 1.0)})
    assert executor.chooser.cache.size() == 0
    with AutotuningResult(key.device, ()).as_overlay():
        assert int(second(X)[0]) == 5


def test_ctrl_c_while_the_program_runs_keeps_what_was_tuned(monkeypatch):
    """Nothing is taken back, and nothing is raised."""

    def interrupt(run, calls):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_seconds", interrupt)
    executor = timed()
    result = autotune(program(executor), X, tuning=CONFIRM)
    assert result.interrupted
    assert [entry.cfg for entry in result.entries] == [5, 5]
    assert executor.chooser.cache.size() == 2
    assert str(result.confirmation) == "not confirmed: interrupted"


def test_an_interrupted_tuning_is_not_confirmed(monkeypatch):
    """Ctrl-C asks for an end."""
    monkeypatch.setattr(module, "_seconds", lambda run, calls: pytest.fail("ran"))
    result = autotune(program(timed(stop_at="two@v0")), X, tuning=CONFIRM)
    assert result.interrupted
    assert result.confirmation is None


def test_a_program_of_several_processes_is_not_confirmed(monkeypatch):
    """Each would find other noise, and they must have equal cfgs."""
    monkeypatch.setattr("ejkernel.ops.programs.batch._jax", types.SimpleNamespace(distributed=lambda: "two"))
    monkeypatch.setattr(module, "_seconds", lambda run, calls: pytest.fail("ran"))
    result = autotune(program(timed()), X, tuning=CONFIRM)
    assert [entry.cfg for entry in result.entries] == [5, 5]
    assert "confirm in one process" in str(result.confirmation)


class Failing:
    """A tuner for which the heuristic cfg of one operation is wrong."""

    def __init__(self, op):
        self.op = op

    def tune(self, job, **around):
        wrong = job.about["key"]["op_id"] == self.op
        cfgs = list(dict.fromkeys(job.candidates))
        first = Trial(cfgs[0], "wrong", "off") if wrong else Trial(cfgs[0], samples_s=(1.0,))
        trials = (first, *(Trial(cfg, samples_s=(0.5,)) for cfg in cfgs[1:]))
        return Record(**dict(job.about), trials=trials, winner=len(cfgs) - 1, heuristic=0)


def test_a_cfg_that_failed_is_never_brought_back(table, monkeypatch):
    """Its call keeps what was tuned, on both sides of the comparison; the other call is tried."""
    table({(2, 5): 10.0, (5, 5): 8.0})
    executor = timed()
    monkeypatch.setattr(executor.chooser.tuner, "tune", Failing("two@v0").tune)
    result = autotune(program(executor), X, tuning=CONFIRM)
    assert {entry.op_id_v: entry.cfg for entry in result.entries} == {"one@v0": 5, "two@v0": 5}
    assert result.confirmation.gain[0] == 1.25


def test_where_no_earlier_cfg_works_nothing_is_run(monkeypatch):
    """The program with them would be another one."""
    executor, kernel = timed(), Two.fresh()()
    monkeypatch.setattr(executor.chooser.tuner, "tune", Failing("two@v0").tune)
    monkeypatch.setattr(module, "_seconds", lambda run, calls: pytest.fail("ran"))
    result = autotune(lambda x: executor(kernel, x), X, tuning=CONFIRM)
    assert [entry.cfg for entry in result.entries] == [5]
    assert "no call has an earlier cfg that works" in str(result.confirmation)


def test_calls_that_a_tuned_cfg_brings_are_confirmed_with_it(table):
    """They are part of the program after, and not of the one before."""

    class Level(Counting):
        op_id = "level"

        def run(self, x, *, cfg):
            return x * cfg

    class Deep(Counting):
        op_id = "deep"
        candidates = (2, 3)

        def run(self, x, *, cfg):
            return x * 2 if cfg == 2 else executor(Level(), x)

    seen = table({(2,): 10.0, (5,): 6.0, (3,): 7.0}).seen
    executor = timed()
    result = autotune(lambda x: (executor(Deep(), x),), X, tuning=CONFIRM)
    assert set(seen) == {(2,), (5,)}
    assert {entry.op_id_v: entry.cfg for entry in result.entries} == {"deep@v0": 3, "level@v0": 5}
    assert result.confirmation.taken_back == ()


def test_two_selectors_take_back_alike(table):
    """Both kept what one tuned, and both have the earlier cfg again."""
    table({(2, 2): 10.0, (5, 5): 12.0})
    kernel = One.fresh()()
    one, other = timed(), timed()
    result = autotune(lambda x: (one(kernel, x), other(kernel, x)), X, tuning=CONFIRM)
    (key,) = result.by_key()
    assert one.chooser.cache.get(*key) == other.chooser.cache.get(*key) == 2


# Files.


def test_a_file_keeps_the_confirmation(table):
    """Times, gain, rounds, what was taken back, and the note."""
    table(PLANTED)
    result = autotune(program(timed()), X, tuning=CONFIRM)
    again = AutotuningResult.loads(result.dumps())
    assert again.confirmation == result.confirmation
    assert again.confirmation.taken_back == result.confirmation.taken_back
    assert str(again) == str(result)


def test_a_file_keeps_a_confirmation_without_times():
    """Where the program was not run there are none; the text is JSON all the same."""
    result = AutotuningResult("cpu|x", (), confirmation=Confirmation(note="no arguments"))
    text = result.dumps()
    assert "NaN" not in text
    assert str(AutotuningResult.loads(text).confirmation) == "not confirmed: no arguments"


def test_a_file_without_a_confirmation_loads():
    """As those of earlier releases are."""
    text = AutotuningResult("cpu|x", ()).dumps()
    assert "confirmation" not in text
    assert AutotuningResult.loads(text).confirmation is None


@pytest.mark.parametrize("bad", ['"text"', '{"note": ""}', '{"note": "", "taken_back": [["a"]]}'])
def test_a_damaged_confirmation_is_named(bad):
    """A ValueError, as for the rest of the file."""
    text = AutotuningResult("cpu|x", ()).dumps().replace('"entries"', f'"confirmation": {bad}, "entries"')
    with pytest.raises(ValueError, match="the result is damaged"):
        AutotuningResult.loads(text)


# Without being asked.


@pytest.mark.parametrize(
    ("platform", "leaf", "expected"),
    [
        ("gpu", jnp.ones(2), True),
        ("tpu", np.ones(2), True),
        ("gpu", jax.ShapeDtypeStruct((2,), np.float32), False),
        ("cpu", jnp.ones(2), False),
    ],
)
def test_a_program_is_confirmed_unasked_on_accelerators_where_its_arguments_have_values(
    monkeypatch, platform, leaf, expected
):
    """On a CPU only where that is asked for."""
    monkeypatch.setattr(programs_autotune, "default_device", lambda: types.SimpleNamespace(platform=platform))
    assert programs_autotune._would_be_confirmed((leaf, "static"), {"n": 3}) is expected


def test_a_deleted_argument_is_not_confirmed_unasked(monkeypatch):
    """It was donated, say."""
    monkeypatch.setattr(programs_autotune, "default_device", lambda: types.SimpleNamespace(platform="gpu"))
    x = jnp.ones(2)
    x.delete()
    assert not programs_autotune._would_be_confirmed((x,), {})


@pytest.mark.parametrize(
    ("confirms", "has_change", "kept"),
    [
        pytest.param(True, True, 12.0, id="a-change-to-confirm"),
        pytest.param(True, False, 1.0, id="nothing-to-confirm-yet"),
        pytest.param(False, True, 0.0, id="not-confirmed"),
    ],
)
def test_an_eighth_of_a_budget_is_kept_for_confirming_what_has_changed(confirms, has_change, kept):
    """Tunings are told of what is left without it; where there is nothing to confirm, a second stays for the end."""
    options = AutotuneOptions(seconds=100.0)
    batch = BatchTuner("cpu", options, deadline=time.perf_counter() + 100.0, confirms=confirms)
    if has_change:
        batch.changed["key"] = ("call", "cfg")
    # Time goes by meanwhile, however much on a busy machine, and never comes back.
    assert 100.0 - kept - 5.0 < batch._left() <= 100.0 - kept


# By the device's own clock.


class DeviceClock:
    """A profiler for programs whose names tell nothing: the second form of a pair takes as long as it is told."""

    def __init__(self, *ratios):
        self.ratios = itertools.cycle(ratios)
        self.rounds_asked = []

    def rounds(self, schedule):
        self.rounds_asked.append([[run.number for run in runs] for runs in schedule])
        return [{0: next(self.ratios), 1: 1.0} for _ in schedule]


def stepped(clock):
    """A step of one program, timed by a clock."""
    step = module.ProgramStep(lambda x: x + 1, (X,), {}, math.inf)
    step._clock = clock
    return step, *step.compiled([{}, {}])


def test_a_device_s_clock_times_the_program_in_changing_order():
    """Launches and waits, which the host's clock sees, are left out."""
    clock = DeviceClock(0.9)
    step, one, other = stepped(clock)
    found = step.compare(one, other)

    assert (found.middle, found.seconds) == (0.9, (0.9, 1.0))
    assert clock.rounds_asked[0][:2] == [[1, 0], [0, 1]]
    assert one.name != other.name


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-4, 9), (0.034, 9), (0.1, 3), (5.0, 2)])
def test_a_trace_holds_all_rounds_that_are_needed_unless_they_take_long(monkeypatch, seconds, rounds):
    """A trace takes some tenths of a second by itself: with two rounds in each there was no verdict in time."""
    clock = DeviceClock(0.9)
    step, one, other = stepped(clock)
    monkeypatch.setattr(module, "_seconds", lambda run, calls: seconds)
    step.compare(one, other)
    assert len(clock.rounds_asked[0]) == rounds


def test_the_seconds_of_a_device_s_first_trace_say_nothing_about_the_next(monkeypatch):
    """It starts the profiler; those behind it are known by what the one before took."""
    passed = []

    class Slow(DeviceClock):
        def rounds(self, schedule):
            passed.append(0.5 if passed else 5.0)
            return super().rounds(schedule)

    step, one, other = stepped(Slow(0.9, 1.1))
    monkeypatch.setattr(module, "_seconds", lambda run, calls: 0.01)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: sum(passed)))
    # An interval that stays wide: all rounds that there is time for.
    step._deadline = 7.3
    assert step.compare(one, other).rounds == 9 * 5
    assert sum(passed) == 7.0


def test_where_the_device_s_clock_cannot_be_had_the_host_s_serves(monkeypatch):
    """From then on, and without a word."""

    class Gone:
        def rounds(self, schedule):
            raise ProfilerUnavailable("in use")

    step, one, other = stepped(Gone())
    monkeypatch.setattr(module, "_seconds", lambda run, calls: 0.8 if run is one else 1.0)
    assert step.compare(one, other).middle == pytest.approx(0.8)
    assert step._clock is None


def test_a_program_that_fails_under_the_device_s_clock_is_not_confirmed():
    """The reason is its own."""
    step, one, other = stepped(DeviceClock(RuntimeError("no memory")))
    with pytest.raises(module.NotConfirmedError, match="no memory"):
        step.compare(one, other)
