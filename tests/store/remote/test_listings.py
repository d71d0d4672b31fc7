"""Listings that the processes of a machine share: one asks, the others read its answer."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest
from fakes_store import run_script

from ejkernel.ops.store.remote.listings import SharedListings
from ejkernel.ops.store.snapshot import key_hash

CODE = """
import json, os, sys
from pathlib import Path
from ejkernel.ops.store.remote.listings import SharedListings
folder, count = Path(sys.argv[1]), int(sys.argv[2])
ready, go = os.pipe()
children = []
for number in range(count):
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(ready, 1)
        def ask():
            (folder / f"asked-{os.getpid()}").touch()
            return ["a", "b"]
        found = SharedListings(folder / "shared", "s3://team").get("entries/x", ask, wait=30.0)
        os._exit(0 if found == ["a", "b"] else 1)
    children.append(pid)
os.close(go)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
print(json.dumps([sum(codes), len(list(folder.glob("asked-*")))]))
"""


@pytest.mark.parametrize(
    "processes", [20, pytest.param(1000, marks=pytest.mark.slow(at_length=True))], ids=lambda count: f"{count}"
)
def test_processes_that_start_at_once_list_once(tmp_path, processes):
    """All have the names, and one of them asked."""
    assert run_script(CODE, str(tmp_path), str(processes)) == [0, 1]


def shared(tmp_path, **more):
    return SharedListings(tmp_path, "s3://team", **more)


def counting(names=("a",)):
    """A request that counts how often it is made."""
    asked = []

    def ask():
        asked.append(1)
        return list(names)

    return asked, ask


def test_a_listing_that_is_old_is_asked_for_again(tmp_path):
    """Likewise one that is known to be out of date, one from the future, and one of another remote or folder."""
    asked, ask = counting()
    for _ in range(3):
        shared(tmp_path).get("x", ask, wait=1.0)
    assert len(asked) == 1
    shared(tmp_path).get("x", ask, wait=1.0, after=time.time())
    assert len(asked) == 2
    shared(tmp_path, fresh=0.0).get("x", ask, wait=1.0)
    shared(tmp_path).get("y", ask, wait=1.0)
    SharedListings(tmp_path, "s3://other").get("x", ask, wait=1.0)
    assert len(asked) == 5
    (path,) = [p for p in shared(tmp_path).folder.glob("*.json") if json.loads(p.read_text())["names"] == ["a"]][:1]
    path.write_text(json.dumps({"listed": time.time() + 3600, "names": ["wrong"]}))
    assert shared(tmp_path).get("x", ask, wait=1.0) == ["a"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"names": 1}', '{"listed": "now", "names": []}', '{"listed": 1}'])
def test_a_file_that_is_damaged_is_as_none(tmp_path, text):
    """It is asked for, and written anew."""
    asked, ask = counting()
    shared(tmp_path).get("x", ask, wait=1.0)
    (path,) = shared(tmp_path).folder.glob("*.json")
    path.write_text(text)
    assert shared(tmp_path).get("x", ask, wait=1.0) == ["a"]
    assert len(asked) == 2


def test_a_process_that_waits_too_long_asks_by_itself(tmp_path):
    """Another one that hangs while it lists keeps none of them."""
    gate, inside = threading.Event(), threading.Event()

    def hang():
        inside.set()
        gate.wait(240)
        return ["late"]

    thread = threading.Thread(target=lambda: shared(tmp_path).get("x", hang, wait=1.0))
    thread.start()
    inside.wait(120)
    assert shared(tmp_path).get("x", lambda: ["own"], wait=0.05) == ["own"]
    gate.set()
    thread.join()


def test_a_folder_that_cannot_be_made_changes_nothing(tmp_path):
    """Each process asks by itself."""
    (tmp_path / "file").write_text("")
    assert shared(tmp_path / "file").get("x", lambda: ["a"], wait=1.0) == ["a"]


def test_a_listing_that_was_dropped_is_asked_for_again(tmp_path):
    """As after a put of this process."""
    asked, ask = counting()
    shared(tmp_path).get("x", ask, wait=1.0)
    shared(tmp_path).drop("x")
    shared(tmp_path).drop("never listed")
    shared(tmp_path).get("x", ask, wait=1.0)
    assert len(asked) == 2


@pytest.mark.parametrize("content", ["[" * 100_000, '{"listed": 1e999, "names": []}', "{}"], ids=len)
def test_a_listing_that_is_damaged_is_asked_for_anew(tmp_path, content):
    """As if there were none."""
    listings = shared(tmp_path)
    listings.folder.mkdir(parents=True)
    (listings.folder / f"{key_hash('entries/x')}.json").write_text(content)
    asked, ask = counting()

    assert (listings.get("entries/x", ask, wait=1.0), asked) == (["a"], [1])


PLANTED = {"a link": os.symlink, "a hard link": os.link, "a pipe": lambda target, name: os.mkfifo(name)}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_lock_that_is_no_plain_file_of_its_own_is_not_taken(tmp_path, kind):
    """The file behind it stays as it was, and each process asks by itself."""
    target = tmp_path / "precious"
    target.write_text("precious")
    listings = shared(tmp_path)
    asked, ask = counting()
    listings.folder.mkdir(parents=True)
    PLANTED[kind](target, listings.folder / f"{key_hash('entries/x')}.json.lock")

    assert [listings.get("entries/x", ask, wait=1.0) for _ in range(2)] == [["a"], ["a"]]
    assert (asked, target.read_text()) == ([1, 1], "precious")
