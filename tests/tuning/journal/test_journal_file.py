"""What is on disk before a candidate runs, what a later tuning takes over from it, and what it never runs again.

Covers `tuning/journal/observer.py`, `tuning/journal/replay.py` and `tuning/journal/resume.py`.
"""

from __future__ import annotations

import contextlib
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import Ran, child

from ejkernel.ops import Kernel, Record, Trial, Tuner, forget_crashes
from ejkernel.ops.core.errors import BadNameError
from ejkernel.ops.settings import journal_folder
from ejkernel.ops.timing.compile_pool import CompilePool
from ejkernel.ops.timing.inputs import flatten_call
from ejkernel.ops.timing.program import Staged, stage
from ejkernel.ops.tuning.job import TuningJob
from ejkernel.ops.tuning.journal import file as journals
from ejkernel.ops.tuning.journal.file import Journal, JournalWarning, cfg_id, journal_for, path_for, read
from ejkernel.ops.tuning.journal.replay import JournalContent
from ejkernel.ops.tuning.journal.resume import journalled

X = jnp.arange(1.0, 9.0)
ABOUT = {"key": {"device": "cpu|test", "op_id": "double@v1", "call_key": "00"}, "environment": {"jax": "1"}}


def job_of(make_fn, cfgs, folder, **settings):
    """A job with a journal, as the selector makes it."""
    return TuningJob(make_fn, (X,), {}, cfgs, heuristic_first=True, about=ABOUT, journal=folder, **settings)


def path_of(folder):
    return path_for(folder, ABOUT["key"], "forward", ABOUT["environment"])


def written(folder, *lines, cut=b"", slot=(None, "check")):
    """A journal that another process left behind."""
    path = path_of(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(journals._slot_line(*slot) + b"".join(map(journals._line, lines)) + cut)


def killed(folder, cfg, doing="check", times=1):
    """The journal of a process that died while this cfg was at work, or of several."""
    begins = {"begin": "", "fresh": False, "candidates": []}
    if doing == "compile":
        written(folder, *[begins, {"trying": cfg_id(cfg), "doing": doing}] * times)
    else:
        written(folder, begins, {"suspects": {cfg_id(cfg): [doing] * (times - 1)}}, slot=(cfg_id(cfg), doing))


def outcome(record):
    return {trial.cfg: trial.status for trial in record.trials}


def test_a_version_cannot_lead_out_of_the_folder(tmp_path):
    """Whatever the version is called, its journal is a file in the folder, and one of its own."""
    paths = {
        path_for(tmp_path, {**ABOUT["key"], "op_id": f"double@v{v}"}, "forward", {}) for v in ("../../x", "..|..|x")
    }
    assert {path.parent for path in paths} == {tmp_path}
    assert len({path.resolve() for path in paths}) == 2
    assert all(path.resolve().parent == tmp_path for path in paths)


# Lines.


def test_a_candidate_is_on_disk_before_it_runs(tmp_path):
    """One that takes the process down can be read there afterwards, in a slot that is written over."""
    seen = []

    def make_fn(cfg):
        def look():
            seen.append((cfg, next(read(path_of(tmp_path)))["slot"]))
            return np.float32(2)

        return lambda x: x * jax.pure_callback(look, jax.ShapeDtypeStruct((), np.float32))

    Tuner(1, 1).tune(job_of(make_fn, ["a", "b"], tmp_path))

    assert {cfg for cfg, _ in seen} == {"a", "b"}
    assert all(named == cfg_id(cfg) for cfg, named in seen)


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path):
    """Killed in the middle of a write: everything before it is read, and everything after it too."""
    written(tmp_path, {"begin": "x", "fresh": False, "candidates": []}, cut=b'12345678 {"lost": "half')
    with Journal(path_of(tmp_path)) as found:
        found.lost(Trial("bad", "crash", "gone"), "")

    history = JournalContent.of(read(path_of(tmp_path)), alone=True)
    assert list(history.lost) == [cfg_id("bad")]


