"""The users that may read and write, and what another user can and cannot do to a store."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from fakes import Blocks, Doubling, TableTuner, call_of, key_of
from fakes_store import DEV, OP, cfgs, entries, entry_files, keep, key, never_small, run_script, store, told, value

from ejkernel.ops import ConfigCache, ConfigSelectorChain, PersistentCache
from ejkernel.ops.core.errors import StoreError
from ejkernel.ops.core.key import Key
from ejkernel.ops.store.persistent import StoreWarning
from ejkernel.ops.store.store import StoredEntry

pytestmark = pytest.mark.one_leg

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as another user")


@pytest.fixture
def umask():
    """Sets a umask for one test."""
    old = os.umask(0o022)
    yield os.umask
    os.umask(old)


def every_user_enters(path):
    return path.is_dir() and all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))


@pytest.fixture
def shared():
    """A folder that every user reaches, as pytest's own are not, nor one below a private home."""
    places = [Path(place).resolve() for place in (tempfile.gettempdir(), "/tmp", "/var/tmp")]
    place = next(filter(every_user_enters, places), None)
    if place is None:
        pytest.skip(f"needs a folder for temporary files that every user may enter; looked at {places}")
    folder = Path(tempfile.mkdtemp(prefix="shared-store-", dir=place))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


# As another user: everything is imported before, since that user may not read this interpreter's files. The package
# itself imports platformdirs only where it looks for a home.
AS_NOBODY = """
import json, os, sys, warnings
from pathlib import Path
import platformdirs
import ejkernel.ops.core.device
from ejkernel.ops import PersistentCache
from ejkernel.ops.core.errors import StoreError
from fakes_store import DEV, OP, keep, store, told, value
os.umask(int(sys.argv[2], 8))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
os.environ["HOME"] = "/nonexistent"
folder = Path(sys.argv[1])
with told() as said:
"""


def as_nobody(folder, work, *, umask=0o022):
    """Runs lines of code as another user; `answer` is what comes back, with what was warned about."""
    body = "".join(f"    {line}\n" for line in work.strip().split("\n"))
    code = AS_NOBODY + body + "print(json.dumps([answer, said]))\n"
    return run_script(code, str(folder), oct(umask))


# Modes.


@pytest.mark.parametrize(("mask", "expected"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o644)], ids=oct)
def test_the_umask_says_who_may_read_and_only_the_owner_writes(tmp_path, umask, monkeypatch, mask, expected):
    """Snapshot, entry files, counter, lock and folders are as the user's umask says, without a group that writes."""
    never_small(monkeypatch)
    umask(mask)
    cache = store(tmp_path / "new")
    keep(cache, "one", 1)
    assert [mode(path) for path in entry_files(cache.path)] == [expected]
    cache.fold()
    found = {path.name: mode(path) for path in (tmp_path / "new").rglob("*") if path.is_file()}

    assert found["ops.json"] == found["changes"] == expected
    assert set(found.values()) == {expected}
    assert mode(tmp_path / "new") == mode(cache.path + ".d") == 0o755 & ~mask


@as_root
@pytest.mark.parametrize("mask", [0o777, 0o400], ids=oct)
def test_a_umask_that_takes_the_owners_permissions_makes_no_put_unreadable(shared, mask):
    """What is acknowledged is read by the next process of that user, from files and folders that it can open."""
    work = """
cache = store(folder / "new")
keep(cache, "one", 1)
fresh = store(folder / "new")
answer = [cache.status, value(fresh, "one"), cache.fold(), value(store(folder / "new"), "one")]
"""
    shared.chmod(0o777)

    assert as_nobody(shared, work, umask=mask) == [["read-write", 1, True, 1], []]


@pytest.mark.parametrize(("given", "expected"), [(0o600, 0o600), (0o640, 0o640), (0o644, 0o644)], ids=oct)
def test_permissions_to_read_that_a_user_gave_the_file_stay(tmp_path, umask, given, expected):
    """A fold replaces the content of the file, not the permission to read it."""
    cache = store(tmp_path)
    keep(cache, "one", 1)
    os.chmod(cache.path, given)
    umask(0o077)
    keep(cache, "two", 2)

    assert mode(cache.path) == expected
    assert len(entries(cache.path)) == 2


