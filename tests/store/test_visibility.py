"""What is seen, and when: by other processes, in the file itself, and the state that the store is in.

Covers `store/entry_log.py` and `store/entry_reader.py`.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from fakes import child
from fakes_store import DEV, OP, Disk, cfgs, entries, entry_files, keep, key, on, store, told, value, write_large

from ejkernel.ops import PersistentCache
from ejkernel.ops.core.errors import SettingError, StoreError
from ejkernel.ops.store import entry_log, entry_reader
from ejkernel.ops.store.maintenance import export_store
from ejkernel.ops.store.persistent import StoreWarning


@pytest.fixture(params=["small", "large"])
def folder(request, tmp_path):
    """Where a store is, of either size."""
    if request.param == "large":
        write_large(tmp_path / "ops.json")
    return tmp_path


# Between processes.

# Does what it is told, one line at a time, and answers with a line of JSON.
SERVANT = """
import json, sys
from ejkernel.ops import PersistentCache
cache = PersistentCache(sys.argv[1])
for line in sys.stdin:
    act, *args = json.loads(line)
    answer = getattr(cache, act)(*args)
    print(json.dumps([answer, cache.status]), flush=True)
"""


def ask(servant, act, *args):
    servant.stdin.write(json.dumps([act, *args]) + "\n")
    servant.stdin.flush()
    answer, status = json.loads(servant.stdout.readline())
    assert status == "read-write"
    return answer


@pytest.mark.parametrize("seen", ["get", "keys", "export"])
def test_a_slow_reader_finds_a_key_that_is_put_and_folded_all_the_time(folder, monkeypatch, seen):
    """Whenever it comes to read an entry file, a peer has put again and folded that file away."""
    monkeypatch.setattr(entry_reader, "SMALL", -1)
    reader, peer = store(folder), store(folder)
    for name in ("one", "two"):
        keep(peer, name, 1)
    reads = []

    def late(file_name, entry=reader._entry_log._entry):
        reads.append(file_name)
        keep(peer, "one", len(reads) + 1)
        assert peer.fold()
        keep(peer, "one", len(reads) + 1)
        return entry(file_name)

    monkeypatch.setattr(reader._entry_log, "_entry", late)
    if seen == "get":
        assert value(reader, "one") > 1
    elif seen == "keys":
        assert {tuple(key("one")), tuple(key("two"))} <= set(reader.keys())
    else:
        export_store(reader, folder / "exported.json")
        assert cfgs(folder / "exported.json").items() >= {("two", 1)}
        assert cfgs(folder / "exported.json")["one"] > 1
    assert reads
    assert reader.status == "read-write"


def test_what_was_pruned_and_put_again_is_found_by_a_reader_with_an_old_listing(folder, monkeypatch):
    """Its entry file is gone and the snapshot has nothing as new: then the folder is looked at once more."""
    monkeypatch.setattr(entry_reader, "SMALL", -1)
    reader, peer = store(folder), store(folder)
    for number in range(5):
        keep(peer, "one", number)
    reader._entry_log.list_entries()
    peer._entry_log.fold(lambda key, raw: True)
    keep(store(folder), "one", "again")

    assert reader._entry_log.find(key("one")).raw["cfg"] == "again"


def test_a_put_is_seen_by_a_process_that_has_the_store_open(folder):
    """New keys and known ones, there and back, as soon as the put has returned."""
    mine = store(folder)
    with child(SERVANT, mine.path) as servant:
        assert ask(servant, "get", DEV, OP, "one") is None
        assert value(mine, "one") is None
        keep(mine, "one", 1)
        assert ask(servant, "get", DEV, OP, "one") == 1
        # A key that both know by now.
        ask(servant, "put", DEV, OP, "one", 2)
        assert value(mine, "one") == 2
        keep(mine, "one", 3)
        assert ask(servant, "get", DEV, OP, "one") == 3
        ask(servant, "fold")
        assert value(mine, "one") == 3
        ask(servant, "put", DEV, OP, "two", 4)
        mine.fold()
        assert (value(mine, "one"), value(mine, "two")) == (3, 4)
        assert ask(servant, "get", DEV, OP, "two") == 4


def test_a_known_key_is_seen_to_change_at_every_put(folder):
    """A reader that asks after each put of another cache always has the newest, however fast they come."""
    reader, writer = store(folder), store(folder)
    for number in range(50):
        keep(writer, "one", number)
        assert value(reader, "one") == number


def test_a_change_is_seen_also_when_it_came_during_our_own_fold(tmp_path):
    """A put of another cache between our look and our fold is not hidden by what we knew before."""
    mine, other = store(tmp_path), store(tmp_path)
    keep(mine, "one", "old")
    assert value(mine, "one") == "old"
    keep(other, "one", "new")
    mine.fold()

    assert value(mine, "one") == "new"


def test_a_file_replaced_twice_within_a_tick_is_seen(tmp_path):
    """Every file that is written can be told from every other, even where inodes are used again."""
    from ejkernel.ops.store import files

    path = str(tmp_path / "file")
    seen = set()
    for number in range(200):
        files.write(path, b"%03d" % number, durable=False)
        seen.add(files.identity(path)[2:])

    assert len(seen) == 200


def test_a_hand_edited_file_is_seen_for_keys_that_are_not_in_memory(tmp_path):
    """An editor moves no counter; a key that was not asked for yet is found all the same."""
    cache = store(tmp_path)
    keep(cache, "one", 1)
    path = Path(cache.path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    whole[f"{DEV}|{OP}|two"] = {"cfg": 2}
    path.write_text(json.dumps(whole, indent=2), encoding="utf-8")

    assert value(cache, "two") == 2


# The file.


def test_a_small_file_is_up_to_date_after_every_put(tmp_path):
    """`json.load` sees each put at once, also those that replace an entry."""
    cache = store(tmp_path)
    for number in range(20):
        keep(cache, number % 7, number)
        assert cfgs(cache.path)[str(number % 7)] == number
        assert len(cfgs(cache.path)) == min(number + 1, 7)
    assert entry_files(cache.path) == []


def test_a_large_file_is_up_to_date_after_a_fold(tmp_path):
    """Past the threshold a put leaves the file alone; a fold brings everything into it."""
    write_large(tmp_path / "ops.json")
    cache = store(tmp_path)
    before = Path(cache.path).read_bytes()
    keep(cache, "one", 1)
    assert Path(cache.path).read_bytes() == before
    assert len(entry_files(cache.path)) == 1

    assert cache.fold()
    assert cfgs(cache.path)["one"] == 1
    assert entry_files(cache.path) == []


def test_a_large_file_is_up_to_date_after_a_close(tmp_path):
    """A close folds, and the cache can still be used."""
    write_large(tmp_path / "ops.json")
    cache = store(tmp_path)
    keep(cache, "one", 1)
    cache.close()
    assert cfgs(cache.path)["one"] == 1
    keep(cache, "two", 2)

    assert (value(cache, "one"), value(cache, "two")) == (1, 2)


def test_a_file_grows_past_the_threshold_and_nothing_is_missed(tmp_path):
    """While it is small every put is in it; after that it is folded now and then."""
    cache = store(tmp_path)
    number = 0
    while not entry_files(cache.path):
        keep(cache, number, {"pad": "x" * 1000})
        number += 1
    assert os.path.getsize(cache.path) > entry_reader.SMALL
    assert len(cfgs(cache.path)) == number - 1
    assert len(store(tmp_path)) == number


def test_entry_files_do_not_gather_for_ever(tmp_path, monkeypatch):
    """Past the threshold enough pending entries bring a fold by themselves."""
    monkeypatch.setattr(entry_log, "_PENDING", 10)
    write_large(tmp_path / "ops.json")
    cache = store(tmp_path)
    most = 0
    for number in range(35):
        keep(cache, number, number)
        most = max(most, len(entry_files(cache.path)))

    assert 0 < most <= 10
    assert sum(str(number) in cfgs(cache.path) for number in range(35)) >= 30


WRITER = """
import sys
from pathlib import Path
from fakes_store import keep, store
cache = store(Path(sys.argv[1]))
for number in range(120):
    keep(cache, number % 60, {"n": number, "pad": "x" * 900})