def test_a_changed_line_is_passed_over(tmp_path):
    """The checksum of each line is looked at."""
    written(tmp_path, {"lost": "aa", "trial": {}}, {"lost": "bb", "trial": {}})
    path = path_of(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"aa"', b'"cc"'))

    assert list(JournalContent.of(read(path), alone=True).lost) == ["bb"]


def test_a_finished_journal_is_short(tmp_path):
    """What was at work is gone from it; what came of it stays."""
    Tuner(1, 3).tune(job_of(lambda n: lambda x: x * n * 2 / n, [1.0, 3.0, 5.0], tmp_path))

    lines = list(read(path_of(tmp_path)))
    assert not [line for line in lines if "trying" in line]
    assert lines[-1]["finished"] in {cfg_id(n) for n in (1.0, 3.0, 5.0)}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_race_costs_the_journal_few_lines(tmp_path, monkeypatch):
    """However many rounds it has: what is appended are outcomes."""
    monkeypatch.setattr(Journal, "finish", lambda *args: None)
    ran = Ran()
    times = {"a": 1.0, "slow": 9.0, "b": 1.0}
    Tuner(1, 30, clock=_Clock(ran, times)).tune(job_of(ran.make_fn, list(times), tmp_path))

    lines = list(read(path_of(tmp_path)))
    kinds = [next(iter(line)) for line in lines]
    assert kinds.count("dropped") == 1
    assert kinds.count("trying") == kinds.count("back") == 3
    assert len(lines) < 15


def test_tunings_that_never_finish_do_not_pile_up(tmp_path, monkeypatch):
    """Stopped by a deadline again and again, a journal keeps to a size, and those that were dropped stay dropped."""
    monkeypatch.setattr(Journal, "finish", lambda *args: None)
    ran, sizes = Ran(), []
    times = {"a": 2.0, "slow": 9.0, "b": 1.0}
    for _ in range(16):
        ran.log.clear()
        record = Tuner(1, 3, clock=_Clock(ran, times)).tune(job_of(ran.make_fn, list(times), tmp_path))
        sizes.append(path_of(tmp_path).stat().st_size)
        assert (record.cfg, "slow" in ran.log) == ("b", len(sizes) == 1)

    assert max(sizes[8:]) < 1.2 * max(sizes[:8])


def test_a_journal_that_is_written_anew_says_the_same(tmp_path):
    """Crashes, suspects, failures, drops and the winner, in fewer lines."""
    drop = {"dropped": "x", "program": "of x", "seconds": 2.0, "ratio": 3.0, "clock": "wall"}
    written(
        tmp_path,
        {"begin": "i", "fresh": True, "candidates": []},
        _crash("z"),
        *[{"trying": "y", "doing": "compile"}, {"back": "y", "doing": "compile"}] * 100,
        {"failed": "f", "program": "of f", "trial": {"status": "wrong", "message": "off"}},
        drop,
        {"finished": "x", "candidates": ["x", "y"]},
        slot=("s", "race"),
    )
    with Journal(path_of(tmp_path)) as opened:
        before = opened.history
    after = JournalContent.of(read(path_of(tmp_path)), alone=True)

    assert after == before
    assert (list(after.lost), after.suspects, list(after.failed)) == (["z"], {"s": ["race"]}, ["f"])
    assert (after.dropped, after.winner, after.identity) == ({"x": drop}, "x", "i")
    assert len(list(read(path_of(tmp_path)))) < 12


def test_a_journal_of_the_old_format_is_read_for_its_crashes(tmp_path):
    """Everything else in it is measured anew."""
    key = (ABOUT["key"], "forward", ABOUT["environment"])
    old = path_for(tmp_path, *key, form=2)
    failed = {"failed": cfg_id("b"), "program": "p", "trial": {"status": "wrong", "message": "off"}}
    rounds = {"round": [[cfg_id("a"), 1.0]], "clock": "wall"}
    old.write_bytes(b"".join(map(journals._line, [_crash(cfg_id("bad")), failed, rounds])))
    with journal_for(tmp_path, *key) as first:
        assert (list(first.history.lost), first.history.failed) == ([cfg_id("bad")], {})
    ran = Ran()
    record = Tuner(1, 1).tune(job_of(ran.make_fn, ["a", "bad", "b"], tmp_path))

    assert outcome(record) == {"a": "ok", "bad": "crash", "b": "ok"}


def test_a_journal_that_cannot_be_shortened_is_used_as_it_is(tmp_path, monkeypatch):
    """No crash is forgotten because the disk is full."""
    monkeypatch.setattr(journals, "_said", set())
    written(tmp_path, *[{"begin": "i", "fresh": True, "candidates": []}] * 50, _crash(cfg_id("bad")))

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journals.os, "replace", full)
    opened = Journal(path_of(tmp_path))
    with pytest.warns(JournalWarning, match="No space left"):
        opened.__enter__()
    with contextlib.ExitStack() as held:
        held.push(opened)
        opened.trying("new", "compile")

    assert list(opened.history.lost) == [cfg_id("bad")]
    assert [line["trying"] for line in read(path_of(tmp_path)) if "trying" in line] == [cfg_id("new")]
    assert not list(tmp_path.glob("*.tmp"))


