"""Small promises of a store under odd conditions: rebuilt stores, quotas, huge numbers, lines taken away by hand."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
from fakes_store import Disk, entries, keep, key, never_small, on, store, told, value

from ejkernel.ops.core.errors import ConfigTypeError, RecordFormatError
from ejkernel.ops.store import bundle, files
from ejkernel.ops.store.maintenance import prune, verify
from ejkernel.ops.store.persistent import StoreWarning
from ejkernel.ops.store.snapshot import LARGEST_SEQ, key_hash, line, seal, spell


def test_an_open_cache_notices_that_the_store_was_removed_and_rebuilt(tmp_path):
    """Also where the new counter is as long as the old one was."""
    cache = store(tmp_path)
    keep(cache, "one", "old")
    assert value(cache, "one") == "old"
    shutil.rmtree(tmp_path / "ops.json.d")
    os.unlink(tmp_path / "ops.json")
    keep(store(tmp_path), "one", "new")

    assert value(cache, "one") == "new"


def test_a_fold_works_again_after_a_quota_is_lifted(tmp_path):
    """A damaged file that could not be copied aside is copied as soon as there is room for it."""
    keep(store(tmp_path), "one", 1)
    path = tmp_path / "ops.json"
    path.write_bytes(path.read_bytes().replace(b'"cfg": 1', b'"cfg": 2'))
    disk = Disk()

    def full(number):
        if disk.log[-1] == "write":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    disk.before = full
    cache = store(tmp_path)
    with on(disk), told() as said:
        assert value(cache, "one") is None
        assert not cache.fold()
        disk.heal()
        assert cache.fold()
        keep(cache, "two", 2)

    assert "no copy can be made" in said[0]
    assert len(list(tmp_path.glob("ops.json.damaged-*"))) == 1
    assert set(entries(path)) == {spell(key("two"))}


def test_a_key_that_no_writer_makes_is_listed_as_it_stands(tmp_path):
    """`%ff` is the spelling of no text: keys, folds and prunes pass it on, and every other entry is served."""
    name = spell(key("mark")).replace("mark", "%ff")
    sealed = seal(name, {"cfg": 1, "seq": 1, "writer": "0"})
    (tmp_path / "ops.json").write_text("{\n" + line(name, sealed) + '\n"~format": 1\n}\n')
    cache = store(tmp_path)
    keep(cache, "two", 2)

    assert [call_key for _, _, call_key in cache.keys()] == ["%ff", "two"]
    assert (prune(cache, device="another"), verify(cache).entries, value(cache, "two")) == (0, 2, 2)


@pytest.mark.parametrize("limit", [1, 40, 200, 400, 900])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_files_that_may_not_grow_lose_nothing(tmp_path, monkeypatch, limit, large):
    """A limit on the size of files cuts a write in the middle, as a full disk does; later everything is written."""
    if large:
        never_small(monkeypatch)
    cache = store(tmp_path)
    keep(cache, "before", 1)
    told_of = {"before": 1}
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with told():
            for name in ("one", "two"):
                keep(cache, name, 1)
                told_of |= {name: 1} if cache.status == "read-write" else {}
            with contextlib.suppress(OSError):
                cache.fold()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)

    fresh = store(tmp_path)
    assert {name: value(fresh, name) for name in told_of} == told_of
    assert verify(fresh).is_sound
    assert list(tmp_path.rglob("*.tmp")) == []
    keep(cache, "after", 1)
    assert [value(store(tmp_path), name) for name in ("one", "two", "after")] == [1, 1, 1]


ACTS = {
    "put": lambda cache: keep(cache, "new", 1),
    "fold": lambda cache: cache.fold(),
    "get": lambda cache: value(cache, "waiting"),
    "verify": verify,
}


@pytest.mark.parametrize("act", ACTS)
def test_a_fault_at_any_operation_leaves_no_descriptor_open(tmp_path, monkeypatch, act):
    """A long program that meets a failing disk again and again does not run out of them."""
    never_small(monkeypatch)
    number, disk = 0, Disk()
    while disk.count >= number:
        number, disk = number + 1, Disk()
        place = tmp_path / str(number)
        writing = store(place)
        keep(writing, "folded", 1)
        writing.fold()
        keep(writing, "waiting", 2)
        cache = store(place)
        before = os.listdir("/proc/self/fd")
        disk.fail_at(number, errno.EIO)
        with on(disk), told(), contextlib.suppress(OSError):
            ACTS[act](cache)
        assert len(os.listdir("/proc/self/fd")) == len(before), (number, disk.log[number - 1])

    assert number > 5


def test_a_number_of_thousands_of_digits_is_a_type_error(tmp_path):
    """As the contract says of what is not JSON; nothing changes in memory or on disk."""
    cache = store(tmp_path)
    with pytest.raises(ConfigTypeError, match=r"thousands of digits|cannot be written"):
        keep(cache, "one", {"n": 10**5000})

    assert value(cache, "one") is None
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_a_hand_took_away_stays_away(tmp_path):
    """Entry files that were folded lately do not bring it back, neither now nor after the next fold."""
    cache = store(tmp_path)
    keep(cache, "one", 1)
    keep(cache, "two", 2)
    path = Path(cache.path)
    path.write_text("".join(row for row in path.read_text().splitlines(keepends=True) if "|one" not in row))

    assert (value(store(tmp_path), "one"), value(store(tmp_path), "two")) == (None, 2)
    keep(cache, "three", 3)
    assert (value(store(tmp_path), "one"), value(cache, "one"), value(cache, "two")) == (None, None, 2)


def test_what_another_fold_lost_is_found_and_folded_again(tmp_path, monkeypatch):
    """An older snapshot that a slower process put over the new one, as without locks: nothing is missing."""
    cache = store(tmp_path)
    keep(cache, "one", 1)
    stale = files.read(cache.path).data
    keep(cache, "two", 2)
    files.write(cache.path, stale, durable=False, announce=cache._entry_log._announce)

    assert value(store(tmp_path), "two") == 2
    keep(store(tmp_path), "three", 3)
    assert {name.rsplit("|", 1)[1] for name in entries(cache.path)} == {"one", "two", "three"}


@pytest.mark.parametrize("told_seq", [7, LARGEST_SEQ + 1], ids=["another number", "over the limit"])
def test_an_entry_file_that_is_not_what_its_name_says_is_damage(tmp_path, monkeypatch, told_seq):
    """A number that stands in the name alone, or is no count, makes no later put lose."""
    never_small(monkeypatch)
    cache = store(tmp_path)
    keep(cache, "other", 0)
    name = spell(key("one"))
    raw = seal(name, {"cfg": "evil", "seq": told_seq, "writer": "f" * 16})
    seq = 10**17 if told_seq == 7 else told_seq
    path = Path(cache.path + ".d", f"{key_hash(name)}.{seq}.{'f' * 16}.json")
    path.write_text(line(name, raw))
    fresh = store(tmp_path)
    with pytest.warns(StoreWarning, match="set aside"):
        keep(fresh, "one", "mine")

    assert (fresh.status, value(store(tmp_path), "one")) == ("read-write", "mine")


def test_a_put_that_no_reader_would_get_is_not_acknowledged(tmp_path, monkeypatch):
    """A folder that swallows what is written into it is named, and the put is served from memory."""
    cache = store(tmp_path)
    keep(cache, "one", 1)
    monkeypatch.setattr(cache._entry_log, "holds", lambda key, sealed: False)
    with pytest.warns(StoreWarning, match="does not keep what is written"):
        keep(cache, "two", 2)

    assert (cache.status, value(cache, "two")) == ("memory-only", 2)


@pytest.mark.parametrize("text", ["1e999", "[" * 200_000, '{"a":' * 50_000, "9" * 10_000], ids=len)
@pytest.mark.parametrize("kind", ["pack", "lock"])
def test_a_pack_of_brackets_or_huge_numbers_is_an_error_that_names_it(tmp_path, kind, text):
    """Without a crash of the interpreter, whatever its depth."""
    path = tmp_path / "file.json"
    path.write_text('{"a|b|c": {"cfg": ' + text)
    with pytest.raises(RecordFormatError, match=r"file\.json"):
        bundle.read(kind, str(path))


@pytest.mark.parametrize("megabytes", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_line_of_many_megabytes_is_damage_within_bounded_memory(tmp_path, megabytes):
    """The rest of the file is read, and memory stays at a few times the file."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = store(tmp_path)
    keep(cache, "one", 1)
    path = Path(cache.path)
    rows = path.read_text().splitlines()
    big = '"gpu|x|y|z": {"cfg": "' + "x" * (megabytes << 20) + '"},'
    path.write_text("\n".join([rows[0], big, *rows[1:]]) + "\n")
    with pytest.warns(StoreWarning, match="damaged"):
        assert value(store(tmp_path), "one") == 1

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * megabytes << 10


def test_numbers_out_of_range_in_a_line_are_damage(tmp_path):
    """1e999 is no number that JSON can give back, whatever the checksum says."""
    cache = store(tmp_path)
    keep(cache, "one", 1)
    path = Path(cache.path)
    path.write_text(path.read_text().replace('"cfg": 1', '"cfg": 1e999'))
    with pytest.warns(StoreWarning, match="damaged"):
        assert value(store(tmp_path), "one") is None
    assert json.loads(path.read_text())
