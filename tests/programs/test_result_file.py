"""Results as values to keep: files without loss, merging, saving to a store, tables."""

from __future__ import annotations

import io
import json
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest
from fakes import Blocks, DictStore, Doubling, TableTuner
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.ops import (
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    OpsError,
    PersistentCache,
    Record,
    Trial,
    autotune,
)
from ejkernel.ops.core.key import Key
from ejkernel.ops.core.record import Status
from ejkernel.ops.programs.batch import AutotuneOptions
from ejkernel.ops.store.layered import MemoryStore

DEVICE = "gpu|NVIDIA H200"
QUIET = AutotuneOptions(progress=False)


def record(*seconds, winner=0, objective="forward", cfgs=None, **fields):
    """The record of some cfgs with these times."""
    trials = [Trial(cfg, samples_s=(s,)) for cfg, s in zip(cfgs or range(len(seconds)), seconds, strict=True)]
    return Record(trials=tuple(trials), winner=winner, heuristic=0, objective=objective, **fields)


FAILED = tuple(
    Trial({"size": i}, status, f"why it is {status}", compile_s=0.1, error=0.5, dropped_round=i)
    for i, status in enumerate(get_args(Status))
)
FULL = AutotuningResult(
    DEVICE,
    (
        Entry("op@v0", "00", {"size": 1}, Record(trials=FAILED, winner=0), "autotune", count=7),
        Entry("op@v0", "01", 3, Record(trials=FAILED[1:], stop="failed"), "heuristics", "all failed"),
        Entry("op@v1", 'key with "quotes" and \u2028', [1, None, 2.5], device="cpu|x"),
    ),
    interrupted=True,
    notes=("something: not tuned",),
)


# Files.


