"""Looking after stores: verify, compact, prune, merge, export and import."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes_store import DEV, OP, cfgs, entries, entry_files, keep, key, never_small, store, told, value

from ejkernel.ops.core.errors import SettingError, StoreError
from ejkernel.ops.core.key import Key
from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.store.layered import MemoryStore, ReadOnlyStore
from ejkernel.ops.store.maintenance import compact, export_store, import_store, merge, prune, verify
from ejkernel.ops.store.persistent import StoreWarning
from ejkernel.ops.store.store import StoredEntry


def dated(cache, name, days_ago, cfg=None):
    when = (datetime.now(UTC) - timedelta(days=days_ago)).isoformat(timespec="microseconds")
    cache.keep(key(name), StoredEntry(cfg or name, when=when))


def names(cache):
    return [call_key for _, _, call_key in cache.keys()]


def tree(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# verify


def test_a_sound_store_is_verified(tmp_path, monkeypatch):
    """Every entry is counted, also those that are not folded yet."""
    cache = store(tmp_path)
    keep(cache, "folded", 1)
    never_small(monkeypatch)
    keep(cache, "pending", 2)
    found = verify(cache)

    assert (found.entries, found.pending, found.damaged, found.is_sound) == (2, 1, (), True)


def test_a_store_that_was_never_written_is_sound(tmp_path):
    """Nothing there is nothing damaged, and nothing is made."""
    assert verify(store(tmp_path)).is_sound
    assert list(tmp_path.iterdir()) == []


def test_every_damaged_piece_is_named(tmp_path, monkeypatch):
    """A line and an entry file that are not as they were written are listed; the others are counted."""
    cache = store(tmp_path)
    for name in ("one", "two"):
        keep(cache, name, {"n": name})
    never_small(monkeypatch)
    for name in ("three", "four"):
        keep(cache, name, {"n": name})
    path = Path(cache.path)
    path.write_bytes(path.read_bytes().replace(b'{"n": "one"}', b'{"n": "xxx"}'))
    broken = entry_files(path)[0]
    broken.write_bytes(broken.read_bytes()[:50])
    found = verify(store(tmp_path))

    assert not found.is_sound
    assert found.entries == 2
    assert any(str(path) in text and "one" in text for text in found.damaged)
    assert str(broken) in found.damaged


@pytest.mark.parametrize("cut", [30, 200])
def test_verify_changes_nothing(tmp_path, cut):
    """A damaged file is neither set aside nor healed by looking at it."""
    cache = store(tmp_path)
    for name in ("one", "two"):
        keep(cache, name, 1)
    path = Path(cache.path)
    path.write_bytes(path.read_bytes()[:-cut])
    before = tree(tmp_path)
    assert not verify(store(tmp_path)).is_sound

    assert tree(tmp_path) == before


# compact


def recorded(cache, name, cfg):
    record = Record(trials=(Trial(cfg, samples_s=(1.0,)),), winner=0)
    cache.keep(key(name), StoredEntry(cfg, source="autotune", summary=record.summary(), record=record))


def test_compact_folds_and_removes_records_without_an_entry(tmp_path, monkeypatch):
    """Records of entries that were replaced go; those of entries that are there stay."""
    never_small(monkeypatch)
    cache = store(tmp_path)
    recorded(cache, "one", 1)
    recorded(cache, "one", 2)
    recorded(cache, "two", 3)

    assert compact(cache) == 1
    assert entry_files(cache.path) == []
    assert [cache.record(*key(name)).cfg for name in ("one", "two")] == [2, 3]
    assert compact(cache) == 0


def test_compact_removes_records_of_pruned_entries(tmp_path):
    """After a prune nothing of the entry is left."""
    cache = store(tmp_path)
    recorded(cache, "one", 1)
    prune(cache, op_id=OP)

    assert compact(cache) == 1
    assert list((Path(cache.path + ".d") / "records").iterdir()) == []


def test_compact_keeps_what_another_process_put(tmp_path):
    """A cache that has not looked for a while does not remove the others' records."""
    mine, other = store(tmp_path), store(tmp_path)
    recorded(mine, "one", 1)
    recorded(other, "two", 2)
    recorded(other, "one", 3)

    assert compact(mine) == 1
    assert [store(tmp_path).record(*key(name)).cfg for name in ("one", "two")] == [3, 2]


# prune