def test_one_process_at_a_time_writes_a_journal(tmp_path):
    """Another one reads what crashed, accuses none that is at work right now, and writes nothing."""
    with Journal(path_of(tmp_path)) as first:
        first.lost(Trial("bad", "crash", "gone"), "")
        first.trying("busy", "race")
        before = path_of(tmp_path).read_bytes()
        code = (
            "import sys; from pathlib import Path; from ejkernel.ops.tuning.journal.file import Journal\n"
            "from ejkernel.ops import Trial\n"
            "with Journal(Path(sys.argv[1])) as found:\n"
            "    print(found.writable, len(found.history.lost), len(found.history.suspects))\n"
            "    found.lost(Trial('other', 'crash'), '')"
        )
        with child(code, str(path_of(tmp_path))) as process:
            assert process.communicate()[0].split() == ["False", "1", "0"]
        assert path_of(tmp_path).read_bytes() == before


def test_one_that_took_a_worker_down_does_not_run_here_whatever_its_cfg_is(tmp_path):
    """A cfg without a stable form has no name in a journal, and is left out all the same."""
    crasher, other = object(), object()
    with journalled(job_of(None, [crasher, other], tmp_path), [crasher, other], 0, "wall") as (journal, prior):
        trial = Trial(crasher, "crash", "the process died")
        journal.lost(trial, "")
        past = prior.without([trial])

        assert cfg_id(crasher) is None
        assert (past.barred(crasher), past.barred(other)) == (trial, None)


