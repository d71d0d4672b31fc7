"""Searching on a device: batches, seeds, deadlines, failures and what the record says."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from fakes import Ran, TableClock

from ejkernel.ops import Record, Tuner
from ejkernel.ops.core.cfg import distinct, places
from ejkernel.ops.core.errors import SettingError
from ejkernel.ops.tuning.candidates import CandidateSet
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.journal.file import Journal
from ejkernel.ops.tuning.search import driver as hunting
from ejkernel.ops.tuning.search.driver import FINALISTS, SearchDriver, SearchWarning
from ejkernel.ops.tuning.search.effort import EFFORTS

X = jnp.arange(4.0)


@dataclass(frozen=True)
class Tiles:
    """A cfg with three fields."""

    m: int
    n: int
    mode: str


CFGS = [Tiles(*t) for t in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16), "abcde")]


def seconds_of(cfg):
    return 1 + abs(math.log2(cfg.m) - 3) + 0.5 * abs(math.log2(cfg.n) - 1) + 0.7 * (cfg.mode != "c")


BEST = min(CFGS, key=seconds_of)


class Space:
    """A job over a made-up space, by a clock that reads a table; what ran is in the log."""

    def __init__(self, cfgs=CFGS, seconds=seconds_of, **job):
        self.ran = Ran()
        self.clock = TableClock(self.ran, {cfg: seconds(cfg) for cfg in cfgs})
        self.traced = []
        self.job = TuningJob(self.make_fn, (X,), {}, cfgs, heuristic_first=True, **job)

    def make_fn(self, cfg):
        self.traced.append(cfg)
        return self.ran.make_fn(cfg)


@pytest.fixture
def small(monkeypatch):
    """An effort of forty evaluations, so that a hunt takes a second."""
    monkeypatch.setitem(EFFORTS, "quick", replace(EFFORTS["quick"], evaluations=40, seconds=300.0))


def tune(space, **settings):
    return Tuner(0, 1, clock=space.clock, effort="quick", **settings).tune(space.job)


@pytest.mark.usefixtures("small")
def test_a_large_space_is_searched_and_not_traced_whole():
    """Of 125 candidates no more are traced than the effort allows, and the fastest is found."""
    space = Space()
    record = tune(space)

    assert record.cfg == BEST
    assert len(record.trials) == len(set(space.traced)) == len(space.traced) <= 40
    assert (record.space, record.heuristic, record.trials[0].cfg) == (125, 0, CFGS[0])
    assert record.gain[0] == pytest.approx(seconds_of(CFGS[0]) / seconds_of(BEST))
    assert record.budget_s == 300.0


@pytest.mark.one_leg
@pytest.mark.usefixtures("small")
def test_the_same_seed_searches_the_same_candidates():
    """With the same times the path is the same; another seed takes another one."""
    paths = [[t.cfg for t in tune(Space(), seed=seed).trials] for seed in (1, 1, 2)]

    assert paths[0] == paths[1] != paths[2]


@pytest.mark.one_leg
@pytest.mark.usefixtures("small")
def test_few_are_raced_at_the_end():
    """Those that are not among the best few keep the samples of their first look."""
    record = tune(Space())
    looked_at = [t for t in record.trials if t.dropped_round == len(t.samples_s)]

    assert all(t.samples_s for t in record.trials)
    assert len(record.trials) - FINALISTS - 1 <= len(looked_at) < len(record.trials)
    assert record.trials[record.winner].dropped_round is None


@pytest.mark.one_leg
@pytest.mark.usefixtures("small")
def test_seeds_are_measured_and_not_trusted():
    """A seed outside of the candidates is measured first and can win; a slow one changes nothing."""
    good, bad = Tiles(8, 3, "c"), Tiles(1, 16, "a")
    space = Space([*CFGS, good], lambda cfg: 0.5 if cfg == good else seconds_of(cfg))
    space.job = replace(space.job, candidates=CFGS, seeds=[bad, good])
    record = tune(space)

    assert record.cfg == good
    assert [t.cfg for t in record.trials[:3]] == [CFGS[0], bad, good]


@pytest.mark.one_leg
@pytest.mark.usefixtures("small")
def test_candidates_that_fail_are_data():
    """What cannot be traced is in the record with its reason, counts as an evaluation, and does not win."""
    space = Space()
    make_fn = space.make_fn

    def failing(cfg):
        if cfg.m == 8:
            raise ValueError("m is too large")
        return make_fn(cfg)

    space.job = replace(space.job, make_fn=failing)
    record = tune(space)

    assert record.cfg.m != 8
    assert {t.status for t in record.trials if t.cfg.m == 8} == {"compile"}
    assert len(record.trials) == 40


@pytest.mark.one_leg
@pytest.mark.usefixtures("small")
def test_a_space_where_everything_fails_is_an_error():
    """As for a race: a RuntimeError with each reason."""
    space = Space()
    space.job = replace(space.job, make_fn=lambda cfg: 1 / 0)

    with pytest.raises(RuntimeError, match="division by zero"):
        tune(space)


@pytest.mark.usefixtures("small")
def test_equal_programs_are_measured_once():
    """A field that changes nothing costs no measurement: the candidate has its twin's times."""
    compiled = {}

    def make_fn(cfg):
        return compiled.setdefault((cfg.m, cfg.n), lambda x: x * 2 + 0 * (cfg.m * 100 + cfg.n))

    class Clock:
        name = "constant"
        timed = 0

        def time(self, call, leaves, calls):
            call(*leaves)
            self.timed += 1
            return 1.0

    clock = Clock()
    record = Tuner(0, 1, clock=clock, effort="quick").tune(TuningJob(make_fn, (X,), {}, CFGS, heuristic_first=True))

    assert record.cfg == CFGS[0]
    assert any("the same program" in t.message for t in record.trials)
    assert {t.status for t in record.trials} == {"ok"}
    assert clock.timed < 3 * 25


