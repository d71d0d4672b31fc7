"""A snapshot that is checked piece by piece is judged as it is when it is read as a whole."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
from fakes_store import filler, keep, never_small, store, write_large

from ejkernel.ops.core import plain_file
from ejkernel.ops.store import entry_reader, snapshot_check
from ejkernel.ops.store.maintenance import prune, verify
from ejkernel.ops.store.snapshot import spell
from ejkernel.ops.store.snapshot_check import check_snapshot

pytestmark = pytest.mark.one_leg


@pytest.fixture(params=[100, 1000, 1 << 24])
def path(request, tmp_path, monkeypatch):
    """A file of 400 entries, read in pieces that are smaller than a line, of some lines, and at once."""
    monkeypatch.setattr(plain_file, "_PART", request.param)
    write_large(tmp_path / "ops.json")
    return tmp_path / "ops.json"


def swap(lines):
    lines[5], lines[300] = lines[300], lines[5]


CHANGES = {
    "nothing": lambda lines: None,
    "a number of it": lambda lines: lines.__setitem__(200, lines[200].replace(b'"n": 199', b'"n": 198')),
    "two lines exchanged": swap,
    "a line twice": lambda lines: lines.insert(7, lines[6]),
    "a line by hand": lambda lines: lines.insert(9, b'"cpu|a|f@v1|1": {"cfg": 1},'),
    "a line cut": lambda lines: lines.__setitem__(399, lines[399][:50]),
    "the end missing": lambda lines: lines.__delitem__(slice(300, None)),
    "the beginning missing": lambda lines: lines.__delitem__(slice(0, 5)),
    "an older format line in the middle": lambda lines: lines.insert(50, b'"~format": 1'),
    "a newer format": lambda lines: lines.__setitem__(-3, b'"~format": 99'),
    "nothing left": lambda lines: lines.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_pieces_are_judged_as_the_whole(path, change):
    """The same number of entries, the same damage, and the same keys are found to be there."""
    lines = path.read_bytes().split(b"\n")
    CHANGES[change](lines)
    path.write_bytes(b"\n".join(lines))
    wanted = {spell(filler(number)) for number in (0, 199, 399)} | {"cpu|a|f@v1|none"}
    here, there = set(wanted), set(wanted)

    assert check_snapshot(str(path), here)[:2] == snapshot_check._check_whole(str(path), there)[:2]
    assert here == there


def test_a_file_that_a_fold_wrote_is_counted(tmp_path, monkeypatch):
    """Its digest proves its lines, and entries that wait beside it are told from those in it."""
    never_small(monkeypatch)
    cache = store(tmp_path)
    for number in range(5):
        keep(cache, number, number)
    cache.fold()
    keep(cache, 4, "again")
    keep(cache, 5, 5)
    monkeypatch.setattr(snapshot_check, "Snapshot", None)

    found = verify(cache)

    assert (found.entries, found.pending, found.damaged) == (6, 2, ())


def test_a_prune_proves_the_file_for_what_comes_after_it(path, monkeypatch):
    """It has looked at every line of a file that was written at once: a check of the result needs its digest alone."""
    cache = store(path.parent)
    assert prune(cache, where=lambda key, raw: key.call_key.endswith("7")) == 25
    monkeypatch.setattr(snapshot_check, "Snapshot", None)

    assert (verify(cache).entries, verify(cache).is_sound) == (375, True)


def test_a_prune_of_a_damaged_file_proves_nothing(path):
    """A line that does not fit its checksum is never passed on as one that was checked."""
    path.write_bytes(path.read_bytes().replace(b'"n": 200', b'"n": 201'))
    prune(store(path.parent), where=lambda key, raw: key.call_key.endswith("7"))
    found = verify(store(path.parent))

    assert (found.entries, len(found.damaged)) == (374, 1)


def test_a_check_holds_a_piece_of_the_file_at_a_time(tmp_path, monkeypatch):
    """A file of a megabyte and more is checked in a part of that memory."""
    monkeypatch.setattr(plain_file, "_PART", 1 << 14)
    write_large(tmp_path / "ops.json", 6_000)
    size = os.path.getsize(tmp_path / "ops.json")
    tracemalloc.start()
    try:
        good, damaged, _ = check_snapshot(str(tmp_path / "ops.json"), set())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert (good, damaged) == (6_000, [])
    assert peak < size / 2


def test_a_fold_holds_one_file_at_a_time(tmp_path, monkeypatch):
    """The old snapshot goes out of memory before the new one is read back."""
    monkeypatch.setattr(plain_file, "_PART", 1 << 14)
    monkeypatch.setattr(entry_reader, "_HELD_TWICE", 0)
    write_large(tmp_path / "ops.json", 6_000)
    never_small(monkeypatch)
    size = os.path.getsize(tmp_path / "ops.json")
    cache = store(tmp_path)
    keep(cache, "new", 1)
    tracemalloc.start()
    try:
        cache.get(*filler(1))
        cache._entry_log.list_entries()
        cache._entry_log._load()
        assert cache.fold()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert Path(cache.path).stat().st_size > size
    assert peak < 1.7 * size


def test_a_prune_after_a_check_checks_no_line_again(path, monkeypatch):
    """An open cache whose file was verified knows that its lines fit."""
    cache = store(path.parent)
    cache.keys()
    assert verify(cache).is_sound
    monkeypatch.setattr("ejkernel.ops.store.lines._fitting", None)

    assert prune(cache, where=lambda key, raw: raw["cfg"]["n"] < 100) == 100


def test_a_check_of_a_file_that_was_replaced_since_says_nothing_about_the_one_in_memory(path):
    """A line that was damaged when the cache read the file stays unproved, though the file is whole by now."""
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"n": 200', b'"n": 201'))
    cache = store(path.parent)
    cache.keys()
    path.write_bytes(whole)
    assert verify(cache).is_sound

    assert not cache._entry_log._is_sound
