"""Campaigns over a remote: writers, readers and folds in processes of their own, killed at random moments.

    python remote_campaigns.py write|read|fold URL NUMBER SEED

A writer prints each put once it has returned; a reader prints what it found that no writer can have put.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fakes_remote import SECRET, key_of_call

from ejkernel.ops.core.errors import StoreError
from ejkernel.ops.store.remote.folding import compact_remote
from ejkernel.ops.store.remote.remote_store import RemoteStore
from ejkernel.ops.store.store import StoredEntry

TESTS = Path(__file__).resolve().parent.parent
# Keys that several writers share.
SHARED = 5


def opened(url: str, **more: Any) -> RemoteStore:
    return RemoteStore(url, key=SECRET, on_fault="raise", fresh_seconds=0.0, **more)


def write(url: str, number: int, seed: int) -> None:
    """Puts keys of its own, and now and then one that other writers put as well, until it is killed or stopped."""
    store, dice = opened(url, write=True), random.Random(seed)
    print("ready", flush=True)
    for count in range(100_000):
        shared = dice.random() < 0.2
        name = f"shared-{dice.randrange(SHARED)}" if shared else f"{number}-{seed}-{count}"
        store.keep(key_of_call(name), StoredEntry(["right", name, number, count]))
        print(json.dumps([name, number, count]), flush=True)


def read(url: str, number: int, seed: int) -> None:
    """Reads everything again and again; prints each entry that is not what a writer puts under its key."""
    store = opened(url)
    print("ready", flush=True)
    while True:
        for folder in store.folders():
            for key, raw, trusted in store.entries(folder):
                cfg = raw["cfg"]
                if not trusted or cfg[:2] != ["right", key.call_key]:
                    print(json.dumps(["wrong", key.call_key, cfg]), flush=True)
        print(json.dumps(["looked"]), flush=True)


def fold(url: str, number: int, seed: int) -> None:
    """Folds again and again."""
    print("ready", flush=True)
    while True:
        compact_remote(opened(url, write=True))
        print(json.dumps(["folded"]), flush=True)


class Worker:
    """One process of the campaign, and the lines that it printed."""

    def __init__(self, kind: str, url: str, number: int, seed: int) -> None:
        paths = [str(TESTS.parent), str(TESTS), str(TESTS / "store")]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, kind, url, str(number), str(seed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self.kind, self.number = kind, number
        self.lines: list[Any] = []
        self.ready = threading.Event()
        self.killed = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for text in self.process.stdout:
            self.ready.set()
            if text.endswith("\n") and text.startswith("["):
                self.lines.append(json.loads(text))
        self.ready.set()

    def kill(self) -> None:
        self.killed = True
        self.process.send_signal(signal.SIGKILL)

    def end(self) -> str:
        """Stops it, and gives what it said when it ended by itself."""
        ended = None if self.killed else self.process.poll()
        self.process.kill()
        said = self.process.communicate()[1]
        return "" if ended is None else f"{self.kind} ended with {ended}: {said[-400:]}"


def worked(workers: Sequence[Worker], puts: int) -> None:
    """Waits until so many puts, one look and one fold more are done; a campaign that stands still is over."""

    def done() -> list[int]:
        return [
            sum(len(worker.lines) for worker in workers if worker.kind == kind) for kind in ("write", "read", "fold")
        ]

    wanted = [count + more for count, more in zip(done(), (puts, 1, 1), strict=True)]
    end = time.monotonic() + 60
    while any(count < want for count, want in zip(done(), wanted, strict=True)) and time.monotonic() < end:
        time.sleep(0.01)


def together(url: str, *, writers: int, readers: int, kills: int, puts: int, seed: int = 0) -> dict[str, Any]:
    """Writers, readers and a fold at once; each kill takes one of them, and another one takes its place."""
    dice = random.Random(seed)
    # The mark first: two writers may write it at once, which is no put of a key.
    opened(url, write=True).keep(key_of_call("first"), StoredEntry(["right", "first", 0, 0]))
    alive = [Worker("write", url, number, seed) for number in range(writers)]
    alive += [Worker("read", url, number, seed) for number in range(readers)]
    alive.append(Worker("fold", url, 0, seed))
    everything = list(alive)
    for worker in alive:
        worker.ready.wait(60)
    for kill in range(kills):
        worked(everything, dice.randrange(1, puts))
        worker = dice.choice(alive)
        worker.kill()
        alive.remove(worker)
        alive.append(Worker(worker.kind, url, worker.number, seed + kill + 1))
        everything.append(alive[-1])
    worked(everything, puts)
    ends = [said for worker in everything if (said := worker.end())]
    return {**counted(url, everything), "ended by themselves": ends}


def counted(url: str, workers: Sequence[Worker]) -> dict[str, Any]:
    """Acknowledged, lost and wrong."""
    acknowledged = [line for worker in workers if worker.kind == "write" for line in worker.lines]
    seen = [line for worker in workers if worker.kind == "read" for line in worker.lines]
    store, lost = opened(url), []
    for number, count, name in [(number, count, name) for name, number, count in acknowledged]:
        found = store.get(*key_of_call(name))
        own = found is not None and found[:2] == ["right", name]
        if not own or (not name.startswith("shared") and found[2:] != [number, count]):
            lost.append(name)
    return {
        "acknowledged": len(acknowledged),
        "lost": len(lost),
        "looks": sum(line == ["looked"] for line in seen),
        "wrong": sum(line[0] == "wrong" for line in seen),
        "folds": sum(len(worker.lines) for worker in workers if worker.kind == "fold"),
    }


if __name__ == "__main__":
    asked, place, which, start = sys.argv[1:]
    try:
        {"write": write, "read": read, "fold": fold}[asked](place, int(which), int(start))
    except StoreError as error:
        sys.exit(str(error))