def test_without_a_place_to_write_tuning_works_and_says_so_once(tmp_path, monkeypatch):
    """One warning for a folder, however many tunings."""
    monkeypatch.setattr(journals, "_said", set())
    (tmp_path / "file").write_text("")
    job = job_of(lambda n: lambda x: x * n * 2 / n, [1.0, 3.0], tmp_path / "file" / "journal")
    with pytest.warns(JournalWarning, match="nothing can be journalled"):
        assert Tuner(1, 1).tune(job).cfg in (1.0, 3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tuner(1, 1).tune(job)


def test_a_full_disk_ends_the_journal_and_not_the_tuning(tmp_path, monkeypatch):
    """Said once; nothing half written is taken for a line."""
    monkeypatch.setattr(journals, "_said", set())
    real, count = os.write, []

    def filling(descriptor, data):
        if data[8:9] != b" ":
            return real(descriptor, data)
        count.append(data)
        return real(descriptor, data) if len(count) < 4 else real(descriptor, data[:5])

    monkeypatch.setattr(journals.os, "write", filling)
    with pytest.warns(JournalWarning, match="No space left"):
        record = Tuner(1, 1).tune(job_of(lambda n: lambda x: x * n * 2 / n, [1.0, 3.0], tmp_path))

    assert record.winner is not None
    assert len(count) == 4
    # A slot and two lines that every journal begins with, and the three that were written.
    assert len(list(read(path_of(tmp_path)))) == 3 + 3


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    """Another file is neither read nor written."""
    monkeypatch.setattr(journals, "_said", set())
    (tmp_path / "other").write_text("precious")
    folder = tmp_path / "journal"
    folder.mkdir()
    path_of(folder).symlink_to(tmp_path / "other")
    with pytest.warns(JournalWarning):
        Tuner(1, 1).tune(job_of(lambda n: lambda x: x * n * 2 / n, [1.0, 3.0], folder))

    assert (tmp_path / "other").read_text() == "precious"


def test_cfgs_without_a_stable_form_are_tuned_without_being_named(tmp_path):
    """Nothing can be said of them to another process."""

    class Odd:
        pass

    record = Tuner(1, 1).tune(job_of(lambda cfg: lambda x: x * 2, [Odd(), Odd()], tmp_path))

    assert record.winner is not None


# What a later tuning takes over.


def test_a_finished_failure_is_not_repeated(tmp_path):
    """After a kill a wrong candidate is known to be wrong; the others are raced."""
    ran = Ran()

    def make_fn(cfg):
        right = ran.make_fn(cfg)
        return right if cfg != "wrong" else lambda x: right(x) * 3

    job = job_of(make_fn, ["a", "wrong", "b"], tmp_path)
    _stopped(job, after="failed")
    assert "wrong" in ran.log
    ran.log.clear()

    record = Tuner(1, 1).tune(job)

    assert outcome(record) == {"a": "ok", "wrong": "wrong", "b": "ok"}
    assert "wrong" not in ran.log


def test_a_killed_race_is_raced_afresh_without_those_that_were_dropped(tmp_path):
    """The others have all their samples again."""
    times = {"a": 2.0, "slow": 9.0, "b": 1.0}
    ran, job = _killed_race(times, tmp_path)
    ran.log.clear()

    record = Tuner(1, 5, clock=_Clock(ran, times)).tune(job)

    assert record.cfg == "b"
    assert "slow" not in ran.log
    assert len(record.trials[2].samples_s) == 5
    assert outcome(record) == {"a": "ok", "slow": "skipped", "b": "ok"}
    assert "9 times as long as the best in an earlier tuning" in record.trials[1].message


def test_one_that_was_dropped_by_another_clock_races_again(tmp_path):
    """Times of two clocks do not compare."""
    times = {"a": 2.0, "slow": 9.0, "b": 1.0}
    ran, job = _killed_race(times, tmp_path)
    other = _Clock(ran, {"a": 3.0, "slow": 0.5, "b": 4.0})
    other.name = "another"

    record = Tuner(1, 3, clock=other).tune(job)

    assert record.cfg == "slow"
    assert [trial.seconds for trial in record.trials] == pytest.approx([3.0, 0.5, 4.0])


def test_after_a_crash_those_that_were_dropped_race_again(tmp_path):
    """They may have been dropped against the one that crashed."""
    times = {"a": 2.0, "slow": 9.0, "best": 1.0}
    ran, job = _killed_race(times, tmp_path)
    with Journal(path_of(tmp_path)) as journal:
        journal.lost(Trial("best", "crash", "gone"), "")
    ran.log.clear()

    record = Tuner(1, 3, clock=_Clock(ran, times)).tune(job)

    assert outcome(record) == {"a": "ok", "slow": "ok", "best": "crash"}


def test_a_new_candidate_costs_one_measurement(tmp_path):
    """It runs against the old winner and the heuristic; all others were slower, and stay out."""
    ran = Ran()
    times = {"usual": 3.0, "best": 1.0, "other": 2.0, "wrong": 1.0, "new": 0.5}

    def make_fn(cfg):
        right = ran.make_fn(cfg)
        return right if cfg != "wrong" else lambda x: right(x) * 3

    first = ["usual", "best", "other", "wrong"]
    Tuner(1, 3, clock=_Clock(ran, times)).tune(job_of(make_fn, first, tmp_path))
    ran.log.clear()

    record = Tuner(1, 3, clock=_Clock(ran, times)).tune(job_of(make_fn, [*first, "new"], tmp_path))

    assert record.cfg == "new"
    assert set(ran.log) == {"usual", "best", "new"}
    assert outcome(record) == {"usual": "ok", "best": "ok", "other": "skipped", "wrong": "wrong", "new": "ok"}
    assert record.gain[0] == pytest.approx(6.0)


def test_equal_programs_share_what_is_known_of_one(tmp_path):
    """A failure is not repeated under another cfg's name, and neither is a crash."""
    ran = Ran()

    def make_fn(cfg):
        right = ran.make_fn(cfg)
        return {"wrong": lambda x: x * 3, "wrong too": lambda x: x * 3, "bad too": lambda x: x / 7}.get(cfg, right)

    cfgs = ["a", "wrong", "wrong too", "bad too", "b"]
    _stopped(job_of(make_fn, cfgs, tmp_path), after="failed")
    program = _program_of(make_fn("bad too"))
    with Journal(path_of(tmp_path)) as found:
        found.lost(Trial("bad", "crash", "gone"), program)
    compiled = []
    real = Staged.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staged, "compile", lambda self, *args, **kw: compiled.append(self) or real(self, *args, **kw))
        record = Tuner(1, 1).tune(job_of(make_fn, cfgs, tmp_path))

    assert outcome(record) == {"a": "ok", "wrong": "wrong", "wrong too": "wrong", "bad too": "crash", "b": "ok"}
    assert len(compiled) == 2


