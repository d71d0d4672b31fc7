"""A disk that fails at any one operation of a put, a get or a fold costs nothing that was acknowledged.

Covers `store/files.py`.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes_store import ERRORS, Disk, entries, entry_files, keep, never_small, on, store, told, value, write_large
from thinning import AT_LENGTH, any_two

from ejkernel.ops.core.errors import StoreError
from ejkernel.ops.store import files
from ejkernel.ops.store.persistent import StoreWarning

NAMES = [errno.errorcode[code] for code in ERRORS]


@dataclass
class Try:
    """One act on a disk with a fault, and what it was told."""

    folder: Path
    disk: Disk
    on_fault: str = "warn"
    late: bool = False
    # What was acknowledged, by name; and what was put without being acknowledged.
    kept: dict[str, Any] = field(default_factory=dict)
    maybe: dict[str, Any] = field(default_factory=dict)
    raised: list[StoreError] = field(default_factory=list)

    def put(self, cache, name, cfg):
        try:
            keep(cache, name, cfg)
            acknowledged = cache.status == "read-write"
        except StoreError as error:
            assert self.on_fault == "raise"
            self.raised.append(error)
            acknowledged = False
        if acknowledged:
            self.kept[name] = cfg
            self.maybe.pop(name, None)
        else:
            self.maybe[name] = cfg


def prepare(folder):
    """A store with three entries, two of them folded and one in its own file."""
    cache = store(folder)
    for name in ("old", "same"):
        keep(cache, name, name)
    cache.fold()
    keep(cache, "pending", "pending")


def put(attempt):
    cache = store(attempt.folder, on_fault=attempt.on_fault)
    yield cache
    attempt.put(cache, "new", "new")
    attempt.put(cache, "same", "changed")
    yield cache


def get(attempt):
    cache = store(attempt.folder, on_fault=attempt.on_fault)
    yield cache
    for name in ("old", "pending", "unknown", "same"):
        try:
            found = value(cache, name)
        except StoreError as error:
            assert attempt.on_fault == "raise"
            attempt.raised.append(error)
            continue
        assert found in (None, attempt.kept.get(name))
    yield cache


def get_again(attempt):
    """As a reader that has the store open when another process puts."""
    cache = store(attempt.folder, on_fault=attempt.on_fault)
    assert value(cache, "old") == "old"
    attempt.put(store(attempt.folder), "same", "changed")
    yield cache
    for name in ("old", "same", "pending"):
        try:
            found = value(cache, name)
        except StoreError as error:
            attempt.raised.append(error)
            continue
        # Where the disk cannot be asked, what this process knew before is served.
        assert found in (None, attempt.kept.get(name), "same")
    yield cache


def fold(attempt):
    cache = store(attempt.folder, on_fault=attempt.on_fault)
    for number in range(3):
        attempt.put(cache, f"waiting{number}", number)
    yield cache
    try:
        cache.fold()
    except StoreError as error:
        assert attempt.on_fault == "raise"
        attempt.raised.append(error)
    yield cache


def one_try(folder, act, number, code, *, on_fault="warn", stays=False, late=False):
    """Runs an act with a fault at one operation; says whether that operation was reached."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    prepare(folder)
    attempt = Try(folder, Disk(), on_fault, late, {"old": "old", "same": "same", "pending": "pending"})
    before = dict(attempt.kept)
    steps = act(attempt)
    with told(), on(attempt.disk):
        cache = next(steps)
        started = attempt.disk.count
        attempt.disk.fail_at(number, code, stays=stays, late=late)
        next(steps)
        attempt.disk.heal()
    done = attempt.disk.count - started
    check(attempt, before)
    recovers(attempt, cache)
    return done >= number


def check(attempt, before):
    """Everything acknowledged is there for the next process, and nothing else than what was put."""
    fresh = store(attempt.folder)
    for name, cfg in attempt.kept.items():
        allowed = [cfg] + ([attempt.maybe[name]] if name in attempt.maybe else [])
        assert value(fresh, name) in allowed, (name, attempt.disk.log)
    for name, cfg in attempt.maybe.items():
        assert value(fresh, name) in (None, cfg, before.get(name))
    entries(attempt.folder / "ops.json")


def recovers(attempt, cache):
    """On a disk that works again the same cache writes everything, also what had to wait."""
    keep(cache, "after", "after")
    cache.fold()
    assert (cache.status, cache.reason) == ("read-write", "")
    expected = {**attempt.kept, "after": "after"}
    # With "raise" the caller was told, and may have put something else since.
    expected |= attempt.maybe if attempt.on_fault == "warn" else {}
    fresh = store(attempt.folder)
    for name, cfg in expected.items():
        if name in attempt.maybe and attempt.on_fault == "raise":
            continue
        assert value(cache, name) == cfg
        assert value(fresh, name) == cfg
    assert set(expected) <= {name.rsplit("|", 1)[1] for name in entries(attempt.folder / "ops.json")}
    # An open that fails after the deed leaves a file that no process knows of; a fold sweeps it when it is old.
    assert attempt.late or [p.name for p in attempt.folder.rglob("*.tmp")] == []
    assert entry_files(cache.path) == []