def test_a_result_comes_back_as_it_was():
    """Every field, every trial of every record, every failure."""
    again = AutotuningResult.loads(FULL.dumps())
    assert again == FULL
    assert [t.status for t in again.entries[0].record.trials] == list(get_args(Status))
    assert again.dumps() == FULL.dumps()


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
entries = st.builds(
    Entry,
    op_id_v=st.text(max_size=8),
    call_key=st.text(max_size=8),
    cfg=plain,
    record=st.none()
    | st.builds(lambda cfg, message: Record(trials=(Trial(cfg, "wrong", message),), stop="failed"), plain, st.text()),
    source=st.text(max_size=4),
    note=st.text(max_size=8),
    count=st.integers(1, 1000),
    device=st.text(max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(st.builds(AutotuningResult, st.text(), st.lists(entries).map(tuple), st.booleans(), st.just(("note",))))
def test_any_result_comes_back_as_it_was(result):
    """Whatever JSON can hold."""
    assert AutotuningResult.loads(result.dumps()) == result


def test_a_file_of_an_older_version_still_loads():
    """Written by the first version that had results: fields that came later are empty."""
    old = AutotuningResult.load(Path(__file__).parent / "old_result.json")
    tuned, guessed = old.entries
    assert (old.device, old.notes, old.workers, old.confirmation) == ("cpu|x", ("something: not tuned",), (), None)
    assert (tuned.op_id_v, tuned.call_key, tuned.cfg, tuned.count) == ("op@v0", "00", {"size": 2}, 3)
    assert (guessed.cfg, guessed.record, guessed.note) == (7, None, "nothing to measure")
    assert [trial.status for trial in tuned.record.trials] == ["ok", "ok", "wrong"]
    assert tuned.record.trials[1].samples_s == (1e-3, 1.5e-3)
    assert (tuned.record.winner, tuned.record.gain, tuned.record.conditions) == (1, (2.0, 1.6, 2.2), "")
    assert (tuned.record.cost, tuned.record.phases, tuned.record.trials[2].check) == ({}, {}, None)
    assert AutotuningResult.loads(old.dumps()) == old


def test_a_file_has_one_entry_a_line():
    """So that two versions of it can be compared."""
    text = FULL.dumps()
    assert json.loads(text)["version"] == 1
    assert sum(line.startswith('{"op_id_v"') for line in text.splitlines()) == 3


@pytest.mark.parametrize("kind", [str, lambda p: p], ids=["str", "path"])
def test_a_result_is_kept_under_a_path(kind, tmp_path):
    """A path of any kind; an older file is replaced as a whole."""
    path = tmp_path / "result.json"
    path.write_text("old", encoding="utf-8")
    FULL.dump(kind(path))
    assert AutotuningResult.load(kind(path)) == FULL
    assert [p.name for p in tmp_path.iterdir() if "result" in p.name] == ["result.json"]


def test_a_result_is_kept_in_an_open_file():
    """Text, and bytes on the way back."""
    stream = io.StringIO()
    FULL.dump(stream)
    stream.seek(0)
    assert AutotuningResult.load(stream) == FULL
    assert AutotuningResult.load(io.BytesIO(stream.getvalue().encode())) == FULL


def test_cfgs_are_rebuilt_where_their_types_are_given():
    """By operation, with or without its version; in the entries and in the records."""
    made = replace(FULL.entries[0], cfg=Blocks(1), record=record(1.0, 2.0, cfgs=[Blocks(1), Blocks(2)]))
    text = AutotuningResult(DEVICE, (made,)).dumps()
    for name in ("op", "op@v0"):
        (entry,) = AutotuningResult.loads(text, cfg_types={name: Blocks}).entries
        assert entry == made
    (raw,) = AutotuningResult.loads(text, cfg_types={"op@v1": Blocks}).entries
    assert raw.cfg == {"size": 1}


def test_a_cfg_that_does_not_fit_its_type_is_named():
    """The error is about the type that was given, not about the file."""
    with pytest.raises(TypeError, match="Blocks"):
        AutotuningResult.loads(FULL.dumps(), cfg_types={"op@v1": Blocks})


@dataclass(frozen=True)
class Strange:
    """A cfg that JSON cannot hold."""

    value: object


def test_a_pipe_is_written_into_and_not_replaced(tmp_path):
    """So is a device such as /dev/stdout: what lies under a path and is no file stays what it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        FULL.dump(pipe)
        assert stat.S_ISFIFO(os.stat(pipe).st_mode)
        assert AutotuningResult.loads(os.read(reader, 1 << 16).decode()) == FULL
    finally:
        os.close(reader)


def test_a_link_stays_a_link(tmp_path):
    """What it points to is replaced."""
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    FULL.dump(link)
    assert link.is_symlink()
    assert AutotuningResult.load(target) == FULL


def test_a_cfg_without_json_is_named_and_no_file_is_written(tmp_path):
    """The old file, or none, stays."""
    with pytest.raises(TypeError, match="Strange"):
        AutotuningResult(DEVICE, (Entry("op@v0", "00", Strange(object())),)).dump(tmp_path / "result.json")
    assert list(tmp_path.glob("result*")) == []


HEAD = '{"kind": "ejkernel.ops autotuning result", "version": 1, "device": "x", "interrupted": false, "notes": [], '
ENTRY = (
    '{"op_id_v": "o", "call_key": "k", "source": "", "note": "", "device": "", "count": 1, "cfg": 1, "record": null}'
)


def test_the_smallest_file_is_read():
    """The damaged ones below differ from it in one place each."""
    assert AutotuningResult.loads(f'{HEAD}"entries": [{ENTRY}]}}') == AutotuningResult("x", (Entry("o", "k", 1),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no autotuning result"),
        ("[]", "no autotuning result"),
        ("{}", "no autotuning result"),
        ("[" * 100_000, "no autotuning result"),
        (FULL.dumps()[:-20], "no autotuning result"),
        (FULL.dumps().replace('"version": 1', '"version": 2'), "version 2.*reads version 1"),
        (HEAD[:-2] + "}", "damaged"),
        (HEAD + '"entries": {}}', "damaged"),
        (HEAD + '"entries": [1]}', "damaged"),
        (HEAD + '"entries": [{}]}', "damaged"),
        (HEAD.replace("false", "0") + '"entries": []}', "damaged.*interrupted"),
        (f'{HEAD}"entries": [{ENTRY.replace(chr(34) + "k" + chr(34), "3")}]}}', "damaged.*call_key"),
        (f'{HEAD}"entries": [{ENTRY.replace("null", "{}")}]}}', "format"),
    ],
)
def test_what_is_no_result_is_refused(text, message):
    """A ValueError of ours that says what is wrong."""
    with pytest.raises(ValueError, match=message) as caught:
        AutotuningResult.loads(text)
    assert isinstance(caught.value, OpsError)


def test_a_result_of_another_device_is_refused_where_the_device_is_given():
    """Both devices are named; without one any result is read, and its entries answer their own device alone."""
    assert AutotuningResult.loads(FULL.dumps(), device=DEVICE) == FULL
    with pytest.raises(ValueError, match=r"gpu\|NVIDIA H200.*cpu\|x"):
        AutotuningResult.loads(FULL.dumps(), device="cpu|x")


def test_a_loaded_result_is_in_force_with_the_cfgs_of_the_kernel():
    """Plain JSON becomes the kernel's own cfg when it is called."""
    chosen = []

    class Watching(Doubling):
        def run(self, x, *, cfg):
            chosen.append(cfg)
            return x * 2.0

    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=TableTuner()))
    result = autotune(lambda x: executor(Watching(), x), jnp.ones(8), tuning=QUIET)
    again = AutotuningResult.loads(result.dumps())
    assert again.entries[0].cfg == {"size": 2}
    with again:
        Executor(ConfigSelectorChain(ConfigCache()))(Watching(), jnp.ones(8))
    assert chosen[-1] == Blocks(2)