def test_where_all_that_run_again_are_out_those_that_were_dropped_race(tmp_path):
    """They were right: the best of them wins."""
    ran = Ran()
    times = {"a": 9.0, "b": 5.0, "best": 1.0}
    job = TuningJob(ran.make_fn, (X,), {}, list(times), about=ABOUT, journal=tmp_path)
    _stopped(job, after="dropped", times=2, clock=_Clock(ran, times))

    def make_fn(cfg):
        broken = lambda x: jax.pure_callback(_broken, jax.ShapeDtypeStruct(x.shape, x.dtype))  # noqa: E731 - short
        return broken if cfg == "best" else ran.make_fn(cfg)

    broken = TuningJob(make_fn, (X,), {}, list(times), about=ABOUT, journal=tmp_path)
    record = Tuner(1, 3, clock=_Clock(ran, times)).tune(broken)

    assert record.cfg == "b"
    assert record.trials[0].samples_s
    assert record.trials[2].status == "runtime"


def test_the_same_tuning_asked_for_again_is_measured_again(tmp_path):
    """A finished tuning that is repeated is not believed."""
    ran = Ran()
    times = {"a": 2.0, "b": 1.0}
    job = job_of(ran.make_fn, list(times), tmp_path)
    Tuner(1, 3, clock=_Clock(ran, times)).tune(job)
    ran.log.clear()

    record = Tuner(1, 3, clock=_Clock(ran, {"a": 1.0, "b": 2.0})).tune(job)

    assert record.cfg == "a"
    assert set(ran.log) == {"a", "b"}


def test_a_changed_program_is_measured_and_checked_again(tmp_path):
    """A corrected kernel is not held to what the old one did."""

    def of(third):
        def make_fn(cfg):
            return {"a": lambda x: x * 2, "b": third}[cfg]

        return job_of(make_fn, ["a", "b"], tmp_path)

    _stopped(of(lambda x: x * 3), after="failed")
    record = Tuner(1, 1).tune(of(lambda x: x + x))

    assert outcome(record) == {"a": "ok", "b": "ok"}


def test_other_inputs_are_measured_anew(tmp_path):
    """Times may depend on indices: the caller's own integers count."""

    def tuned(index, ran):
        args = (X, jnp.asarray(index))
        times = {"a": 1.0, "b": 9.0}
        make_fn = lambda cfg: lambda x, i: ran.make_fn(cfg)(x) + i  # noqa: E731 - shorter than a def in a def
        job = TuningJob(make_fn, args, {}, list(times), heuristic_first=True, about=ABOUT, journal=tmp_path)
        if index == 0:
            return _stopped(job, after="dropped", clock=_Clock(ran, times))
        return Tuner(1, 3, clock=_Clock(ran, times)).tune(job)

    tuned(0, Ran())
    ran = Ran()
    record = tuned(1, ran)

    assert outcome(record) == {"a": "ok", "b": "ok"}
    assert "b" in ran.log


# What is never run again.


def test_what_was_lost_in_a_worker_is_not_run_again(tmp_path):
    """Neither here nor in a worker, neither killed nor finished, until it is asked for."""
    with Journal(path_of(tmp_path)) as found:
        found.lost(Trial("bad", "timeout", "did not end within 60 s"), "")
    ran = Ran()
    for _ in range(2):
        record = Tuner(1, 1).tune(job_of(ran.make_fn, ["a", "bad", "b"], tmp_path))
        assert outcome(record) == {"a": "ok", "bad": "timeout", "b": "ok"}
    assert "bad" not in ran.log
    assert "forget_crashes()" in record.trials[1].message


def test_what_is_lost_is_barred_at_once(tmp_path):
    """Should the worker turn out to be of no use, the others run in this process: without the one that it died of."""
    with journalled(job_of(Ran().make_fn, ["a", "bad"], tmp_path), ["a", "bad"], 0, "wall") as (journal, prior):
        assert prior.barred("bad") is None
        journal.lost(Trial("bad", "crash", "the process died"), "")
        assert prior.barred("bad").status == "crash"