@pytest.mark.one_leg
def test_a_deadline_holds():
    """The search stops in time, and the best so far wins."""
    space = Space()
    tuner = Tuner(0, 1, clock=space.clock, seconds=1.0, effort="full", strategy=Everything())
    start = time.perf_counter()
    record = tuner.tune(space.job)

    # One batch may be under way, on a busy machine.
    assert time.perf_counter() - start < 600
    assert record.budget_s == 1.0
    assert record.cfg is not None
    assert seconds_of(record.cfg) == min(seconds_of(t.cfg) for t in record.trials if t.samples_s)


@pytest.mark.one_leg
@pytest.mark.parametrize(("deadline", "raced"), [(math.inf, [7, 0, 5]), (-math.inf, [7])], ids=["in time", "late"])
def test_the_best_so_far_has_the_first_turn_of_the_race(deadline, raced):
    """And the only one where no time is left: then it wins by what is known of it."""
    candidates = CandidateSet()
    for number in candidates.enter(list(range(10))):
        for state in ("traced", "compiled", "checked", "timed") if number in (0, 5, 7) else ("runtime",):
            candidates.advance(number, state, **({"program": object()} if state == "compiled" else {}))
    hunt = SearchDriver(CFGS, SimpleNamespace(candidates=candidates), deadline=deadline)
    hunt.known = {10: 3.0, 11: math.inf, 12: 2.0, 13: 1.0, 14: 1.5}
    # The fourteenth was dropped by the check after all.
    hunt.numbers = {10: 0, 11: 1, 12: 5, 13: 7, 14: 9}

    assert hunt.finalists() == raced


class Everything:
    """A strategy of the user's own: from the first to the last."""

    def propose(self, space, known, count, rng):
        return [i for i in range(len(space)) if i not in known][:count]


def test_a_strategy_of_the_users_own_is_asked():
    """It decides what is measured, from 33 candidates on, also where the effort would cover them all."""
    space = Space(CFGS[:40])
    record = Tuner(0, 1, clock=space.clock, strategy=Everything()).tune(space.job)

    assert record.space == 40
    assert [t.cfg for t in record.trials] == CFGS[:40]


@pytest.mark.parametrize("strategy", [object(), Everything, "random"])
def test_what_is_no_strategy_is_refused(strategy):
    """When the tuner is made, with what a strategy must have."""
    with pytest.raises(SettingError, match="propose"):
        Tuner(strategy=strategy)


def test_an_unknown_effort_is_refused_when_the_tuner_is_made():
    """A ValueError with the allowed values."""
    with pytest.raises(ValueError, match=r"'quick', 'default', 'full', 'exhaustive'"):
        Tuner(effort="much")


def test_a_space_that_the_effort_covers_is_raced_whole():
    """Up to half of its evaluations there is nothing to search for, and no limit of time."""
    space = Space(CFGS[:60])
    record = Tuner(0, 1, clock=space.clock).tune(space.job)

    assert (record.space, record.budget_s, len(record.trials)) == (None, None, 60)


@pytest.mark.one_leg
@pytest.mark.usefixtures("small")
def test_configs_without_fields_are_sampled_at_random_and_that_is_said_once(monkeypatch):
    """A warning names the type and what to do; the second search of that type is silent."""
    monkeypatch.setattr(hunting, "_said", set())
    cfgs = [f"variant {i}" for i in range(60)]

    with pytest.warns(SearchWarning, match="str have no fields.*dataclass"):
        record = tune(Space(cfgs, lambda cfg: 1 + int(cfg.split()[1])))
    again = tune(Space(cfgs, lambda cfg: 1 + int(cfg.split()[1])))

    assert record.trials[0].cfg == record.cfg == "variant 0"
    assert len(record.trials) == 40
    assert [t.cfg for t in again.trials] == [t.cfg for t in record.trials]