def test_a_cfg_that_does_not_fit_the_kernel_is_named_when_it_is_called():
    """A file of an older kernel is no reason to run it with nonsense."""
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=TableTuner()))
    result = autotune(lambda x: executor(Doubling(), x), jnp.ones(8), tuning=QUIET)
    odd = replace(result, entries=tuple(replace(e, cfg={"width": 2}) for e in result.entries))
    with AutotuningResult.loads(odd.dumps()), pytest.raises(TypeError, match="width"):
        executor(Doubling(), jnp.ones(8))


# Merging.

MEASURED = record(2.0, 1.0, winner=1)
BOTH = record(2.0, 1.0, winner=1, objective="forward+backward")


@pytest.mark.parametrize(
    ("left", "right", "stays"),
    [
        (Entry("op@v0", "00", "l"), Entry("op@v0", "00", "r"), "r"),
        (Entry("op@v0", "00", "l", MEASURED), Entry("op@v0", "00", "r", MEASURED), "r"),
        (Entry("op@v0", "00", "l", MEASURED), Entry("op@v0", "00", "r"), "l"),
        (Entry("op@v0", "00", "l", MEASURED), Entry("op@v0", "00", "r", source="heuristics"), "l"),
        (Entry("op@v0", "00", "l"), Entry("op@v0", "00", "r", MEASURED), "r"),
        (Entry("op@v0", "00", "l", BOTH), Entry("op@v0", "00", "r", MEASURED), "l"),
        (Entry("op@v0", "00", "l", MEASURED), Entry("op@v0", "00", "r", BOTH), "r"),
    ],
)
def test_of_two_entries_of_one_call_one_stays(left, right, stays):
    """A measured one, then one for forward and backward, then the right side's."""
    (entry,) = (AutotuningResult(DEVICE, [left]) | AutotuningResult(DEVICE, [right])).entries
    assert entry.cfg == stays


