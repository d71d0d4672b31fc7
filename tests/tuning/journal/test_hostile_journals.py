"""Journals of other users, pipes in their place and lines of wrong shapes: no tuning hangs or believes them.

Covers `tuning/journal/folder.py`.
"""

from __future__ import annotations

import json
import os
import signal
import zlib

import filelock
import pytest

from ejkernel.ops.settings import journal_folder
from ejkernel.ops.tuning.journal import file as journals
from ejkernel.ops.tuning.journal.file import Journal, JournalWarning, cfg_id, read
from ejkernel.ops.tuning.journal.folder import forget_crashes
from ejkernel.ops.tuning.journal.replay import JournalContent

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give files to another user")


@pytest.fixture(autouse=True)
def alarm(monkeypatch):
    """A hang is an error, and each warning is new."""

    def late(*about):
        raise TimeoutError("hangs")

    monkeypatch.setattr(journals, "_said", set())
    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def lines_of(*lines):
    rows = [json.dumps(line).encode() for line in lines]
    return b"".join(b"%08x %s\n" % (zlib.crc32(row), row) for row in rows)


CRASH = {"lost": cfg_id("good"), "program": "", "cfg": "?", "trial": {"status": "crash", "message": "gone"}}


@as_root
@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_the_journal_of_another_user_is_not_believed(tmp_path, held):
    """It would take good candidates away, whichever process holds its lock."""
    path = tmp_path / "call.jsonl"
    path.write_bytes(lines_of(CRASH))
    os.chown(path, NOBODY, NOBODY)
    around = filelock.FileLock(f"{path}.lock") if held else pytest.warns(JournalWarning, match=r"call\.jsonl")
    with around, Journal(path) as journal:
        assert not journal.history.lost
        assert not journal.writable

    assert path.read_bytes() == lines_of(CRASH)


def test_a_journal_that_everybody_may_write_is_not_believed(tmp_path):
    """Any user can have written it."""
    path = tmp_path / "call.jsonl"
    path.write_bytes(lines_of(CRASH))
    path.chmod(0o666)
    with pytest.warns(JournalWarning, match="another user may write it"), Journal(path) as journal:
        assert not journal.history.lost


def test_a_journal_that_its_group_could_write_is_taken_once(tmp_path):
    """A umask of 002 left it so: the group is out from now on."""
    path = tmp_path / "call.jsonl"
    path.write_bytes(lines_of(CRASH))
    path.chmod(0o664)
    with Journal(path) as journal:
        assert list(journal.history.lost) == [cfg_id("good")]

    assert path.stat().st_mode & 0o022 == 0


@as_root
def test_two_users_of_one_folder_have_a_journal_each(tmp_path):
    """The second one's has another name, so that both can be resumed."""
    about = ({"device": "d", "op_id": "o@v1", "call_key": "c"}, "forward", {})
    first = journals.journal_for(tmp_path, *about).path
    first.write_bytes(lines_of(CRASH))
    os.chown(first, NOBODY, NOBODY)
    with journals.journal_for(tmp_path, *about) as second:
        assert second.writable
        assert second.path != first
        assert not second.history.lost


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(200 << 30)


def link(path):
    (path.parent / "victim").write_bytes(b"mine")
    path.symlink_to(path.parent / "victim")


@pytest.mark.parametrize("plant", [os.mkfifo, sparse, link, os.mkdir], ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("name", ["call.jsonl", "call.jsonl.lock"])
def test_whatever_lies_at_a_journals_name_a_tuning_goes_on(tmp_path, plant, name):
    """Without a journal, with one warning; a huge lock file is as good as any."""
    plant(tmp_path / name)
    if (plant, name) == (sparse, "call.jsonl.lock"):
        with Journal(tmp_path / "call.jsonl") as journal:
            assert journal.writable
        return
    opened = Journal(tmp_path / "call.jsonl")
    with pytest.warns(JournalWarning, match="nothing can be journalled") as caught:
        opened.__enter__()
    opened.begin("identity", ["a"], fresh=True)
    assert not opened.writable
    opened.__exit__()

    assert len(caught) == 1
    assert not (tmp_path / "victim").exists() or (tmp_path / "victim").read_bytes() == b"mine"


ODD = [
    *(None, 1, "x", [], {}, {"slot": 3, "doing": "race"}, {"slot": "x", "doing": []}, {"begin": 1}),
    *({"begin": "i"}, {"trying": []}, {"trying": "x", "doing": "fly"}, {"back": {}, "doing": "check"}),
    *({"failed": "x", "program": "p", "trial": {"status": "fine", "message": ""}}, {"failed": "x", "trial": []}),
    *({"lost": ["x"], "trial": {}}, {"lost": "x", "trial": {"status": 3}}, {"lost": "x", "trial": {"more": 1}}),
    *({"dropped": "x", "program": "p", "clock": "wall", "seconds": "1", "ratio": 2.0}, {"suspects": [1]}),
    *({"suspects": {"x": "race"}}, {"finished": 3, "candidates": []}, {"finished": "x", "candidates": "abc"}),
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: json.dumps(odd)[:40])
def test_a_line_of_a_wrong_shape_behind_a_right_checksum_is_passed_over(tmp_path, odd):
    """What stands before and after it is believed."""
    path = tmp_path / "call.jsonl"
    path.write_bytes(lines_of(CRASH, odd, {**CRASH, "lost": "other"}))

    assert list(JournalContent.of(read(path), alone=True).lost) == [cfg_id("good"), "other"]


@pytest.mark.parametrize(
    "text",
    [b'{"lost": 1e999}', b'{"lost": NaN}', b"[" * 100_000, b'{"lost": "' + b"x" * (2 << 20) + b'"}', b"\xff"],
    ids=["1e999", "NaN", "brackets", "a long line", "no text"],
)
def test_a_line_that_is_no_json_behind_a_right_checksum_is_passed_over(tmp_path, text):
    """Numbers out of range, deep nesting and lines of megabytes."""
    path = tmp_path / "call.jsonl"
    path.write_bytes(b"%08x %s\n" % (zlib.crc32(text), text) + lines_of(CRASH))

    assert list(JournalContent.of(read(path), alone=True).lost) == [cfg_id("good")]


@as_root
def test_forgetting_crashes_leaves_other_users_journals(tmp_path):
    """They say nothing here, and are their owners' to remove."""
    journal_folder().mkdir(parents=True)
    mine, theirs = (journal_folder() / f"o@v1-{name}.jsonl" for name in ("mine", "theirs"))
    for path in (mine, theirs):
        path.write_bytes(lines_of(CRASH))
    os.chown(theirs, NOBODY, NOBODY)

    assert forget_crashes() == 1
    assert (mine.exists(), theirs.exists()) == (False, True)