@pytest.mark.one_leg
@pytest.mark.usefixtures("small")
def test_the_device_is_free_while_a_batch_compiles():
    """The turn is taken for each batch and for the race, and is not held in between."""
    held, traced_while_held = [], []

    @contextlib.contextmanager
    def turn(wait):
        held.append(True)
        yield
        held.append(False)

    space = Space()
    make_fn = space.make_fn

    def watched(cfg):
        traced_while_held.append(bool(held) and held[-1])
        return make_fn(cfg)

    space.job = replace(space.job, make_fn=watched)
    Tuner(0, 1, clock=space.clock, effort="quick").tune(space.job, device_lock=turn)

    assert len(held) >= 6
    assert not any(traced_while_held)


ABOUT = {"key": {"device": "cpu|test", "op_id": "tiles@v1", "call_key": "00"}}


@pytest.mark.one_leg
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("doing", ["compile", "race"])
def test_a_killed_search_goes_on(tmp_path, monkeypatch, doing):
    """What earlier batches timed is known, so that less is measured; the finalists are measured again."""
    first, second = (Space(journal=tmp_path, about=ABOUT) for _ in range(2))
    measured = killed_in_the_third_batch(monkeypatch, first, doing)

    record = tune(second)

    assert record.cfg == BEST
    assert all(trial.status == "ok" and trial.samples_s for trial in record.trials)
    assert len(measured) >= 17
    assert len(measured & set(second.ran.log)) < len(measured)


@pytest.mark.one_leg
@pytest.mark.usefixtures("small")
def test_the_best_of_a_killed_search_are_measured_again(tmp_path, monkeypatch):
    """Known from a journal alone they have no program: they are compiled and raced, and few others are."""
    # The slowest first: the best are in no batch that the second search begins with.
    cfgs = sorted(CFGS[:40], key=seconds_of, reverse=True)
    first, second = (Space(cfgs, journal=tmp_path, about=ABOUT) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(SearchDriver, "finalists", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tune(first, strategy=Everything())
    record = tune(second, strategy=Everything())

    assert seconds_of(record.cfg) == seconds_of(cfgs[-1])
    assert {trial.status for trial in record.trials} == {"ok"}
    assert all(trial.samples_s for trial in record.trials)
    assert len(set(second.ran.log)) <= 16 + 1 + FINALISTS


@pytest.mark.one_leg
@pytest.mark.usefixtures("small")
def test_times_of_another_day_are_taken_by_what_both_have_timed(tmp_path, monkeypatch):
    """The first candidate always runs: where it takes twice as long as it took, the others are thought to."""
    first = Space(journal=tmp_path, about=ABOUT)
    second = Space(seconds=lambda cfg: 2 * seconds_of(cfg), journal=tmp_path, about=ABOUT)
    killed_in_the_third_batch(monkeypatch, first, "race")
    drivers = []
    made = SearchDriver._like_now
    monkeypatch.setattr(SearchDriver, "_like_now", lambda self, known: drivers.append(made(self, known)) or drivers[0])

    record = tune(second)

    assert record.cfg == BEST
    assert all(t.seconds == pytest.approx(2 * seconds_of(t.cfg)) for t in record.trials)
    [known] = drivers
    assert len(known) >= 17
    assert all(seconds == pytest.approx(2 * seconds_of(CFGS[i])) for i, seconds in known.items())


def killed_in_the_third_batch(monkeypatch, space, doing):
    """A search whose journal ends as if its process had died; says what had been measured."""
    real, found = Journal.trying, []

    def trying(journal, cfg, what, program=""):
        real(journal, cfg, what, program)
        if what == doing and len(space.traced) > 32 and not found:
            found.append(set(space.ran.log))
            journal._close()

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "trying", trying)
        tune(space)
    return found[0]


@pytest.mark.one_leg
@pytest.mark.usefixtures("small")
def test_an_answer_that_another_process_found_meanwhile_ends_the_search():
    """It is asked for at each turn; what was measured until then is in the record."""
    answers = iter([None, (Tiles(7, 7, "x"),)])
    space = Space()
    tuner = Tuner(0, 1, clock=space.clock, effort="quick")
    record = tuner.tune(space.job, answered_elsewhere=lambda: next(answers))

    assert (record.stop, record.cfg) == ("settled", Tiles(7, 7, "x"))
    assert 1 < len(record.trials) < 40


def test_a_record_of_a_search_comes_back_equal():
    """With the size of its space; a record from before searches is read as well."""
    record = Record(space=125)

    assert Record.loads(record.dumps()) == record
    assert Record.loads(record.dumps().replace(', "space": 125', "")).space is None


@pytest.mark.one_leg
def test_twenty_thousand_candidates_are_told_apart_quickly():
    """By their printed form first: comparing all with all would take minutes."""
    cfgs = [Tiles(m, n, mode) for m in range(100) for n in range(50) for mode in "abcd"]
    start = time.process_time()

    assert distinct([*cfgs, *cfgs]) == cfgs
    assert places(cfgs, [cfgs[7], Tiles(-1, 0, "a"), cfgs[3], cfgs[7]]) == [7, 3]
    assert time.process_time() - start < 20