@pytest.mark.parametrize("place", ["snapshot", "entry"])
def test_a_file_that_its_group_could_write_is_taken_once_and_closed(tmp_path, monkeypatch, place):
    """A umask of 002 left it so: its entry is this user's, one line names `cache compact`, and the group is out."""
    if place == "entry":
        never_small(monkeypatch)
    keep(store(tmp_path), "one", 1)
    path = tmp_path / "ops.json" if place == "snapshot" else entry_files(tmp_path / "ops.json")[0]
    os.chmod(path, 0o664)
    cache = store(tmp_path)
    with pytest.warns(StoreWarning, match="ejkernel cache compact") as caught:
        found = cache.lookup(key("one"))

    assert (found.cfg, found.trusted, found.answers) == (1, True, True)
    assert (len(caught), mode(path)) == (1, 0o644)
    assert store(tmp_path).lookup(key("one")).trusted


@pytest.mark.parametrize("place", ["snapshot", "entry"])
def test_a_file_that_everybody_may_write_is_nobodys_answer(tmp_path, monkeypatch, place):
    """Any user can have written it: its entry is a candidate to measure, also once this user has folded it."""
    if place == "entry":
        never_small(monkeypatch)
    keep(store(tmp_path), "one", 1)
    path = tmp_path / "ops.json" if place == "snapshot" else entry_files(tmp_path / "ops.json")[0]
    os.chmod(path, 0o666)
    found = store(tmp_path).lookup(key("one"))
    assert (found.cfg, found.trusted, found.answers) == (1, False, False)
    cache = store(tmp_path)
    keep(cache, "two", 2)
    cache.fold()
    found = store(tmp_path).lookup(key("one"))

    assert (found.cfg, found.trusted, found.answers, mode(cache.path)) == (1, False, False, 0o644)
    assert store(tmp_path).lookup(key("two")).trusted


# Links.


def test_a_link_at_an_entrys_name_is_not_followed(tmp_path, monkeypatch):
    """What it points to is neither read nor changed; it is moved aside as it is, and the key is a miss."""
    never_small(monkeypatch)
    cache = store(tmp_path)
    keep(cache, "one", 1)
    (path,) = entry_files(cache.path)
    secret = tmp_path / "secret"
    secret.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(secret)
    fresh = store(tmp_path)
    with pytest.warns(StoreWarning, match="set aside"):
        assert value(fresh, "one") is None

    assert fresh.status == "read-write"
    assert path.with_name(path.name + ".damaged").is_symlink()
    assert secret.exists()


def test_a_link_where_an_entry_is_written_is_replaced_and_not_followed(tmp_path, monkeypatch):
    """A put does not write through a link that another user planted under the very name."""
    never_small(monkeypatch)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    cache = store(tmp_path)
    keep(cache, "other", 0)
    real = cache._entry_log.next_seq

    def plant_first(which):
        from ejkernel.ops.store.snapshot import key_hash, spell

        seq = real(which)
        name = f"{key_hash(spell(which))}.{seq}.{cache._entry_log.writer}.json"
        os.symlink(victim, os.path.join(cache._entry_log.folder, name))
        return seq

    monkeypatch.setattr(cache._entry_log, "next_seq", plant_first)
    keep(cache, "one", 1)

    assert victim.read_text() == "mine"
    assert value(cache, "one") == value(store(tmp_path), "one") == 1


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path, monkeypatch):
    """Were the name guessed, the put would fail and the cfg be served from memory; the victim stays as it is."""
    from ejkernel.ops.store import files

    victim = tmp_path / "victim"
    victim.write_text("mine")
    cache = store(tmp_path)
    keep(cache, "other", 0)
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "guessed")
    from ejkernel.ops.store.snapshot import key_hash, spell

    name = f"{key_hash(spell(key('one')))}.1.{cache._entry_log.writer}.json"
    os.symlink(victim, os.path.join(cache._entry_log.folder, f".{name}.guessed.tmp"))
    with pytest.warns(StoreWarning, match="File exists"):
        keep(cache, "one", 1)

    assert victim.read_text() == "mine"
    assert (cache.status, value(cache, "one")) == ("memory-only", 1)