def test_old_entries_are_pruned_by_age(tmp_path):
    """What is older goes, from the file and from memory; what is younger stays."""
    cache = store(tmp_path)
    for days in (100, 40, 1):
        dated(cache, f"{days} days", days)
    assert value(cache, "100 days") == "100 days"

    assert prune(cache, older_than=timedelta(days=30)) == 2
    assert names(cache) == names(store(tmp_path)) == ["1 days"]
    assert value(cache, "100 days") is None
    assert set(cfgs(cache.path)) == {"1 days"}


def test_an_entry_without_a_date_is_not_pruned_by_age(tmp_path):
    """The age of a hand-written entry is not known."""
    (tmp_path / "ops.json").write_text(f'{{"{DEV}|{OP}|one": {{"cfg": 1, "when": "yesterday"}}}}', encoding="utf-8")
    cache = store(tmp_path)

    assert prune(cache, older_than=timedelta(0)) == 0
    assert value(cache, "one") == 1


def test_entries_are_pruned_by_the_version_that_wrote_them(tmp_path):
    """Only what that version of the package wrote goes."""
    cache = store(tmp_path)
    for name in ("0.1", "0.2"):
        cache.keep(key(name), StoredEntry(1, by=f"ejkernel-ops {name}"))

    assert prune(cache, version="0.1") == 1
    assert names(cache) == ["0.2"]


def test_entries_are_pruned_by_device_and_operation(tmp_path):
    """Each setting narrows what goes: all of them must fit."""
    cache = store(tmp_path)
    keys = [Key(device, op, "x") for device in ("gpu|a", "gpu|b") for op in ("m@v1", "n@v1")]
    for each in keys:
        cache.keep(each, StoredEntry(1))

    assert prune(cache, device="gpu|a", op_id="m@v1") == 1
    assert cache.keys() == keys[1:]
    assert prune(cache, device="gpu|b") == 2
    assert cache.keys() == [keys[1]]
    assert prune(cache, op_id="n@v1") == 1
    assert cache.keys() == []


def test_entries_that_are_not_folded_yet_are_pruned_too(tmp_path, monkeypatch):
    """An entry file goes with its entry, so that it does not come back."""
    never_small(monkeypatch)
    cache = store(tmp_path)
    keep(cache, "one", 1)
    keep(cache, "one", 2)

    assert prune(cache, op_id=OP) == 1
    assert entry_files(cache.path) == []
    assert len(store(tmp_path)) == 0


def test_a_pruned_entry_is_gone_for_caches_that_had_read_it(tmp_path):
    """Another open cache stops answering with it, and can put it again."""
    mine, other = store(tmp_path), store(tmp_path)
    keep(mine, "one", 1)
    assert value(other, "one") == 1
    prune(mine, op_id=OP)
    assert value(other, "one") is None
    keep(other, "one", 2)

    assert value(mine, "one") == value(store(tmp_path), "one") == 2


def test_prune_takes_a_test_of_your_own(tmp_path):
    """It sees key and entry, and counts together with what else is given."""
    cache = store(tmp_path)
    for name, cfg in (("one", 1), ("two", 2), ("three", 3)):
        keep(cache, name, cfg)
    assert prune(cache, where=lambda key, raw: raw["cfg"] >= 2 and key.call_key != "three") == 1
    assert prune(cache, where=lambda key, raw: True, device="gpu|none") == 0

    assert sorted(key[2] for key in store(tmp_path).keys()) == ["one", "three"]


def test_prune_needs_to_know_what(tmp_path):
    """Without any setting nothing is removed, and the error says which there are."""
    cache = store(tmp_path)
    keep(cache, "one", 1)
    with pytest.raises(SettingError, match="older_than"):
        prune(cache)

    assert value(cache, "one") == 1


def test_prune_while_another_process_folds_is_an_error(tmp_path):
    """Nothing is removed, and the error says what to do."""
    import filelock

    cache = store(tmp_path)
    keep(cache, "one", 1)
    with filelock.FileLock(cache.path + ".d/fold.lock"), pytest.raises(StoreError, match="try again"):
        prune(cache, op_id=OP)

    assert value(store(tmp_path), "one") == 1