cache.close()
print("done", flush=True)
"""


def test_the_file_can_be_loaded_at_any_moment(tmp_path, monkeypatch):
    """While another process puts and folds, `json.load` never fails and never sees fewer entries than before."""
    path = tmp_path / "ops.json"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" + WRITER
    loaded, most = 0, 0
    with child(code, str(tmp_path)) as writer:
        while writer.poll() is None:
            if path.exists():
                found = list(entries(path))
                assert found == sorted(found)
                assert len(found) >= most
                loaded, most = loaded + 1, len(found)
        assert writer.stdout.read() == "done\n"

    assert loaded > 0
    assert len(entries(path)) == 60


def test_the_file_is_sorted_with_one_entry_a_line(folder):
    """Each entry's line is JSON by itself, up to the comma at its end, and the lines are in order."""
    cache = store(folder)
    for name in ("b", "a", "new\nline", "\u2028", "C"):
        keep(cache, name, {"text": "a\nb\u2028c\x85"})
    cache.fold()
    lines = Path(cache.path).read_text(encoding="utf-8").split("\n")
    found = list(entries(cache.path))

    assert (lines[0], lines[-3:]) == ("{", ['"~format": 1', "}", ""])
    assert [next(iter(json.loads("{" + line[:-1] + "}"))) for line in lines[1:-3]] == found == sorted(found)


