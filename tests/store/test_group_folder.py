"""A group's folder as the documentation prints it, with two real users: entries, candidates, journals and locks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from fakes_store import cfgs, keep, key, run_script, store, value

pytestmark = pytest.mark.one_leg

NOBODY, TEAM = 65534, 2345
REPOSITORY = Path(__file__).resolve().parents[2]

SLOW = pytest.mark.slow
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as two users of a group")


@pytest.fixture
def shared():
    """A folder made by the command of the documentation's recipe, for a group that both users are in."""
    page = (REPOSITORY / "docs" / "storage.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (install -d .*)$", page, re.M)
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    folder = place / "ejkernel"
    subprocess.run(
        command.replace("/shared/ejkernel", str(folder)).replace("-g team", f"-g {TEAM}"), shell=True, check=True
    )
    yield folder
    shutil.rmtree(place)


MEMBER = f"""
import json, os, sys
from pathlib import Path
from fakes_store import keep, key, store, told, value
os.umask(int(sys.argv[2], 8))
os.setgroups([{TEAM}]); os.setgid(65534); os.setuid(int(sys.argv[3]))
folder = Path(sys.argv[1])
with told() as said:
"""


def as_member(folder, work, *, umask=0o022, user=NOBODY):
    """Runs lines of code as a member of the group; `answer` is what comes back, with what was warned about."""
    body = "".join(f"    {line}\n" for line in work.strip().split("\n"))
    return run_script(MEMBER + body + "print(json.dumps([answer, said]))\n", str(folder), oct(umask), str(user))


@as_root
@pytest.mark.parametrize("umask", [0o022, pytest.param(0o002, marks=SLOW), pytest.param(0o077, marks=SLOW)])
def test_members_put_and_fold_whatever_their_umask(shared, umask):
    """Each keeps the others' entries, without a warning."""
    put = 'cache = store(folder)\nkeep(cache, "{0}", 1)\nanswer = [cache.status, cache.fold(), value(cache, "{0}")]'
    first = as_member(shared, put.format("first"), umask=umask)
    second = as_member(shared, put.format("second"), umask=umask if umask != 0o077 else 0o022, user=NOBODY - 1)

    assert first == [["read-write", True, 1], []]
    # Where the first one lets no other user read its entries, they stay apart.
    assert second[0][0] in (("read-write",) if umask != 0o077 else ("read-write", "memory-only"))
    if umask != 0o077:
        assert second == [["read-write", True, 1], []]
        assert set(cfgs(shared / "ops.json")) == {"first", "second"}


@as_root
def test_another_members_entry_is_a_candidate_and_never_an_answer(shared):
    """Also after a fold by either of them; one's own entry stays an answer."""
    as_member(shared, 'cache = store(folder)\nkeep(cache, "theirs", 1)\ncache.fold()\nanswer = None')
    look = """
cache = store(folder)
keep(cache, "mine", 2)
cache.fold()
found = [store(folder).lookup(key(name)) for name in ("theirs", "mine")]
answer = [[entry.trusted, entry.answers] for entry in found]
"""
    answer, said = as_member(shared, look, user=NOBODY - 1)

    assert (answer, said) == ([[False, False], [True, True]], [])


@as_root
def test_a_member_cannot_make_later_puts_of_another_lose(shared):
    """A count at the limit, in an entry file or a line that a hand wrote, is set aside by the next put."""
    plant = """
from ejkernel.ops.store.snapshot import LARGEST_SEQ, key_hash, line, seal, spell
cache = store(folder)
keep(cache, "other", 0)
name = spell(key("one"))
raw = seal(name, {"cfg": "evil", "seq": LARGEST_SEQ, "writer": "f" * 16, "when": "9999"})
Path(cache.path + ".d", f"{key_hash(name)}.{LARGEST_SEQ}.{'f' * 16}.json").write_text(line(name, raw))
answer = value(store(folder), "one")
"""
    assert as_member(shared, plant)[0] == "evil"
    put = 'cache = store(folder)\nkeep(cache, "one", 2)\nanswer = [cache.status, value(store(folder), "one")]'
    answer, said = as_member(shared, put, user=NOBODY - 1)

    assert answer == ["read-write", 2]
    # The file, and the line that it was folded into.
    assert len(said) == 2
    assert "set aside" in said[0]


@as_root
def test_a_snapshot_does_not_take_over_the_mode_of_another_users_file(shared):
    """A file that all users may write, left by another member, does not make the next one so."""
    as_member(
        shared, 'cache = store(folder)\nkeep(cache, "a", 1)\ncache.fold()\nos.chmod(cache.path, 0o666)\nanswer = None'
    )
    as_member(shared, 'cache = store(folder)\nkeep(cache, "b", 2)\ncache.fold()\nanswer = None', user=NOBODY - 1)
    found = (shared / "ops.json").stat()

    assert (found.st_uid, found.st_mode & 0o777) == (NOBODY - 1, 0o644)


@as_root
def test_a_store_that_root_baked_into_an_image_is_an_answer(tmp_path):
    """Root's files, and a site's that one user keeps, are answers once they pass the candidate check."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    try:
        keep(store(place), "one", 1)
        look = 'found = store(folder).lookup(key("one"))\nanswer = [found.cfg, found.trusted, found.answers]'
        roots = as_member(place, look)
        for path in (place, *place.rglob("*")):
            os.chown(path, 4321, 4321)
        sites = as_member(place, look)
        place.chmod(0o777)
        open_to_all = as_member(place, look)
    finally:
        shutil.rmtree(place)

    assert (roots[0], sites[0], open_to_all[0]) == ([1, False, True], [1, False, True], [1, False, False])


@as_root
def test_under_sudo_a_users_entries_are_no_answers(tmp_path):
    """Root reads another user's store: nothing in it is root's own, nor is a link of that user followed."""
    keep(store(tmp_path), "one", 1)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    found = store(tmp_path).lookup(key("one"))

    assert (found.cfg, found.trusted) == (1, False)
    assert value(store(tmp_path), "one") == 1
