"""Links, pipes, sockets, folders and huge files planted at every name of a store: no hang, no harm, puts go on.

Covers `core/folder_walk.py` and `core/plain_file.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from fakes_store import entry_files, keep, key, never_small, store, told, value

from ejkernel.ops import AutotuningResult
from ejkernel.ops.core.errors import OpsError, StoreError
from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.execution import recording
from ejkernel.ops.programs.recorded import recorded_keys
from ejkernel.ops.store import files
from ejkernel.ops.store.lock_file import read_lock
from ejkernel.ops.store.maintenance import compact, verify
from ejkernel.ops.store.packs import PackWarning, forget_packs, found_packs, read_pack
from ejkernel.ops.store.store import StoredEntry

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to plant links as another user")


@pytest.fixture(autouse=True)
def alarm():
    """A hang is an error, not a wait for ever."""

    def late(*about):
        raise TimeoutError("hangs")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def fifo(path, victim):
    os.mkfifo(path)


def folder(path, victim):
    path.mkdir()


def unix_socket(path, victim):
    # The names of sockets are short.
    short = tempfile.mkdtemp(dir="/tmp")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{short}/s")
        os.rename(f"{short}/s", path)
    os.rmdir(short)


def sparse(path, victim):
    with open(path, "wb") as file:
        file.truncate(200 << 30)


def own_link(path, victim):
    path.symlink_to(victim)


def hard_link(path, victim):
    os.link(victim, path)


def foreign_link(path, victim):
    path.symlink_to(victim)
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


PLANTS = [fifo, folder, unix_socket, sparse, own_link, hard_link]
if os.getuid() == 0:
    PLANTS.append(foreign_link)

# Names beside and in a store, as a put, a get, a fold and maintenance use them.
NAMES = {
    "snapshot": lambda cache: Path(cache.path),
    "counter": lambda cache: Path(cache.path + ".d", "changes"),
    "lock": lambda cache: Path(cache.path + ".d", "fold.lock"),
    "entry": lambda cache: entry_files(cache.path)[0],
    "record": lambda cache: next(Path(cache.path + ".d", "records").iterdir()),
    "folded": lambda cache: Path(cache.path + ".d", "folded"),
    "records": lambda cache: Path(cache.path + ".d", "records"),
    "folder": lambda cache: Path(cache.path + ".d"),
}


def filled(place):
    """A store with an entry in the snapshot and one, with its record, in a file."""
    with pytest.MonkeyPatch.context() as patched:
        cache = store(place)
        keep(cache, "folded", 1)
        cache.fold()
        never_small(patched)
        record = Record(kernel="k", objective="forward", trials=(Trial(1, "ok"),), winner=0)
        cache.keep(key("waiting"), StoredEntry(2, record=record))
    return cache


def everything(place, cache):
    """All that a program and a user do with a store; errors are the package's own."""
    for act in (
        lambda: keep(cache, "new", 3),
        lambda: value(cache, "folded"),
        lambda: value(cache, "waiting"),
        lambda: cache.record(*key("waiting")),
        lambda: cache.keys(),
        lambda: cache.fold(),
        lambda: value(store(place), "folded"),
        lambda: keep(store(place), "other", 4),
        lambda: verify(cache),
        lambda: compact(cache),
    ):
        try:
            act()
        # Commands say it as one sentence.
        except (OpsError, OSError):
            continue


@pytest.mark.one_leg
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_lies_at_a_name_of_the_store_nothing_hangs_and_nothing_else_is_touched(tmp_path, name, plant):
    """A put is served, no other file changes, and what was planted is not followed, read or waited for."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    place = tmp_path / "store"
    cache = filled(place)
    path = NAMES[name](cache)
    if (name, plant) == ("snapshot", own_link):
        pytest.skip("a link of one's own at the store's name is the user's choice, and followed")
    (shutil.rmtree if path.is_dir() else os.unlink)(path)
    plant(path, victim)
    with told():
        everything(place, cache)

    assert victim.read_bytes() == b"mine"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o644
    assert value(cache, "new") == 3


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_whatever_lies_where_a_pack_should_be_is_named_and_left_out(tmp_path, plant, monkeypatch):
    """One warning names the file, and nothing waits for it."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    plant(tmp_path / "site.json", victim)
    forget_packs()
    with pytest.warns(PackWarning, match=r"site\.json") as caught:
        assert [pack.keys() for pack in found_packs([str(tmp_path / "site.json")])] in ([], [[]])

    assert (victim.read_bytes(), len(caught)) == (b"mine", 1)