def test_one_that_was_at_work_when_a_process_died_runs_in_a_worker(tmp_path):
    """It may have been the one, or a kill from outside: in a worker nothing is at stake."""
    killed(tmp_path, 3.0)

    record = Tuner(1, 1).tune(job_of(lambda n: lambda x: x * n * 2 / n, [1.0, 3.0], tmp_path))

    assert record.clock == "wall (in a worker process)"
    assert outcome(record) == {1.0: "ok", 3.0: "ok"}
    assert not JournalContent.of(read(path_of(tmp_path)), alone=True).suspects


def test_a_suspect_that_cannot_go_to_a_worker_gets_a_second_chance(tmp_path):
    """That process may have been killed from outside: a good candidate is not lost to it."""
    killed(tmp_path, "b")
    ran = Ran()

    record = Tuner(1, 1).tune(job_of(ran.make_fn, ["a", "b", "c"], tmp_path))

    assert outcome(record) == {"a": "ok", "b": "ok", "c": "ok"}
    assert not JournalContent.of(read(path_of(tmp_path)), alone=True).suspects


def test_one_that_was_at_work_at_two_deaths_is_not_run(tmp_path):
    """That is no accident; the message says how it gets another chance. Finishing without it says nothing of it."""
    killed(tmp_path, "b", times=2)
    ran = Ran()

    records = [Tuner(1, 1).tune(job_of(ran.make_fn, ["a", "b", "c"], tmp_path)) for _ in range(2)]

    assert [outcome(record) for record in records] == [{"a": "ok", "b": "crash", "c": "ok"}] * 2
    assert "b" not in ran.log
    assert "forget_crashes()" in records[0].trials[1].message


def test_suspects_compile_alone(tmp_path, monkeypatch):
    """Of several that were compiling when a process died, the second death then accuses one."""
    threads = []
    real = CompilePool.__init__
    monkeypatch.setattr(CompilePool, "__init__", lambda self, n: (threads.append(n), real(self, n))[1])
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    job = job_of(Ran().make_fn, ["a", "b", "c"], tmp_path)
    killed(tmp_path, "b", doing="compile")

    Tuner(1, 1, isolate=False).tune(job)
    Tuner(1, 1, isolate=False).tune(job)

    assert (set(threads[:-1]), threads[-1]) == ({1}, 3)


def test_an_interrupt_accuses_none(tmp_path):
    """A candidate that can be interrupted has not taken the process with it: none is left out for it."""
    ran = Ran()
    job = job_of(ran.make_fn, ["a", "b"], tmp_path)
    _stopped(job, after="trying", times=8)

    assert outcome(Tuner(1, 1).tune(job)) == {"a": "ok", "b": "ok"}


def test_one_that_still_compiles_at_the_end_is_no_suspect(tmp_path):
    """A straggler is left behind by a tuning that ends well: no process died."""
    with Journal(path_of(tmp_path)) as journal:
        journal.begin("inputs", ["a", "b"], fresh=True)
        journal.trying("b", "compile", "p")
        journal.finish(Record(trials=(Trial("a", samples_s=(1.0,)),), winner=0), ["a", "b"])

    assert not JournalContent.of(read(path_of(tmp_path)), alone=True).suspects


def test_compiling_clears_none_that_crashed_while_running(tmp_path):
    """A suspect has to come back from what it was suspected of."""
    one = cfg_id("b")
    lines = [{"suspects": {one: ["check"]}}, {"trying": one, "doing": "compile"}, {"back": one, "doing": "compile"}]
    assert JournalContent.of(lines, alone=True).suspects == {one: ["check"]}
    lines += [{"back": one, "doing": "check"}]
    assert not JournalContent.of(lines, alone=True).suspects


def test_suspects_outlive_a_journal_that_is_written_anew(tmp_path):
    """With all their deaths, though their programs are named behind them."""
    one = cfg_id("b")
    history = JournalContent.of(
        [
            {"trying": one, "doing": "compile"},
            {"back": one, "doing": "compile"},
            {"suspects": {one: ["compile"]}},
        ],
        alone=True,
    )

    assert JournalContent.of(history.lines(), alone=True).suspects == {one: ["compile"]}