def test_an_unchanged_store_is_not_written_again(folder):
    """A fold with nothing to fold leaves the file as it is, down to its times."""
    cache = store(folder)
    keep(cache, "one", 1)
    cache.fold()
    before = os.stat(cache.path)
    cache.fold()
    cache.close()
    after = os.stat(cache.path)

    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_put_changes_one_line(tmp_path):
    """A diff of two versions of the file shows the entries that changed and no other."""
    cache = store(tmp_path)
    for number in range(5):
        keep(cache, number, number)
    before = Path(cache.path).read_text(encoding="utf-8").split("\n")
    keep(cache, 3, "new")
    after = Path(cache.path).read_text(encoding="utf-8").split("\n")

    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_get_and_an_opened_store_write_nothing(folder):
    """A process that only reads leaves the folder as it was."""
    before = sorted(p.name for p in folder.rglob("*"))
    cache = store(folder)
    assert value(cache, "unknown") is None
    cache.keys()
    cache.close()

    assert sorted(p.name for p in folder.rglob("*")) == before


# The state.


def test_a_new_store_is_read_write_without_a_reason(tmp_path):
    """Before and after a put that worked."""
    cache = store(tmp_path)
    assert (cache.status, cache.reason) == ("read-write", "")
    keep(cache, "one", 1)
    assert (cache.status, cache.reason) == ("read-write", "")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "read-only"),
        (errno.ENOSPC, "memory-only"),
        (errno.EIO, "memory-only"),
    ],
    ids=["EROFS", "EACCES", "ENOSPC", "EIO"],
)
def test_a_store_that_can_be_read_and_not_written_says_so(tmp_path, code, status):
    """A closed disk makes it read-only, a broken or full one memory-only; one warning names path and setting."""
    cache = store(tmp_path)
    keep(cache, "one", 1)
    disk = Disk()

    def refuse(number):
        if disk.log[-1] == "write":
            raise OSError(code, os.strerror(code))

    disk.before = refuse
    with on(disk), told() as said:
        keep(cache, "two", 2)
        keep(cache, "three", 3)
        assert [value(cache, name) for name in ("one", "two", "three")] == [1, 2, 3]

    assert cache.status == status
    assert os.strerror(code) in cache.reason
    assert cache.path in cache.reason
    assert len(said) == 1
    assert all(part in said[0] for part in (status, cache.path, "EJKERNEL_PERSISTENT_CACHE_DIR", "path="))


def test_what_had_to_wait_is_written_when_the_disk_works_again(tmp_path):
    """The next put, or a close, writes everything, and the status recovers."""
    place = tmp_path / "store"
    place.write_text("in the way")
    for recover in (lambda cache: keep(cache, "later", 9), lambda cache: cache.close()):
        cache = store(place)
        with told() as said:
            keep(cache, "one", 1)
            keep(cache, "two", 2)
        assert (cache.status, len(said)) == ("memory-only", 1)
        assert cache.keys() == [key("one"), key("two")]
        place.unlink()
        recover(cache)
        assert (cache.status, cache.reason) == ("read-write", "")
        assert [value(store(place), name) for name in ("one", "two")] == [1, 2]
        import shutil

        shutil.rmtree(place)
        place.write_text("in the way")


