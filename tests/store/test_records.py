"""The full record of a tuning lies beside its entry and is found from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes import Blocks, Doubling, TableTuner, call_of, key_of
from fakes_store import entries, keep, key, never_small, store, told, value

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Tuner
from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.store.layered import LayeredStore, MemoryStore, ReadOnlyStore
from ejkernel.ops.store.persistent import PersistentCache, StoreWarning
from ejkernel.ops.store.store import StoredEntry

RECORD = Record(
    key={"device": "gpu|x"},
    kernel="module.Kernel",
    environment={"jaxlib": "0.12.0"},
    trials=(
        Trial({"n": 1}, samples_s=(1.0, 2.0, 3.0), compile_s=0.1),
        Trial({"n": 2}, "memory", "out of memory: größe"),
    ),
    winner=0,
    heuristic=0,
    gain=(1.0, 0.9, 1.1),
    tied=(0,),
)


def tuned(cache, name, record=RECORD):
    cache.keep(
        key(name), StoredEntry(record.cfg, source="autotune", summary=record.summary(), objective=None, record=record)
    )


@pytest.fixture(params=["small", "large"])
def cache(request, tmp_path, monkeypatch):
    """A store of either size."""
    if request.param == "large":
        never_small(monkeypatch)
    return store(tmp_path)


def test_a_record_is_found_from_its_entry(cache):
    """What was kept with the entry comes back equal, here and in the next process."""
    tuned(cache, "one")

    assert cache.record(*key("one")) == RECORD
    assert PersistentCache("ops", cache.path).record(*key("one")) == RECORD


def test_a_record_survives_a_fold(cache):
    """Folding moves the entry, not its record."""
    tuned(cache, "one")
    cache.fold()

    assert PersistentCache("ops", cache.path).record(*key("one")) == RECORD


def test_the_entry_has_the_summary_and_the_file_does_not_have_the_record(cache):
    """The file people read stays short: the figures are in the entry, the trials beside it."""
    tuned(cache, "one")
    cache.fold()
    (raw,) = entries(cache.path).values()

    assert raw["summary"] == RECORD.summary()
    assert "trials" not in raw
    assert len(list((Path(cache.path + ".d") / "records").iterdir())) == 1


def test_an_entry_without_a_tuning_has_no_record(cache):
    """A put by hand, and an unknown key, have none."""
    keep(cache, "one", 1)

    assert cache.record(*key("one")) is None
    assert cache.record(*key("unknown")) is None


def test_a_newer_entry_has_its_own_record(cache):
    """After another tuning the record is the new one; after a put by hand there is none."""
    tuned(cache, "one")
    again = Record(trials=(Trial({"n": 3}, samples_s=(0.5,)),), winner=0)
    tuned(cache, "one", again)
    assert cache.record(*key("one")) == again
    keep(cache, "one", {"n": 9})

    assert cache.record(*key("one")) is None


def test_a_record_of_another_cache_is_seen(cache):
    """A process that already has the store open finds what another one tuned."""
    other = PersistentCache("ops", cache.path)
    assert other.record(*key("one")) is None
    tuned(cache, "one")

    assert other.record(*key("one")) == RECORD


def test_the_cfgs_of_a_record_are_rebuilt(tmp_path):
    """With a `cfg_type` the trials hold cfgs of that type."""
    record = Record(trials=(Trial(Blocks(2), samples_s=(1.0,)), Trial(Blocks(4), "compile", "no")), winner=0)
    tuned(store(tmp_path, cfg_type=Blocks), "one", record)

    assert store(tmp_path, cfg_type=Blocks).record(*key("one")) == record


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe", b"[1]", b'{"format": 99}', b"[" * 99999], ids=lambda data: ascii(data[:9])
)
def test_a_damaged_record_costs_the_record_alone(cache, data):
    """The cfg is answered; the record is None and named once."""
    tuned(cache, "one")
    (path,) = (Path(cache.path + ".d") / "records").iterdir()
    path.write_bytes(data)
    with told() as said:
        assert cache.record(*key("one")) is None
        assert cache.record(*key("one")) is None

    assert len(said) == 1
    assert str(path) in said[0]
    assert value(cache, "one") == {"n": 1}


def test_a_record_that_cannot_be_written_costs_the_record_alone(cache):
    """The entry is kept and the status stays; one warning names the key."""
    os.makedirs(cache.path + ".d")
    (Path(cache.path + ".d") / "records").write_text("in the way")
    with pytest.warns(StoreWarning, match="record of matmul@v2"):
        tuned(cache, "one")

    assert cache.status == "read-write"
    assert value(PersistentCache("ops", cache.path), "one") == {"n": 1}


def test_a_record_waits_for_the_disk_with_its_entry(tmp_path):
    """What could not be written is served, and is written with its entry when the disk works again."""
    place = tmp_path / "store"
    place.write_text("in the way")
    cache = store(place)
    with pytest.warns(StoreWarning):
        tuned(cache, "one")
    assert cache.record(*key("one")) == RECORD
    place.unlink()
    keep(cache, "two", 2)

    assert store(place).record(*key("one")) == RECORD


def test_a_record_belongs_to_its_own_put(tmp_path, monkeypatch):
    """Another process's put of the same key, a moment later, does not get our record."""
    never_small(monkeypatch)
    mine, other = store(tmp_path), store(tmp_path)
    real = mine._entry_log.add

    def add_and_be_overtaken(which, raw):
        sealed = real(which, raw)
        keep(other, "one", "theirs")
        return sealed

    monkeypatch.setattr(mine._entry_log, "add", add_and_be_overtaken)
    tuned(mine, "one")

    assert value(mine, "one") == "theirs"
    assert store(tmp_path).record(*key("one")) is None