def test_a_link_at_the_counter_is_not_followed(tmp_path):
    """A put does not write into what the counter was made to point to."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    cache = store(tmp_path)
    keep(cache, "other", 0)
    os.unlink(cache._entry_log.counter)
    os.symlink(victim, cache._entry_log.counter)
    with told():
        keep(cache, "one", 1)

    assert victim.read_text() == "mine"
    assert value(cache, "one") == 1


def test_the_modes_of_what_a_link_points_to_are_not_taken_over(tmp_path, umask):
    """A link put in the file's place does not make the next file writable for all users."""
    open_to_all = tmp_path / "open"
    open_to_all.write_text("{}")
    open_to_all.chmod(0o666)
    cache = store(tmp_path)
    keep(cache, "one", 1)
    os.unlink(cache.path)
    os.symlink(open_to_all, cache.path)
    umask(0o077)
    with told():
        keep(cache, "two", 2)

    assert open_to_all.read_text() == "{}"
    assert os.path.islink(cache.path) or mode(cache.path) == 0o600
    assert value(cache, "two") == 2


# What may not be at the path.


def dangling(path):
    path.symlink_to(path.parent / "nowhere")


def loop(path):
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("plant", "what"),
    [(Path.mkdir, "is a directory"), (dangling, "is a link to nothing"), (loop, "is a link to nothing")],
    ids=["directory", "dangling link", "loop of links"],
)
def test_what_is_no_file_at_the_path_is_an_error_at_construction(tmp_path, plant, what):
    """The error says what is there and what to give; nothing is changed."""
    path = tmp_path / "ops.json"
    plant(path)
    with pytest.raises(StoreError, match=what):
        PersistentCache("ops", path)

    assert [p.name for p in tmp_path.iterdir()] == ["ops.json"]


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero"])
def test_a_device_at_the_path_is_an_error_at_construction(path):
    """Nothing is read from it."""
    with pytest.raises(StoreError, match="not a plain file"):
        PersistentCache("ops", path)


def test_a_fifo_at_the_path_is_an_error_and_nobody_waits(tmp_path):
    """A pipe is refused without being opened."""
    os.mkfifo(tmp_path / "ops.json")
    with pytest.raises(StoreError, match="not a plain file"):
        store(tmp_path)


def test_a_fifo_that_appears_later_does_not_hang(tmp_path):
    """A get of a file that became a pipe is a miss with a reason."""
    cache = store(tmp_path)
    os.mkfifo(tmp_path / "ops.json")
    with pytest.warns(StoreWarning, match="not a plain file"):
        assert value(cache, "one") is None


@pytest.mark.parametrize("name", ["..", ".", "", "a\0b"])
def test_an_opname_that_is_no_name_is_an_error(name):
    """A plain name never leaves its directory."""
    with pytest.raises(ValueError, match="no name for a store"):
        PersistentCache(name)


@pytest.mark.parametrize("name", ["..up", "~root", "%2e%2e", "a b", "..\\up", "-rf"])
def test_an_odd_opname_stays_in_its_directory(name, tmp_path, monkeypatch):
    """Whatever it is made of, its file is in the cache folder."""
    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path / "folder"))
    cache = PersistentCache(name)
    keep(cache, "one", 1)

    assert Path(cache.path).resolve().parent == tmp_path / "folder"