def every_operation(folder, act, codes, **more):
    """Fails each operation in turn until the act ends before the fault; says how many that were."""
    number = 1
    while True:
        reached = [one_try(folder, act, number, code, **more) for code in codes(number)]
        if not any(reached):
            return number - 1
        number += 1


def in_turn(number):
    return [ERRORS[number % len(ERRORS)]]


def all_of_them(number):
    return ERRORS


ACTS = [put, get, get_again, fold]
WAYS = {"fails": {}, "fails after the deed": {"late": True}, "raises": {"on_fault": "raise"}}
SIZES = {"small": "small", "large": "large"}
BY_NAME = {act.__name__.replace("_", " "): act for act in ACTS}


@pytest.fixture(params=SIZES)
def size(request, monkeypatch):
    """The file is rewritten at every put, or only by folds."""
    if request.param == "large":
        never_small(monkeypatch)
    return request.param


@pytest.mark.one_leg
@pytest.mark.parametrize(("act", "way", "size"), any_two(BY_NAME, WAYS, SIZES), indirect=["size"])
def test_a_fault_at_any_operation_loses_nothing(tmp_path, act, way, size):
    """One operation fails: no other exception, nothing acknowledged is lost, and the cache recovers."""
    count = every_operation(tmp_path / "store", act, in_turn, **way)

    assert count >= 5


@AT_LENGTH
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__.replace("_", " "))
def test_every_fault_at_any_operation_loses_nothing(tmp_path, act, way, size):
    """The same with every kind of fault at every operation."""
    count = every_operation(tmp_path / "store", act, all_of_them, **way)

    assert count >= 5
    print(f"\nfaults, {act.__name__}, {size}, {way}: {count} operations x {len(ERRORS)} errors, lost 0")


@pytest.mark.one_leg
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__.replace("_", " "))
def test_a_disk_that_breaks_for_good_loses_nothing(tmp_path, act, size):
    """From one operation on everything fails, and then works again: what was acknowledged before is there."""
    for number in (1, 2, 3, 5, 8, 13, 21, 34):
        folder = tmp_path / str(number)
        folder.mkdir()
        prepare(folder)
        attempt = Try(folder, Disk(), kept={"old": "old", "same": "same", "pending": "pending"})
        before = dict(attempt.kept)
        steps = act(attempt)
        with told(), on(attempt.disk):
            cache = next(steps)
            attempt.disk.fail_at(number, ERRORS[number % len(ERRORS)], stays=True)
            next(steps)
            attempt.disk.heal()
        check(attempt, before)
        for left in folder.rglob("*.tmp"):
            left.unlink()
        recovers(attempt, cache)


@pytest.mark.parametrize("code", ERRORS, ids=NAMES)
def test_a_put_that_fails_is_served_from_memory_and_named_once(tmp_path, code):
    """The warning has path, reason and setting; the second failing put adds none."""
    cache = store(tmp_path)
    keep(cache, "old", 1)
    disk = Disk()
    with on(disk), told() as said:
        disk.fail_at(1, code, stays=True)
        keep(cache, "one", 1)
        keep(cache, "two", 2)
        status, reason = cache.status, cache.reason
        found = value(cache, "one"), value(cache, "two"), value(cache, "old")

    assert len(said) == 1
    text = said[0]
    assert cache.path in text
    assert "EJKERNEL_PERSISTENT_CACHE_DIR" in text
    assert os.strerror(code) in text
    assert os.strerror(code) in reason
    assert status != "read-write"
    assert found == (1, 2, 1)


@pytest.mark.parametrize("code", ERRORS, ids=NAMES)
def test_on_fault_raise_raises_instead(tmp_path, code):
    """A `StoreError`, which is an `OSError`, says the same; nothing is warned about."""
    cache = store(tmp_path, on_fault="raise")
    keep(cache, "old", 1)
    disk = Disk()
    with on(disk):
        disk.fail_at(1, code, stays=True)
        with pytest.raises(StoreError, match=os.strerror(code)) as caught:
            keep(cache, "one", 1)

    assert isinstance(caught.value, OSError)
    assert value(store(tmp_path), "old") == 1


@pytest.mark.parametrize("code", ERRORS, ids=NAMES)
def test_a_reader_recovers_without_a_put(tmp_path, code):
    """After a failed look the status says so; after the next that works it says that all is well."""
    keep(store(tmp_path), "old", 1)
    cache = store(tmp_path)
    disk = Disk()
    with on(disk), told() as said:
        disk.fail_at(1, code, stays=True)
        assert value(cache, "old") is None
        assert cache.status == "memory-only"
        disk.heal()
        assert value(cache, "old") == 1

    assert (cache.status, cache.reason, len(said)) == ("read-write", "", 1)