def test_entries_of_other_calls_all_stay():
    """By operation, call and device; entries of another device keep theirs."""
    here = AutotuningResult(DEVICE, [Entry("op@v0", "00", 1), Entry("op@v1", "00", 2)], notes=("a", "b"))
    there = AutotuningResult("cpu|x", [Entry("op@v0", "00", 3), Entry("op@v0", "01", 4, device=DEVICE)], True, ("b",))
    merged = here | there
    assert {key: e.cfg for key, e in merged.by_key().items()} == {
        Key(DEVICE, "op@v0", "00"): 1,
        Key(DEVICE, "op@v1", "00"): 2,
        Key("cpu|x", "op@v0", "00"): 3,
        Key(DEVICE, "op@v0", "01"): 4,
    }
    assert (merged.device, merged.interrupted, merged.notes) == (DEVICE, True, ("a", "b"))


def test_results_of_two_runs_are_in_force_together():
    """Each run tuned one shape; merged, both are known."""
    results, keys = [], []
    for size in (4, 8):
        executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=TableTuner()))
        results.append(autotune(lambda x, call=executor: call(Doubling(), x), jnp.ones(size), tuning=QUIET))
        keys += executor.chooser.cache.keys()
    with results[0] | AutotuningResult.loads(results[1].dumps()):
        assert [ConfigCache().get(*key) for key in keys] == [Blocks(2), {"size": 2}]


def test_a_result_merges_with_results_alone():
    """Anything else is the usual TypeError."""
    with pytest.raises(TypeError):
        FULL | {}


# Saving.


def test_a_result_is_saved_to_a_store_with_its_records(tmp_path):
    """Guesses stay out; what was measured keeps its times."""
    store = PersistentCache("op", path=tmp_path / "op.json")
    measured = record(2.0, 1.0, winner=1, environment={"jaxlib": "1.2.3"})
    entries = [Entry("op@v0", "00", 1, measured), Entry("op@v0", "01", 2, source="heuristics"), Entry("op@v0", "02", 3)]
    assert AutotuningResult(DEVICE, entries).save(store) == 2
    again = PersistentCache("op", path=tmp_path / "op.json")
    assert [key[2] for key in again.keys()] == ["00", "02"]
    assert again.record(DEVICE, "op@v0", "00") == measured
    assert again.lookup(Key(DEVICE, "op@v0", "00")).environment == {"jaxlib": "1.2.3"}


@pytest.mark.parametrize("store", [DictStore(), MemoryStore()], ids=["get and put alone", "in memory"])
def test_any_store_will_do(store):
    """Also one of the user's own."""
    assert AutotuningResult(DEVICE, [Entry("op@v0", "00", 1, MEASURED)]).save(store) == 1
    assert store.get(DEVICE, "op@v0", "00") == 1


# Tables.


def test_a_loaded_result_is_not_given_to_a_dumper_of_cfgs(tmp_path):
    """The message says how its cfgs become the kernel's own again."""
    loaded = AutotuningResult.loads(FULL.dumps())
    store = PersistentCache("op", tmp_path / "op.json", loader=Blocks, dumper=lambda cfg: cfg.size)

    with pytest.raises(OpsError, match="cfg_types"):
        loaded.save(store)


def test_a_saved_entry_says_which_call_it_is_for(tmp_path):
    """As one that a tuning wrote itself."""
    executor = Executor(ConfigSelectorChain(ConfigCache(), tuner=TableTuner()))
    result = autotune(lambda x: executor(Doubling(), x), jnp.ones(8), tuning=QUIET)
    store = PersistentCache("doubling", tmp_path / "doubling.json")
    result.save(store)

    (key,) = result.by_key()
    assert store.lookup(key).call == {"args[0]": "float32[8]"}