def test_no_path_comes_from_the_content_of_a_file(tmp_path):
    """A hostile writer field does not lead a record anywhere else."""
    import json

    raw = {"cfg": 1, "seq": 1, "writer": "../../../../etc/passwd"}
    (tmp_path / "ops.json").write_text(json.dumps({f"{DEV}|{OP}|../x": raw}), encoding="utf-8")
    cache = store(tmp_path)
    found = cache._entry_log.record_path(key("../x"), raw)

    assert Path(found).resolve().is_relative_to(tmp_path / "ops.json.d" / "records")
    assert cache.record(DEV, OP, "../x") is None


# No home.


def test_a_relative_cache_folder_is_fixed_when_the_cache_is_made(tmp_path, monkeypatch):
    """A later change of the working directory moves no store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", "here")
    cache = PersistentCache("matmul")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    keep(cache, "one", 1)

    assert cache.path == str(tmp_path / "here" / "matmul.json")
    assert cfgs(cache.path) == {"one": 1}


def test_without_a_home_no_folder_named_after_it_appears(tmp_path, monkeypatch):
    """Where the user's home is not known the store is memory-only or elsewhere, never `~` in the working folder."""
    import pwd

    monkeypatch.delenv("EJKERNEL_PERSISTENT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    cache = PersistentCache("matmul")

    assert os.path.isabs(cache.path)
    assert "~" not in cache.path
    assert not cache.path.startswith(tempfile.gettempdir())
    assert list(tmp_path.iterdir()) == []


@as_root
@pytest.mark.parametrize("home", ["unset", "missing"])
def test_a_user_without_a_home_is_served_from_memory(shared, home):
    """With HOME unset, or naming nothing that can be made, one warning names path and setting."""
    lines = f"""
del os.environ["EJKERNEL_PERSISTENT_CACHE_DIR"], os.environ["XDG_CACHE_HOME"]
if {home!r} == "unset": del os.environ["HOME"]
os.chdir({str(shared)!r})
cache = PersistentCache("matmul")
keep(cache, "one", 1)
keep(cache, "two", 2)
answer = [cache.path, cache.status, value(cache, "one"), value(cache, "two"), os.listdir(".")]
"""
    (path, status, one, two, left), said = as_nobody(shared, lines)

    assert (status, one, two, left) == ("memory-only", 1, 2, [])
    assert os.path.isabs(path)
    assert len(said) == 1
    assert path in said[0]
    assert "EJKERNEL_PERSISTENT_CACHE_DIR" in said[0]


# Another user.


@as_root
def test_a_second_users_put_erases_nothing(shared):
    """In a folder that both may write, each keeps the other's entries."""
    shared.chmod(0o777)
    old = os.umask(0)
    try:
        cache = store(shared)
        keep(cache, "mine", 1)
        answer, said = as_nobody(
            shared, 'cache = store(folder)\nkeep(cache, "theirs", 2)\nanswer = cache.status', umask=0
        )
        keep(cache, "mine too", 3)
    finally:
        os.umask(old)

    assert (answer, said) == ("read-write", [])
    assert cfgs(shared / "ops.json") == {"mine": 1, "theirs": 2, "mine too": 3}
    assert [value(cache, name) for name in ("mine", "theirs", "mine too")] == [1, 2, 3]


@as_root
@pytest.mark.parametrize("size", ["small", "large"])
def test_entries_of_another_user_are_not_trusted(shared, size, monkeypatch):
    """The file's owner decides; folding another user's entry does not make it one's own."""
    shared.chmod(0o777)
    old = os.umask(0)
    try:
        keep(store(shared), "mine", 1)
        as_nobody(
            shared,
            ("from ejkernel.ops.store import entry_reader\nentry_reader.SMALL = -1\n" if size == "large" else "")
            + 'cache = store(folder)\nkeep(cache, "theirs", 2)\nanswer = None',
            umask=0,
        )
        cache = store(shared)
        before = cache.lookup(key("theirs"))
        keep(cache, "mine too", 3)
        cache.fold()
    finally:
        os.umask(old)
    fresh = store(shared)

    assert (before.cfg, before.trusted) == (2, False)
    assert (fresh.lookup(key("theirs")).cfg, fresh.lookup(key("theirs")).trusted) == (2, False)
    assert fresh.lookup(key("mine too")).trusted


@as_root
def test_another_user_cannot_claim_an_entry_for_somebody_else(shared):
    """What a file says about its owner counts only where one wrote that file oneself."""
    shared.chmod(0o777)
    old = os.umask(0)
    try:
        lines = """
cache = store(folder)
keep(cache, "theirs", 2)
from ejkernel.ops.store.snapshot import line, seal, spell
from fakes_store import key
import json
path = folder / "ops.json"
whole = json.loads(path.read_text())
name = spell(key("theirs"))
raw = whole[name]; del raw["sha256"]; raw["owner"] = 0
path.write_text(json.dumps({name: seal(name, raw), "~format": 1}))
answer = None
"""
        as_nobody(shared, lines, umask=0)
        cache = store(shared)
        assert not cache.lookup(key("theirs")).trusted
        keep(cache, "mine", 1)
    finally:
        os.umask(old)

    assert not store(shared).lookup(key("theirs")).trusted
    assert store(shared).lookup(key("mine")).trusted


@as_root
def test_a_folder_that_may_only_be_read_is_read_only(shared):
    """Its entries are answered; a put is served from memory, and one warning says where to turn."""
    keep(store(shared), "one", 1)
    before = {path: path.read_bytes() for path in shared.rglob("*") if path.is_file()}
    lines = """
cache = store(folder)
first = value(cache, "one")
keep(cache, "two", 2)
keep(cache, "three", 3)
cache.fold()
answer = [first, cache.status, cache.reason, value(cache, "two"), value(cache, "one")]
"""
    (first, status, reason, two, one), said = as_nobody(shared, lines)

    assert (first, status, two, one) == (1, "read-only", 2, 1)
    assert "Permission denied" in reason
    assert len(said) == 1
    assert "EJKERNEL_PERSISTENT_CACHE_DIR" in said[0]
    assert {path: path.read_bytes() for path in shared.rglob("*") if path.is_file()} == before


@as_root
@pytest.mark.parametrize("parent", [0o755, 0o700, 0o711], ids=oct)
def test_a_parent_that_may_not_be_written_is_memory_only(shared, parent):
    """Where no folder can be made, or none can be looked into, construction works and a put is served from memory."""
    (shared / "closed").mkdir()
    (shared / "closed").chmod(parent)
    lines = """
cache = store(folder / "closed" / "deeper")
keep(cache, "one", 1)
answer = [cache.status, value(cache, "one"), value(cache, "unknown")]
"""
    answer, said = as_nobody(shared, lines)

    assert answer == ["memory-only", 1, None]
    assert len(said) == 1
    assert "ops.json" in said[0]


@as_root
def test_an_unreadable_file_is_never_replaced(shared):
    """A file that one may not read is another user's, even in a folder that one may write."""
    shared.chmod(0o777)
    keep(store(shared), "theirs", 1)
    path = shared / "ops.json"
    path.chmod(0o600)
    Path(f"{path}.d").chmod(0o777)
    before, inode = path.read_bytes(), path.stat().st_ino
    lines = """
cache = store(folder)
keep(cache, "mine", 2)
cache.fold()
answer = [cache.status, value(cache, "mine"), value(cache, "theirs")]
"""
    answer, said = as_nobody(shared, lines)

    assert answer == ["memory-only", 2, None]
    assert len(said) == 1
    assert (path.read_bytes(), path.stat().st_ino) == (before, inode)
    assert value(store(shared), "theirs") == 1


@as_root
def test_an_unreadable_entry_of_a_peer_costs_that_entry_alone(shared):
    """A peer with a private umask does not make the whole store memory-only, nor keep it from being folded."""
    shared.chmod(0o777)
    old = os.umask(0)
    try:
        with pytest.MonkeyPatch.context() as patched:
            never_small(patched)
            cache = store(shared)
            keep(cache, "open", 1)
            keep(cache, "private", 2)
        for path in entry_files(cache.path):
            if b"private" in path.read_bytes():
                path.chmod(0o600)
                private = path
        lines = """
cache = store(folder)
keep(cache, "mine", 3)
answer = [cache.status, value(cache, "open"), value(cache, "private"), value(cache, "mine")]
"""
        answer, said = as_nobody(shared, lines, umask=0)
    finally:
        os.umask(old)

    assert answer == ["read-write", 1, None, 3]
    assert len(said) == 1
    assert str(private) in said[0]
    assert private.exists()
    assert set(cfgs(shared / "ops.json")) == {"open", "mine"}
    assert value(store(shared), "private") == 2


@as_root
def test_a_folder_with_the_sticky_bit_works_without_folding(shared):
    """Where users may not replace each other's files, the entries of all users are read from their own files."""
    shared.chmod(0o1777)
    old = os.umask(0)
    try:
        cache = store(shared)
        keep(cache, "mine", 1)
        Path(cache.path + ".d").chmod(0o1777)
        lines = """
cache = store(folder)
keep(cache, "theirs", 2)
answer = [cache.status, value(cache, "mine"), value(cache, "theirs")]
"""
        answer, _ = as_nobody(shared, lines, umask=0)
    finally:
        os.umask(old)

    assert answer == ["read-write", 1, 2]
    assert [value(store(shared), name) for name in ("mine", "theirs")] == [1, 2]


# What the selector does with an entry that is not one's own.


class Judging(Doubling):
    """Says which cfgs it can run."""

    def valid_cfg(self, inv, cfg):
        return cfg.size % 2 == 0 or "odd sizes do not run"


def choose(tmp_path, kernel, size, monkeypatch, *, trusted=False):
    """What a selector makes of an entry, and which tier answered."""
    inv = call_of(kernel)
    writer = store(tmp_path, cfg_type=Blocks)
    from ejkernel.ops.core.device import environment

    writer.keep(
        Key(*key_of(kernel, inv)), StoredEntry(Blocks(size), environment(key_of(kernel, inv)[0]), "autotune", "forward")
    )
    if not trusted:
        # From here on this process is another user than the one whose file it reads.
        monkeypatch.setattr(os, "getuid", lambda: 4242)
    tuner = TableTuner({1: 3.0, 2: 1.0, 4: 2.0, 6: 9.0, 7: 9.0, 8: 9.0})
    selector = ConfigSelectorChain(ConfigCache(), tuner=tuner, persistent=store(tmp_path, cfg_type=Blocks))
    with told():
        decision = selector.decide(inv, kernel)
    return decision.cfg.size, decision.tier, dict(decision.misses).get("persistent", "")


def test_ones_own_entry_is_used_whatever_it_is(tmp_path, monkeypatch):
    """A cfg that is no candidate is fine where oneself put it."""
    assert choose(tmp_path, Doubling(), 7, monkeypatch, trusted=True)[:2] == (7, "persistent")


def test_anothers_entry_that_is_a_candidate_is_used(tmp_path, monkeypatch):
    """What the kernel itself would have measured may run."""
    assert choose(tmp_path, Doubling(), 4, monkeypatch)[:2] == (4, "persistent")


def test_anothers_entry_that_is_no_candidate_is_not_used(tmp_path, monkeypatch):
    """Then the candidates are measured, and the reason says why."""
    size, tier, reason = choose(tmp_path, Doubling(), 7, monkeypatch)

    assert (size, tier) == (2, "autotune")
    assert "another user's" in reason


def test_anothers_entry_that_the_kernel_calls_valid_is_used(tmp_path, monkeypatch):
    """A kernel that judges cfgs decides about those that it would not have offered."""
    assert choose(tmp_path, Judging(), 8, monkeypatch)[:2] == (8, "persistent")


def test_anothers_entry_that_the_kernel_calls_invalid_is_not_used(tmp_path, monkeypatch):
    """The kernel's word counts."""
    assert choose(tmp_path, Judging(), 7, monkeypatch)[:2] == (2, "autotune")