def test_a_put_that_fails_again_and_again_leaves_no_files_behind(tmp_path, monkeypatch):
    """While the counter of changes cannot be written, retries do not pile up entry files."""
    never_small(monkeypatch)
    cache = store(tmp_path)
    keep(cache, "old", 1)
    counter = cache._entry_log.counter
    os.unlink(counter)
    os.mkdir(counter)
    with told() as said:
        for number in range(4):
            keep(cache, f"new{number}", number)

    assert (cache.status, len(said)) == ("memory-only", 1)
    assert len(entry_files(cache.path)) == 1
    os.rmdir(counter)
    keep(cache, "last", 9)
    assert [value(store(tmp_path), f"new{number}") for number in range(4)] == list(range(4))


@pytest.mark.parametrize("kind", ["keys", "record", "len"])
def test_other_questions_survive_a_fault_too(tmp_path, kind, monkeypatch):
    """`keys`, `len` and `record` have an answer on a failing disk: what this process knows."""
    never_small(monkeypatch)
    cache = store(tmp_path)
    keep(cache, "old", 1)
    number = 1
    while True:
        disk = Disk()
        with on(disk), told():
            disk.fail_at(number, errno.EIO)
            if kind == "record":
                assert cache.record("gpu|NVIDIA H200", "matmul@v2", "old") is None
            else:
                assert len(cache.keys()) == 1 if kind == "keys" else len(cache) == 1
        if disk.count < number:
            break
        number += 1

    assert number > 1


def test_a_full_disk_while_a_large_store_is_folded_keeps_the_old_file(tmp_path):
    """A snapshot that does not fit any more is not replaced; its new entries are safe in their own files."""
    write_large(tmp_path / "ops.json")
    cache = store(tmp_path)
    keep(cache, "new", 1)
    before = (tmp_path / "ops.json").read_bytes()
    disk = Disk()

    def full(number):
        if disk.log[-1] == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.before = full
    with on(disk), pytest.warns(StoreWarning, match="safe in"):
        assert not cache.fold()

    assert (tmp_path / "ops.json").read_bytes() == before
    assert value(store(tmp_path), "new") == 1
    assert cache.fold()


def test_a_lock_that_cannot_be_taken_does_not_stop_puts(tmp_path):
    """A folder where the lock should be keeps the file from being folded, and nothing else."""
    cache = store(tmp_path)
    keep(cache, "one", 1)
    lock = Path(cache.path + ".d") / "fold.lock"
    lock.unlink(missing_ok=True)
    lock.mkdir()
    with told() as said:
        keep(cache, "two", 2)
        keep(cache, "three", 3)

    assert (len(said), cache.status) == (1, "read-write")
    assert "could not be brought up to date" in said[0]
    assert [value(store(tmp_path), name) for name in ("one", "two", "three")] == [1, 2, 3]
    lock.rmdir()
    keep(cache, "four", 4)
    assert len(entries(cache.path)) == 4


def test_a_peer_whose_lock_does_not_lock_costs_nothing(tmp_path, monkeypatch):
    """An older snapshot put over ours while we remove entry files: what it lacks goes back into its file."""
    never_small(monkeypatch)
    cache = store(tmp_path)
    keep(cache, "one", 1)
    cache.fold()
    older = (tmp_path / "ops.json").read_bytes()
    keep(cache, "two", 2)
    disk = Disk()

    def peer(number):
        if disk.log[-1] == "unlink" and (tmp_path / "ops.json").read_bytes() != older:
            (tmp_path / "peer").write_bytes(older)
            os.replace(tmp_path / "peer", tmp_path / "ops.json")

    disk.after = peer
    with on(disk):
        cache.fold()

    assert [value(store(tmp_path), name) for name in ("one", "two")] == [1, 2]
    assert value(cache, "two") == 2


def test_a_look_that_fails_does_not_forget_what_was_known(tmp_path):
    """A disk whose folder cannot be listed for a moment costs no answer that this process had."""
    cache, other = store(tmp_path), store(tmp_path)
    keep(cache, "one", 1)
    assert value(cache, "one") == 1
    keep(other, "two", 2)
    disk = Disk()

    def refuse(number):
        if disk.log[-1] in ("listdir", "open"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.before = refuse
    with on(disk), told() as said:
        assert [value(cache, "one"), value(cache, "one")] == [1, 1]

    assert len(said) == 1
    assert [value(cache, name) for name in ("one", "two")] == [1, 2]


@pytest.mark.parametrize("held", ["nothing of the key", "an older entry of the key"])
def test_a_fold_never_removes_what_the_snapshot_does_not_hold(tmp_path, monkeypatch, held):
    """On a disk without locks another process puts its own snapshot over ours before it is read back."""
    never_small(monkeypatch)
    cache = store(tmp_path)
    keep(cache, "first", 1)
    if held == "an older entry of the key":
        keep(cache, "second", 1)
    cache.fold()
    theirs = Path(cache.path).read_bytes()
    keep(cache, "second", 2)
    [pending] = entry_files(cache.path)
    real = files.write

    def write(path, data, **more):
        real(path, data, **more)
        if str(path) == cache.path:
            Path(cache.path).write_bytes(theirs)

    monkeypatch.setattr(files, "write", write)
    cache.fold()
    monkeypatch.undo()

    assert pending.exists()
    assert [value(store(tmp_path), name) for name in ("first", "second")] == [1, 2]
