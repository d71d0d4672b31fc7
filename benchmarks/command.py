"""The time that the command takes to start, and to list 10,000 entries: `python benchmarks/command.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ejkernel.ops.core.key import Key
from ejkernel.ops.store.snapshot import Snapshot, line, seal, spell

_RUNS = 5
_ENTRIES = 10_000


def store(path: Path) -> None:
    """A store as a fleet of GPUs would leave it."""
    lines = {}
    for number in range(_ENTRIES):
        name = spell(Key("gpu|NVIDIA H200", "matmul@v1", f"{number:016x}"))
        raw = {
            "cfg": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": number % 5},
            "source": "autotune",
            "objective": "forward",
            "when": "2026-11-15T12:06:31.041197+00:00",
            "by": "ejkernel-ops 0.1.0",
            "environment": {"jax": "0.11.2", "jaxlib": "0.11.2", "platform": "cuda 12.9", "driver": "570.1"},
            "summary": {"seconds": 1.2e-5, "gain": [1.4, 1.3, 1.5], "candidates": 72, "clock": "profiler"},
            "call": {"args[0]": "bfloat16[4096,4096]", "args[1]": "bfloat16[4096,4096]"},
            "seq": 1,
            "writer": "0123456789abcdef",
        }
        lines[name] = line(name, seal(name, raw))
    path.write_text(Snapshot(lines).text(), encoding="utf-8")


def seconds(*words: str, folder: str) -> float:
    """The shortest of some runs: other programs only make one longer."""
    command = [sys.executable, "-m", "ejkernel.cli", *words]
    env = {**os.environ, "EJKERNEL_PERSISTENT_CACHE_DIR": folder}
    taken = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        subprocess.run(command, env=env, check=True, capture_output=True)
        taken.append(time.perf_counter() - start)
    return min(taken)


def main() -> None:
    """Prints both."""
    with tempfile.TemporaryDirectory() as folder:
        store(Path(folder, "matmul.json"))
        print(f"ejkernel --help                     {seconds('--help', folder=folder):.3f} s")
        print(f"ejkernel cache list, {_ENTRIES:,} entries  {seconds('cache', 'list', folder=folder):.3f} s")
        print(f"  the same with --json              {seconds('cache', 'list', '--json', folder=folder):.3f} s")


if __name__ == "__main__":
    main()
