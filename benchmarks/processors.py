"""Counts for which processes of a tuning the processors work: by kind of process and by slice of the run.

    python benchmarks/processors.py PID

adds up the time of a process and its descendants until its input ends: it prints a line after its first reading, and a
table at the end. `watched_elsewhere` starts that: in the process itself each of some thousand files that are read would
wait for Python's lock, and so would the tuning.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from sampling import Sampling

SLICE = 5.0
_TICKS = os.sysconf("SC_CLK_TCK")
# Kinds by what a process's command line has.
_KINDS = {"tracing.tracer": "tracers", "worker.main": "worker"}


class Processors(Sampling):
    """Adds up processor time in a `with` block: of a process, its descendants, and their busiest threads."""

    # Times are totals, so a reading a second misses nothing but what this process itself starts for less.
    interval = 1.0

    def __init__(self, root: int | None = None) -> None:
        super().__init__()
        self._root = os.getpid() if root is None else root
        self.seconds: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.threads: Counter[str] = Counter()
        # Ticks of each process with those of its children that have ended, and of each thread, when last seen.
        self._seen: dict[str, int] = {}
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        # What was spent before is not counted.
        self._look(counts=False)
        return super().__enter__()

    def look(self) -> None:
        """Adds what was spent since the last reading."""
        self._look(counts=True)

    def _look(self, *, counts: bool) -> None:
        part = int((time.perf_counter() - self._start) / SLICE)
        for pid, kind in _family(self._root).items():
            own, ended = _ticks(f"/proc/{pid}/stat")
            self.seconds[part][kind] += self._more(f"{pid}", own, counts=counts)
            # What the process itself has started is looked at while it lives.
            if pid != self._root:
                self.seconds[part][f"started by {kind}"] += self._more(f"{pid}+", ended, counts=counts)
            for task in _names(f"/proc/{pid}/task"):
                spent, _ = _ticks(f"/proc/{pid}/task/{task}/stat")
                name = _read(f"/proc/{pid}/task/{task}/comm").strip().rstrip("0123456789")
                self.threads[f"{kind}: {name}"] += self._more(f"{pid}/{task}", spent, counts=counts)

    def _more(self, name: str, ticks: int, *, counts: bool) -> float:
        before, self._seen[name] = self._seen.get(name, 0), max(ticks, self._seen.get(name, 0))
        return max(0, ticks - before) / _TICKS if counts else 0.0

    def table(self, most: int = 12) -> str:
        """A line each: kinds of processes over the run, and the busiest threads."""
        total: Counter[str] = Counter()
        for found in self.seconds.values():
            total.update(found)
        lines = [f"   processor seconds, in slices of {SLICE:g} s"]
        for kind, seconds in total.most_common():
            if seconds >= 0.5:
                parts = " ".join(f"{self.seconds[part][kind]:.0f}" for part in range(max(self.seconds) + 1))
                lines.append(f"   {seconds:7.1f}  {kind}: {parts}")
        lines += [f"   {seconds:7.1f}  threads of {name}" for name, seconds in self.threads.most_common(most)]
        return "\n".join(lines)


@contextlib.contextmanager
def watched_elsewhere() -> Iterator[list[str]]:
    """The table of what this process and its descendants take in a `with` block, once that is over."""
    table: list[str] = []
    command = [sys.executable, __file__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as looking:
        # Python takes a while to start: the block begins once the first reading is over.
        if not looking.stdout.readline():
            raise RuntimeError("the process that watches this one ended at once; its own error is above")
        yield table
        looking.stdin.close()
        table.append(looking.stdout.read().rstrip())


def _family(root: int) -> dict[int, str]:
    """A process and its descendants without this one, with their kinds."""
    parents = {int(name): _parent(name) for name in _names("/proc") if name.isdigit()}
    if root != os.getpid():
        parents.pop(os.getpid(), None)
    found = {root: "this process"}
    # Children have larger numbers than their parents, but for a counter that has begun anew.
    for _ in range(4):
        for pid, parent in parents.items():
            if parent in found and pid not in found:
                words = _read(f"/proc/{pid}/cmdline").replace("\0", " ")
                found[pid] = next((kind for part, kind in _KINDS.items() if part in words), "others")
    return found


def _parent(pid: str) -> int:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def _ticks(path: str) -> tuple[int, int]:
    """Ticks of a process or thread, and of its children that have ended."""
    fields = _read(path).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])) if fields else (0, 0)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    # It has ended.
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    # It has ended.
    except OSError:
        return ""


if __name__ == "__main__":
    with Processors(int(sys.argv[1])) as processors:
        print("watching", flush=True)
        sys.stdin.read()
    print(processors.table())