def test_prune_does_not_forget_what_waits_for_the_disk(tmp_path):
    """Entries that could not be written yet are served and written later, also after a prune."""
    place = tmp_path / "store"
    place.write_text("in the way")
    cache = store(place)
    with pytest.warns(StoreWarning):
        keep(cache, "waiting", 1)
    place.unlink()
    assert prune(cache, device="gpu|none") == 0
    assert value(cache, "waiting") == 1
    keep(cache, "later", 2)

    assert [value(store(place), name) for name in ("waiting", "later")] == [1, 2]


# merge


def measured(cfg, seconds, days_ago=0):
    when = (datetime.now(UTC) - timedelta(days=days_ago)).isoformat(timespec="microseconds")
    return StoredEntry(cfg, {"jaxlib": "0.12.0"}, "autotune", "forward", when, "by", {"seconds": seconds})


@pytest.fixture(params=["file", "memory"])
def two(request, tmp_path):
    """A store of ours and one of theirs."""
    if request.param == "memory":
        return MemoryStore(), MemoryStore()
    return store(tmp_path / "ours"), store(tmp_path / "theirs")


def test_a_merge_brings_what_is_missing(two):
    """New keys are added with all that is known about them; what only we have stays."""
    ours, theirs = two
    ours.keep(key("ours"), measured(1, 1.0))
    theirs.keep(key("theirs"), measured(2, 1.0))
    found = merge(ours, theirs)

    assert (found.added, found.replaced, found.conflicts) == (1, 0, ())
    assert ours.lookup(key("theirs")) == theirs.lookup(key("theirs"))
    assert ours.get(*key("ours")) == 1
    assert theirs.keys() == [key("theirs")]


def test_what_was_not_measured_is_imported(two):
    """An entry that was set by hand says, in our store, that it was brought here."""
    ours, theirs = two
    theirs.keep(key("one"), StoredEntry(1, source="hand"))
    merge(ours, theirs)

    assert ours.lookup(key("one")).source == "imported"


@pytest.mark.parametrize(("days", "winner", "replaced"), [(1, "ours", 0), (-1, "theirs", 1)])
def test_the_newest_wins_a_merge(two, days, winner, replaced):
    """Where both know a key and differ, the later date wins, and the key is listed."""
    ours, theirs = two
    ours.keep(key("one"), measured("ours", 1.0, 10))
    theirs.keep(key("one"), measured("theirs", 9.0, 10 + days))
    found = merge(ours, theirs, "newest")

    assert (found.added, found.replaced, found.conflicts) == (0, replaced, (key("one"),))
    assert ours.get(*key("one")) == winner


@pytest.mark.parametrize(("seconds", "winner", "replaced"), [(2.0, "ours", 0), (0.5, "theirs", 1), (None, "ours", 0)])
def test_the_fastest_wins_a_merge(two, seconds, winner, replaced):
    """By measured time, whatever the dates; what was never measured is never faster."""
    ours, theirs = two
    ours.keep(key("one"), measured("ours", 1.0, 10))
    theirs.keep(key("one"), measured("theirs", seconds, 0))
    found = merge(ours, theirs, "fastest")

    assert (found.replaced, found.conflicts) == (replaced, (key("one"),))
    assert ours.get(*key("one")) == winner


def test_equal_cfgs_are_no_conflict(two):
    """Where both have the same cfg nothing is listed or changed."""
    ours, theirs = two
    ours.keep(key("one"), measured({"n": 1}, 1.0, 5))
    theirs.keep(key("one"), measured({"n": 1}, 0.5, 0))
    before = ours.lookup(key("one"))
    found = merge(ours, theirs)

    assert (found.added, found.replaced, found.conflicts) == (0, 0, ())
    assert ours.lookup(key("one")) == before


def test_every_conflict_is_listed(two):
    """All keys on which both sides had an answer, whichever side won."""
    ours, theirs = two
    for number in range(3):
        ours.keep(key(number), measured("ours", 1.0, 2 * number))
        theirs.keep(key(number), measured("theirs", 1.0, 1))
    found = merge(ours, theirs)

    assert found.conflicts == (key(0), key(1), key(2))
    assert found.replaced == 2


def test_an_unknown_preference_changes_nothing(two):
    """The error names the two that there are."""
    ours, theirs = two
    theirs.keep(key("one"), measured(1, 1.0))
    with pytest.raises(SettingError, match="'newest' or 'fastest'"):
        merge(ours, theirs, "best")

    assert ours.keys() == []