def end():
    os._exit(7)


class Fragile(Kernel[str, jax.Array]):
    """Twice the argument; one cfg ends the process."""

    op_id = "fragile"

    def run(self, x, *, cfg):
        if cfg == "deadly":
            return jax.pure_callback(lambda v: end(), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return x * 2 if cfg == "usual" else x + x + 0 * x

    def heuristic_cfg(self, inv):
        return "usual"

    def candidate_cfgs(self, inv):
        return ["usual", "deadly", "other"]


CALL = """
import jax.numpy as jnp
from tuning.journal.test_journal_file import Fragile
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor
selector = ConfigSelectorChain(ConfigCache())
Executor(selector)(Fragile(), jnp.ones(8))
print(selector.cache.size())
"""


def test_a_call_that_crashed_two_processes_crashes_no_third():
    """`os._exit` inside a candidate that no worker can run: once may be a kill from outside, twice is not."""
    found = []
    for _ in range(3):
        with child(CALL) as process:
            out = process.communicate(timeout=300)[0]
            found.append((process.returncode, out.strip()))

    assert found == [(7, ""), (7, ""), (0, "1")]


@pytest.mark.slow
def test_a_kill_from_outside_leaves_what_an_exit_from_inside_leaves():
    """Nothing that a dead process leaves tells them apart: that is why one death bars none here."""
    left = []
    for end in ("os._exit(7)", "os.kill(os.getpid(), 9)"):
        code = f"import os; import tuning.journal.test_journal_file as t; t.end = lambda: {end}\n{CALL}"
        with child(code) as process:
            process.communicate(timeout=300)
        [path] = journal_folder().glob("*.jsonl")
        left.append(list(read(path)))
        forget_crashes()

    assert [sorted(map(str, lines)) for lines in left[:1]] == [sorted(map(str, lines)) for lines in left[1:]]
    assert left[0][0] == {"slot": cfg_id("deadly"), "doing": "check"}


def test_crashes_are_forgotten_on_request():
    """Of one operation, with or without its version, or of all; a journal that is in use stays."""
    folder = journal_folder()
    names = ["scale@v1-0000", "scale@v2-0000", "norm@v1-0000"]

    def fill():
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / f"{name}.jsonl").write_text("")

    def left():
        return sorted(path.name.partition("-")[0] for path in folder.glob("*.jsonl"))

    fill()
    assert (forget_crashes("scale@v1"), left()) == (1, ["norm@v1", "scale@v2"])
    fill()
    assert (forget_crashes("scale"), left()) == (2, ["norm@v1"])
    fill()
    with Journal(folder / "norm@v1-0000.jsonl"):
        assert (forget_crashes(), left()) == (2, ["norm@v1"])
    with pytest.raises(BadNameError):
        forget_crashes("../other")


# Stand-ins.


class _Clock:
    """Reads the times from a table, by the cfg that the run left in the log."""

    name = "table"

    def __init__(self, ran, times):
        self.ran, self.times = ran, times

    def time(self, call, leaves, calls):
        jax.block_until_ready(call(*leaves))
        return self.times[self.ran.log[-1]]


def _broken():
    raise ValueError("broken since")


def _crash(one):
    return {"lost": one, "program": "", "cfg": "?", "trial": {"status": "crash", "message": "gone"}}


def _program_of(function):
    """What the journal calls this function's program."""
    return stage(function, flatten_call((X,), {}), (X,), "forward", name="ejk_0_0").lower()[1]


class _Stop(BaseException):
    """A kill, as far as the journal can tell: nothing is written after it."""


def _killed_race(times, folder):
    """A race of candidates that take so long, which ended when the first was dropped, and the job to go on with."""
    ran = Ran()
    job = job_of(ran.make_fn, list(times), folder)
    _stopped(job, after="dropped", clock=_Clock(ran, times))
    return ran, job


def _stopped(job, *, after, times=1, clock=None):
    """Runs a tuning until the journal has heard so often of this."""
    heard = 0
    real = getattr(Journal, after)

    def stopping(self, *args, **kwargs):
        nonlocal heard
        real(self, *args, **kwargs)
        heard += 1
        if heard == times:
            raise _Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, after, stopping)
        with pytest.raises(_Stop):
            Tuner(1, 3, clock=clock).tune(job)
