"""A kill storm: writers, readers and maintenance at one store, each killed, stopped and continued at any moment."""

from __future__ import annotations

import json
import os
import random
import select
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaigns import acknowledging, end_of, folder
from fakes_store import cfgs, key, store, value

from ejkernel.ops.core.errors import StoreError
from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.store import entry_reader
from ejkernel.ops.store.maintenance import compact, prune, verify
from ejkernel.ops.store.store import StoredEntry

Tell = Callable[[Any], None]
# Keys of which every put counts, and those that a prune may take.
KEPT, RUBBISH = "kept", "rubbish"


def write(place: Path, turn: int, tell: Tell) -> None:
    """Puts new keys, some with a record, an own key again and again, and rubbish."""
    cache = store(place)
    number = 0
    while True:
        for name, cfg in ((f"{KEPT}-{turn}-{number}", number), (f"{KEPT}-{turn}", number), (f"{RUBBISH}-{turn}", 0)):
            record = Record(trials=(Trial(cfg, samples_s=(1.0,)),), winner=0) if number % 4 == 0 else None
            cache.keep(key(name), StoredEntry(cfg, record=record))
            if cache.status == "read-write":
                tell(["put", name, cfg])
            else:
                # A prune took it twice in a row; the next put writes it again.
                tell(["not acknowledged"])
        number += 1


def read(place: Path, turn: int, tell: Tell) -> None:
    """Holds the store open: a key that was seen stays, and its count never goes back."""
    cache = store(place)
    seen: dict[str, int] = {}
    while True:
        names = [name for _, _, name in cache.keys() if name.startswith(KEPT)]
        for name in {*seen, *names[-20:]}:
            found = value(cache, name)
            if found is None or found < seen.get(name, 0):
                tell(["fault", f"{name} was {seen.get(name)} and is {found}"])
                return
            seen[name] = found
        if len(seen) > 200:
            seen.clear()
        tell(["read"])


def maintain(place: Path, turn: int, tell: Tell) -> None:
    """Folds, compacts, verifies and prunes without a break."""
    cache = store(place)
    acts: dict[str, Callable[[], Any]] = {
        "fold": cache.fold,
        "compact": lambda: compact(cache),
        "verify": lambda: verify(cache),
        "prune": lambda: prune(cache, where=lambda found, raw: found.call_key.startswith(RUBBISH)),
    }
    dice = random.Random(turn)
    while True:
        name = dice.choice(list(acts))
        try:
            done = acts[name]()
        except StoreError:
            # Another process folds, or was stopped while it did.
            continue
        if name == "verify" and not done.is_sound:
            tell(["fault", f"verify says {done.damaged}"])
            return
        tell([name])


ROLES = (write, write, write, read, read, maintain, maintain)


class Storm:
    """The processes at one store, what they told, and what was done to them."""

    def __init__(self, seed: int) -> None:
        self.place = folder()
        self.dice = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.put: dict[str, int] = {}
        self.faults: list[str] = []
        self.stopped: set[int] = set()
        # By pipe: the process, its role and the text that it has not ended a line of.
        self.running: dict[int, tuple[int, int]] = {}
        self.rest: dict[int, bytes] = {}
        self.turn = 0
        for role in range(len(ROLES)):
            self.start(role)

    def start(self, role: int) -> None:
        """A new process in a role."""
        self.turn += 1
        turn = self.turn
        pid, pipe = acknowledging(lambda tell: ROLES[role](self.place, turn, tell))
        self.running[pipe], self.rest[pipe] = (pid, role), b""

    def listen(self, lines: int) -> None:
        """Takes what processes tell, until so many lines have come."""
        while lines > 0:
            ready, _, _ = select.select(list(self.running), [], [], 60)
            assert ready, "no process has got on for a minute"
            for pipe in ready:
                lines -= self.take(pipe, os.read(pipe, 1 << 16))

    def take(self, pipe: int, data: bytes) -> int:
        """Notes the whole lines of what a process told; one that ended by itself is a fault."""
        if not data:
            self.faults.append(f"a process in role {self.running[pipe][1]} ended by itself")
            self.end(pipe)
            return 1
        *whole, self.rest[pipe] = (self.rest[pipe] + data).split(b"\n")
        for text in whole:
            kind, *what = json.loads(text)
            self.counts[kind] += 1
            if kind == "put" and not what[0].startswith(RUBBISH):
                self.put[what[0]] = max(what[1], self.put.get(what[0], 0))
            elif kind == "fault":
                self.faults.append(what[0])
        return len(whole)

    def deed(self) -> None:
        """Kills, stops or continues one process, and puts another in the place of a killed one."""
        pipe = self.dice.choice(list(self.running))
        pid, role = self.running[pipe]
        if pid in self.stopped and self.dice.random() < 0.7:
            self.counts["continued"] += 1
            self.stopped.remove(pid)
            os.kill(pid, signal.SIGCONT)
        # Some go on: else nothing more would come.
        elif len(self.stopped) < 3 and pid not in self.stopped and self.dice.random() < 0.4:
            self.counts["stopped"] += 1
            self.stopped.add(pid)
            os.kill(pid, signal.SIGSTOP)
        else:
            self.counts["killed"] += 1
            self.kill(pipe)
            self.start(role)

    def kill(self, pipe: int) -> None:
        """Ends a process with kill -9, and takes what it had told."""
        pid, _ = self.running[pipe]
        self.stopped.discard(pid)
        os.kill(pid, signal.SIGKILL)
        while data := os.read(pipe, 1 << 16):
            self.take(pipe, data)
        self.end(pipe)

    def end(self, pipe: int) -> None:
        pid, _ = self.running.pop(pipe)
        os.close(pipe)
        end_of(pid)


def storm(deeds: int, seed: int, *, large: bool) -> dict[str, Any]:
    """So many kills, stops and continuations; then what was acknowledged is looked for."""
    if large:
        entry_reader.SMALL = -1
    now = Storm(seed)
    for _ in range(deeds):
        now.listen(now.dice.randint(1, 12))
        now.deed()
    for pipe in list(now.running):
        now.kill(pipe)
    fresh = store(now.place)
    lost = [name for name, cfg in now.put.items() if (value(fresh, name) or 0) < cfg or value(fresh, name) is None]
    found = verify(fresh)
    fresh.fold()
    in_file = set(cfgs(fresh.path))
    return {
        **now.counts,
        "faults": now.faults[:5],
        "lost": len(lost) + len(set(now.put) - in_file),
        "sound": found.is_sound,
    }