# Through the selector.


@dataclass
class Remembering:
    """Keeps the record that the selector told."""

    record: Record | None = None

    def __call__(self, event, **data):
        if event == "autotune_finish":
            self.record = data["record"]


@pytest.mark.parametrize("tuner", [TableTuner(), Tuner(warmup=0, iters=1)], ids=["table", "own"])
def test_a_tuning_leaves_its_record_in_the_store(tmp_path, tuner):
    """After `choose` the store has entry, summary and the very record that the tuner made."""
    kernel, told_of = Doubling(), Remembering()
    cache = store(tmp_path, cfg_type=Blocks)
    selector = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=cache, on_event=told_of)
    inv = call_of(kernel)
    chosen = selector.choose(inv, kernel)
    cache.fold()
    fresh = store(tmp_path, cfg_type=Blocks)
    found = fresh.record(*key_of(kernel, inv))
    entry = fresh.lookup(key_of(kernel, inv))

    assert found == told_of.record
    assert found.cfg == entry.cfg == chosen
    assert (entry.source, entry.objective) == ("autotune", "forward")
    assert dict(entry.summary) == told_of.record.summary()
    assert dict(entry.call) == {"args[0]": "float32[8]"}
    assert dict(entry.environment) == dict(told_of.record.environment)
    assert {trial.cfg for trial in found.trials} == {Blocks(1), Blocks(2), Blocks(4)}


def test_a_store_around_a_store_has_its_records(tmp_path):
    """Read-only and layered stores give the record of the entry that they would answer with."""
    cache = store(tmp_path)
    tuned(cache, "one")
    top = MemoryStore()

    assert ReadOnlyStore(cache).record(*key("one")) == RECORD
    assert LayeredStore(top, cache, promote=False).record(*key("one")) == RECORD
    assert LayeredStore(top, cache).record(*key("two")) is None
    top.keep(key("one"), StoredEntry(1))
    assert LayeredStore(top, cache).record(*key("one")) is None


def test_the_last_of_the_next_best_are_of_another_kind():
    """The first two differ from the winner and each other in two of five fields; the next ones in three."""
    rows = ((1, 1, 1, 1, 1), (1, 1, 1, 1, 2), (1, 1, 1, 2, 2), (1, 2, 2, 1, 1), (1, 2, 1, 1, 3), (3, 3, 3, 1, 1))
    cfgs = [dict(zip("abcde", row, strict=True)) for row in rows]
    record = Record(trials=tuple(Trial(c, samples_s=(1.0 + i,)) for i, c in enumerate(cfgs)), winner=0, space=99)

    assert record.summary()["next"] == [cfgs[2], cfgs[3], cfgs[5]]


@pytest.mark.one_leg
def test_a_large_record_costs_nothing_until_it_is_asked_for(tmp_path):
    """Twenty thousand trials lie whole beside the entry, whose own line stays as short as any."""
    cfgs = [{"m": m, "n": n} for m in range(200) for n in range(100)]
    trials = tuple(Trial(cfg, samples_s=(1.0 + i, 2.0 + i)) for i, cfg in enumerate(cfgs))
    record = Record(key={"call.args[0]": "float32[8]"}, trials=trials, winner=0, heuristic=0, space=len(cfgs))
    cache = store(tmp_path)
    tuned(cache, "one", record)
    cache.fold()
    fresh = store(tmp_path)
    summary = fresh.lookup(key("one")).summary

    assert os.path.getsize(fresh.path) < 4096
    assert summary["space"] == 20_000
    assert summary["next"] == [{"m": 1, "n": 1}, {"m": 2, "n": 2}, {"m": 3, "n": 3}, {"m": 4, "n": 4}]
    assert fresh.record(*key("one")) == record