def test_a_read_only_store_cannot_be_merged_into(tmp_path):
    """The error of the store itself says so."""
    theirs = MemoryStore()
    theirs.keep(key("one"), measured(1, 1.0))
    with pytest.raises(StoreError, match="read-only"):
        merge(ReadOnlyStore(MemoryStore()), theirs)


# export and import


def test_an_exported_file_is_a_store(tmp_path, monkeypatch):
    """Everything, folded or not, is in one file that a cache opens; the store itself is as it was."""
    never_small(monkeypatch)
    cache = store(tmp_path / "ours")
    keep(cache, "folded", 1)
    cache.fold()
    keep(cache, "pending", 2)
    before = tree(tmp_path / "ours")
    target = tmp_path / "out" / "pack.json"

    assert export_store(cache, target) == 2
    assert cfgs(target) == {"folded": 1, "pending": 2}
    assert sorted(p.name for p in target.parent.iterdir()) == ["pack.json"]
    assert tree(tmp_path / "ours") == before


def test_an_export_waits_for_nobody(tmp_path, monkeypatch):
    """While another process folds, the export has everything all the same."""
    import filelock

    never_small(monkeypatch)
    cache = store(tmp_path)
    keep(cache, "one", 1)
    with filelock.FileLock(cache.path + ".d/fold.lock"):
        assert export_store(cache, tmp_path / "pack.json") == 1

    assert cfgs(tmp_path / "pack.json") == {"one": 1}


def test_an_export_does_not_overwrite(tmp_path):
    """A file that is there stays as it is."""
    cache = store(tmp_path)
    keep(cache, "one", 1)
    target = tmp_path / "pack.json"
    target.write_text("mine")
    with pytest.raises(StoreError, match="exists"):
        export_store(cache, target)

    assert target.read_text() == "mine"


def test_an_import_brings_an_exported_file_back(tmp_path):
    """Export and import are the same entries in another store."""
    ours, theirs = store(tmp_path / "ours"), store(tmp_path / "theirs")
    theirs.keep(key("one"), measured({"n": 1}, 1.0))
    export_store(theirs, tmp_path / "pack.json")
    found = import_store(ours, tmp_path / "pack.json")

    assert (found.added, found.conflicts) == (1, ())
    assert store(tmp_path / "ours").lookup(key("one")) == theirs.lookup(key("one"))


def test_an_import_asks_who_wins(tmp_path):
    """The preference is that of a merge."""
    ours, theirs = store(tmp_path / "ours"), store(tmp_path / "theirs")
    ours.keep(key("one"), measured("ours", 2.0))
    theirs.keep(key("one"), measured("theirs", 1.0, 10))
    export_store(theirs, tmp_path / "pack.json")

    assert import_store(ours, tmp_path / "pack.json").replaced == 0
    assert import_store(ours, tmp_path / "pack.json", "fastest").replaced == 1
    assert value(ours, "one") == "theirs"


def test_an_import_of_nothing_is_an_error(tmp_path):
    """A path without a file is named."""
    with pytest.raises(StoreError, match=r"nowhere\.json is not a file"):
        import_store(store(tmp_path), tmp_path / "nowhere.json")


def test_an_import_of_a_newer_format_is_an_error(tmp_path):
    """It does not pass for an empty file."""
    theirs = store(tmp_path / "theirs")
    keep(theirs, "one", 1)
    export_store(theirs, tmp_path / "pack.json")
    pack = tmp_path / "pack.json"
    pack.write_text(pack.read_text(encoding="utf-8").replace('"~format": 1', '"~format": 2'), encoding="utf-8")
    ours = store(tmp_path / "ours")
    with pytest.raises(StoreError, match="format 2"):
        import_store(ours, pack)

    assert ours.keys() == []


def test_an_import_of_a_damaged_file_brings_its_whole_lines(tmp_path):
    """What can be read is imported, and the damage is named once."""
    theirs = store(tmp_path / "theirs")
    for name in ("one", "two"):
        keep(theirs, name, name)
    export_store(theirs, tmp_path / "pack.json")
    pack = tmp_path / "pack.json"
    pack.write_bytes(pack.read_bytes()[:-80])
    ours = store(tmp_path / "ours")
    with told() as said:
        assert import_store(ours, pack).added == 1

    assert len(said) == 1
    assert "1 entries of it were kept" in said[0]
    assert len(entries(ours.path)) == 1