def test_on_fault_raise_is_an_error_with_the_same_words(tmp_path):
    """Nothing is warned about; the error names path and setting."""
    (tmp_path / "file").write_text("in the way")
    cache = store(tmp_path / "file", on_fault="raise")
    with pytest.raises(StoreError, match="EJKERNEL_PERSISTENT_CACHE_DIR") as caught:
        keep(cache, "one", 1)

    assert "memory-only" in str(caught.value)
    assert cache.status == "memory-only"


def test_on_fault_has_two_values(tmp_path):
    """Another one is refused when the cache is made."""
    with pytest.raises(SettingError, match="'warn' or 'raise'"):
        PersistentCache("ops", tmp_path / "ops.json", on_fault="ignore")


def test_a_removed_folder_is_made_again(folder):
    """A user that removes everything under an open cache loses what was there, and the cache goes on."""
    import shutil

    cache = store(folder)
    keep(cache, "one", 1)
    shutil.rmtree(folder)
    assert value(cache, "one") is None
    keep(cache, "two", 2)
    cache.fold()

    assert cfgs(cache.path) == {"two": 2}
    assert cache.status == "read-write"


# Loss of power.


def durable_log(folder, act):
    """What was synced and renamed, in order, with the names of files."""
    cache = store(folder, durable=True)
    log, names = [], {}
    real_open, real_fsync, real_rename = os.open, os.fsync, os.rename
    disk = Disk()

    def whole(name, folder):
        return str(name) if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)

    def opening(path, *args, dir_fd=None):
        descriptor = real_open(path, *args, dir_fd=dir_fd)
        names[descriptor] = whole(path, dir_fd)
        return descriptor

    def syncing(descriptor):
        log.append(("sync", names[descriptor]))
        real_fsync(descriptor)

    def renaming(old, new, *, src_dir_fd, dst_dir_fd):
        log.append(("rename", whole(new, dst_dir_fd)))
        real_rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    disk.open, disk.fsync, disk.rename = opening, syncing, renaming
    with on(disk):
        act(cache)
    return cache, log


def test_durable_syncs_the_entry_and_its_folder_before_it_acknowledges(tmp_path):
    """The file before it takes its name, the folder after, and the folder above where the folder is new."""
    write_large(tmp_path / "ops.json")
    cache, log = durable_log(tmp_path, lambda cache: keep(cache, "one", 1))
    (entry,) = entry_files(cache.path)
    folder = cache.path + ".d"

    assert [act for act, _ in log] == ["sync", "sync", "rename", "sync"]
    assert log[0] == ("sync", str(tmp_path))
    assert log[1][1].startswith(f"{folder}/.{entry.name}.")
    assert log[2:] == [("rename", str(entry)), ("sync", folder)]


def test_durable_syncs_the_file_before_entry_files_are_removed(tmp_path):
    """A fold has the new file and its name on disk before it removes anything."""
    cache, log = durable_log(tmp_path, lambda cache: keep(cache, "one", 1))
    place = log.index(("rename", cache.path))

    assert log[place - 1][0] == "sync"
    assert log[place - 1][1].startswith(str(tmp_path / ".ops.json."))
    assert log[place + 1] == ("sync", str(tmp_path))
    assert entry_files(cache.path) == []


def test_without_durable_nothing_is_synced(tmp_path, monkeypatch):
    """A put does not wait for the disk unless it is asked to."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("synced"))
    keep(store(tmp_path), "one", 1)


@pytest.mark.parametrize("act", ["fsync"])
def test_a_durable_put_that_cannot_be_synced_is_not_acknowledged(tmp_path, act):
    """A failing sync is a failing write."""
    cache = store(tmp_path, durable=True)
    keep(cache, "one", 1)
    disk = Disk()

    def refuse(number):
        if disk.log[-1] == act:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.before = refuse
    with on(disk), pytest.warns(StoreWarning, match="cannot be written"):
        keep(cache, "two", 2)

    assert (cache.status, value(cache, "two")) == ("memory-only", 2)
    keep(cache, "three", 3)
    assert [value(store(tmp_path), name) for name in ("one", "two", "three")] == [1, 2, 3]
