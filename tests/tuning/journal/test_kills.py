"""Tunings killed at random moments, with or without a worker: the next one ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from thinning import AT_LENGTH

from ejkernel.ops.tuning.journal.file import cfg_id, read
from ejkernel.ops.tuning.journal.replay import JournalContent

HERE = Path(__file__).resolve().parent
# The process that is killed, and where the candidates run.
KINDS = (("parent", "worker"), ("worker", "worker"), ("parent", "here"))
SEARCHES = (("parent", "search"), ("worker", "search"))


def start(where, folder):
    """A tuning in a process of its own, with its own cache folder."""
    env = {
        **os.environ,
        "EJKERNEL_PERSISTENT_CACHE_DIR": str(folder / "cache"),
        "EJK_TEST_MARKS": str(folder / "marks"),
        # On a busy machine 41 candidates take longer than a call may spend by default.
        "EJKERNEL_OPS_TUNE_SECONDS": "inf",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), str(HERE.parent)]),
    }
    command = [sys.executable, "-W", "error", str(HERE / "killed.py"), where]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    """What it found."""
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return json.loads(out)


def children(pid):
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def marks(folder):
    """How often each candidate with a mark has run."""
    path = folder / "marks"
    lines = path.read_text().split() if path.exists() else []
    return {"deadly": lines.count("exit"), "wrong": lines.count("note")}


def settled(folder):
    """The candidates with a mark whose end is in the journal."""
    found = [JournalContent.of(read(path), alone=True) for path in (folder / "cache").glob("journal/*.jsonl")]
    known = {one for history in found for one in (*history.lost, *history.failed)}
    return [name for name in ("deadly", "wrong") if cfg_id(name) in known]


def kill(process, whom, after):
    """Kills a tuning or its worker after so many seconds; the tuning's worker is then gone as well."""
    # Not to wait for anything: the moment is what is random.
    time.sleep(after)
    workers = children(process.pid)
    watched = []
    for pid in workers:
        try:
            watched.append(os.pidfd_open(pid))
        # Ended by itself meanwhile.
        except ProcessLookupError:
            continue
    if whom == "parent":
        process.kill()
        process.communicate()
    else:
        for descriptor in watched:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    for descriptor in watched:
        assert select.select([descriptor], [], [], 300)[0] == [descriptor]
        os.close(descriptor)


def campaign(rounds, folder, seed, kinds=KINDS):
    chance = random.Random(seed)
    lengths = {}
    for number in range(rounds):
        whom, where = kinds[number % len(kinds)]
        own = folder / str(number)
        own.mkdir()
        began = time.perf_counter()
        process = start(where, own)
        kill(process, whom, chance.uniform(0.2, lengths.get(where, 4.0)))
        if whom == "parent":
            known, before = settled(own), marks(own)
            began = time.perf_counter()
            process = start(where, own)
        found = finish(process)
        lengths[where] = time.perf_counter() - began
        if whom == "parent":
            assert all(marks(own)[name] == before[name] for name in known), (number, known)
        assert found["cfg"] == "fast" or "fast" in found["tied"], (number, found)
        bad = {name: status for name, status in found["outcomes"].items() if status != "ok"}
        assert bad == ({"off": "wrong"} if where == "here" else {"deadly": "crash", "wrong": "wrong"}), number
        print(number, whom, where, found["cfg"], marks(own), f"{lengths[where]:.1f} s")


@pytest.mark.one_leg
def test_a_killed_tuning_ends_as_if_nothing_had_happened(tmp_path):
    """Three kills: of a parent with a worker, of a worker, and of a process that tunes by itself."""
    campaign(3, tmp_path, seed=8)


@AT_LENGTH
def test_sixty_killed_tunings_end_as_if_nothing_had_happened(tmp_path):
    """Same winner or a declared tie, the same failures, none of them found out twice."""
    campaign(60, tmp_path, seed=int(time.time()))


@pytest.mark.slow
def test_twenty_killed_searches_end_as_if_nothing_had_happened(tmp_path, count):
    """The same for a search of 41 candidates in a worker."""
    campaign(count(20, short=1), tmp_path, seed=int(time.time()), kinds=SEARCHES)