READERS = {
    "a recording": recorded_keys,
    "a result": AutotuningResult.load,
    "a lock": read_lock,
    "a pack": read_pack,
}
WRITERS = {
    "a recording": lambda path: recording._merge(str(path), {key("new"): {}}),
    "a result": lambda path: AutotuningResult("cpu|x", ()).dump(path),
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("name", READERS)
def test_whatever_lies_where_a_file_of_a_program_should_be_is_an_error_that_names_it(tmp_path, name, plant):
    """Nothing waits for a pipe or reads a huge file, and another user's link is not followed."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    plant(tmp_path / "file.json", victim)
    with pytest.raises((OpsError, OSError)) as caught:
        READERS[name](tmp_path / "file.json")

    said = str(caught.value)
    expected = {"sparse": "bytes", "foreign_link": "another user's"}.get(plant.__name__, "not a plain file")
    if plant not in (own_link, hard_link):
        assert re.search(expected, said)
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("name", WRITERS)
def test_whatever_lies_where_a_program_writes_a_file_nothing_hangs_and_no_link_of_others_is_followed(
    tmp_path, name, plant
):
    """A pipe that no process reads is an error; a hard link is replaced, and the file with the other name stays."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    plant(tmp_path / "file.json", victim)
    with contextlib.suppress(OpsError, OSError):
        WRITERS[name](tmp_path / "file.json")

    # A link of one's own was made on purpose, and a result goes where it leads.
    assert victim.read_bytes() == b"mine" or (name, plant) == ("a result", own_link)


def test_a_result_goes_into_a_pipe_that_a_process_reads(tmp_path):
    """As `-o /dev/stdout` and a shell's `>(...)` need it."""
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    AutotuningResult("cpu|x", ()).dump(tmp_path / "pipe")
    with open(reading, encoding="utf-8") as file:
        assert AutotuningResult.loads(file.read()).device == "cpu|x"


# Another user's links.


@pytest.fixture
def victim():
    """A file of this user, and a folder that every user may write, outside pytest's own."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o777)
    (place / "mine.txt").write_bytes(b"mine")
    (place / "home").mkdir()
    yield place
    shutil.rmtree(place)


def planted(link, target):
    link.symlink_to(target)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)


@as_root
def test_a_link_of_another_user_at_the_stores_name_is_refused(victim):
    """Opening the store is an error that names the path, and the file behind the link stays as it is."""
    planted(victim / "ops.json", victim / "mine.txt")
    with pytest.raises(StoreError, match=r"ops\.json.*another user's"):
        store(victim)

    assert (victim / "mine.txt").read_bytes() == b"mine"


@as_root
def test_a_link_of_another_user_at_the_stores_folder_is_not_followed(victim):
    """A put is served from memory with one warning, and nothing is made or removed behind the link."""
    left = victim / "home" / ".x.tmp"
    left.write_bytes(b"old")
    os.utime(left, (1, 1))
    planted(victim / "ops.json.d", victim / "home")
    cache = store(victim)
    with told() as said:
        keep(cache, "one", 1)
        keep(cache, "two", 2)
        cache.fold()

    assert (cache.status, value(cache, "one"), os.listdir(victim / "home")) == ("memory-only", 1, [".x.tmp"])
    assert len(said) <= 2
    assert "another user's" in said[0]


@as_root
def test_a_link_of_another_user_on_the_way_to_a_store_is_refused(victim):
    """The folder that the store would be made in is not the user's choice."""
    planted(victim / "cache", victim / "home")
    with pytest.raises(StoreError, match="another user's"):
        store(victim / "cache")

    assert os.listdir(victim / "home") == []


@as_root
def test_a_link_to_a_file_of_another_user_is_refused(victim):
    """A link of this user's own does not make another user's file its own."""
    (victim / "theirs.json").write_text("{}")
    os.chown(victim / "theirs.json", NOBODY, NOBODY)
    (victim / "ops.json").symlink_to(victim / "theirs.json")
    with pytest.raises(StoreError, match="another user's"):
        store(victim)


def test_links_of_ones_own_are_followed(tmp_path):
    """A store behind a link, and in a folder behind one, is read and written where it lies."""
    (tmp_path / "disk").mkdir()
    keep(store(tmp_path / "disk"), "one", 1)
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    (tmp_path / "ops.json").symlink_to(tmp_path / "cache" / "ops.json")
    cache = store(tmp_path)
    keep(cache, "two", 2)

    assert (cache.status, value(cache, "one"), value(store(tmp_path / "disk"), "two")) == ("read-write", 1, 2)
    assert (tmp_path / "ops.json").is_symlink()


def test_a_folder_that_is_exchanged_right_after_it_was_judged_is_not_listed(tmp_path, monkeypatch):
    """The names are those of the folder that was judged, not of the one that its path leads to a moment later."""
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"in {name}").touch()
    real = files.open_folder

    def judged(folder):
        descriptor = real(folder)
        (tmp_path / "mine").rename(tmp_path / "away")
        (tmp_path / "mine").symlink_to(tmp_path / "theirs")
        return descriptor

    monkeypatch.setattr(files, "open_folder", judged)

    assert files.names(str(tmp_path / "mine")) == ["in mine"]


@as_root
def test_a_folder_that_is_replaced_by_a_link_while_the_store_is_open_is_not_followed(victim):
    """The check is not made once for all: a folder that another user swaps later gains nothing."""
    cache = store(victim)
    keep(cache, "one", 1)
    os.rename(victim / "ops.json.d", victim / "away")
    planted(victim / "ops.json.d", victim / "home")
    with told():
        keep(cache, "two", 2)
        cache.fold()

    assert os.listdir(victim / "home") == []
    assert value(cache, "two") == 2