def test_totals_count_every_run():
    """Seconds times runs, of the calls that were measured with their heuristic cfg."""
    result = AutotuningResult(
        DEVICE, [Entry("a@v0", "00", 1, record(4e-3, 1e-3, winner=1), count=3), Entry("b@v0", "00", 1)]
    )
    assert (result.totals.calls, result.totals.heuristic_s, result.totals.tuned_s) == pytest.approx((1, 12e-3, 3e-3))
    assert str(result.totals) == "1 measured call takes 12 ms with heuristics, 3 ms tuned (4.00x)"


def test_totals_agree_with_the_gains():
    """Medians of all samples may say 0.9 where the rounds that had both say 1.0: the gain is what was found."""
    told = record(0.9e-3, 1e-3, winner=1, gain=(1.0, 0.98, 1.02))

    assert str(AutotuningResult(DEVICE, [Entry("a@v0", "00", 1, told)]).totals).endswith("(1.00x)")


def test_totals_have_no_gain_that_is_too_noisy_to_tell():
    """The row says so, and the line below it must not say 1.36 times as fast."""
    told = record(1.36e-3, 1e-3, winner=1, gain=(1.36, 0.9, 2.0))
    result = AutotuningResult(DEVICE, [Entry("a@v0", "00", 1, told)])

    assert "too noisy to tell" in str(result)
    assert str(result.totals).endswith("(1.00x)")


def test_the_table_has_the_costliest_first():
    """One row a call, then totals and notes; `str` is the table."""
    small = Entry("small@v0", "00", 1, record(4e-3, 2e-3, winner=1, gain=(2.0, 1.9, 2.1)), "autotune")
    large = Entry("large@v0", "00", 1, record(4e-3, 2e-3, winner=1), "autotune", count=3)
    odd = Entry("odd@v0", "00", 1, Record(trials=FAILED[1:3], stop="failed"), "heuristics", "all failed")
    lines = str(AutotuningResult(DEVICE, [odd, small, large], True, ("note",))).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["operation", "large@v0", "small@v0", "odd@v0"]
    assert lines[1].split()[3:] == ["2", "ms", "3", "75%", "-", "2", "autotune"]
    assert lines[2].split()[3:] == ["2", "ms", "1", "25%", "2.00x", "2", "autotune"]
    assert "2, 2 failed" in lines[3]
    assert "heuristics: all failed" in lines[3]
    assert lines[4:] == [
        f"{DEVICE}: 2 measured calls take 16 ms with heuristics, 8 ms tuned (2.00x)",
        "interrupted before every call had its turn",
        "note",
    ]


def test_a_notebook_shows_text_and_never_markup_of_a_cfg():
    """Whatever a cfg or a note holds is escaped."""
    text = AutotuningResult(DEVICE, [Entry("op@v0", "<b>", "<script>")], notes=("<i>",))._repr_html_()
    assert text.startswith("<table>")
    assert not {"<script>", "<b>", "<i>"} & set(text.replace(">", "> ").split())
    assert "&lt;script&gt;" in text


def test_the_repr_is_one_line():
    """For notebooks and logs."""
    assert repr(AutotuningResult("x", ())) == "<AutotuningResult: 0 calls on x, no times were measured>"


def test_numbers_of_numpy_are_named():
    """What is no JSON is refused with its place, not written as something else."""
    with pytest.raises(TypeError, match="int64"):
        AutotuningResult(DEVICE, (Entry("op@v0", "00", {"size": np.int64(1)}),)).dumps()


def test_a_file_of_bytes_serves_on_both_ways():
    """As what is open in binary mode."""
    file = io.BytesIO()
    FULL.dump(file)
    file.seek(0)
    assert AutotuningResult.load(file).dumps() == FULL.dumps()


def test_what_is_neither_a_path_nor_a_file_is_named():
    """On both ways."""
    with pytest.raises(TypeError, match=r"5 is neither a path nor a file with a method write\(\)"):
        FULL.dump(5)
    with pytest.raises(OpsError, match=r"5 is neither a path nor a file with a method read\(\)"):
        AutotuningResult.load(5)
