"""Speed of the store at 1,000, 10,000 and 100,000 entries, beside the simplest whole-file JSON cache.

Exit code 1 where a put at the largest size costs more than twice one at the smallest, or over 1 ms at the median,
where a get from memory takes over 5 us, or where opening takes over 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from ejkernel.ops.core.key import Key
from ejkernel.ops.store.entry_log import EntryLog
from ejkernel.ops.store.files import write
from ejkernel.ops.store.persistent import PersistentCache
from ejkernel.ops.store.snapshot import Snapshot, line, seal, spell
from ejkernel.ops.store.store import StoredEntry

DEVICE, OP = "gpu|NVIDIA H200", "matmul@v1"
CFG = {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3}
ENVIRONMENT = {"jax": "0.12.0", "jaxlib": "0.12.0", "platform": "cuda 12090", "driver": "570.1"}


class WholeFile:
    """The simplest cache that is whole at any moment: every put writes all of it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.data = json.loads(Path(path).read_text()) if os.path.exists(path) else {}

    def put(self, key: Key, cfg: Any) -> None:
        """Keeps a cfg."""
        self.data["|".join(key)] = cfg
        temporary = self.path + ".tmp"
        Path(temporary).write_text(json.dumps(self.data))
        os.replace(temporary, self.path)

    def get(self, key: Key) -> Any:
        """The cfg of a key."""
        return self.data.get("|".join(key))


def call_key(number: int) -> Key:
    """A key like those of real calls."""
    return Key(DEVICE, OP, f"{number:016x}")


def fill(path: str, count: int) -> None:
    """A store with so many entries, written at once."""
    lines = {}
    for number in range(count):
        name = spell(call_key(number))
        raw = {"cfg": CFG, "source": "autotune", "objective": "forward", "when": "2026-01-01T00:00:00+00:00"}
        lines[name] = line(
            name, seal(name, {**raw, "environment": ENVIRONMENT, "summary": {}, "seq": 1, "writer": "0"})
        )
    write(path, Snapshot(lines).text().encode(), durable=False)


def each(call: Callable[[int], Any], numbers: range) -> list[float]:
    """Seconds of each call."""
    taken = []
    for number in numbers:
        start = time.perf_counter()
        call(number)
        taken.append(time.perf_counter() - start)
    return taken


def measure(folder: str, size: int, puts: int) -> dict[str, float]:
    """Every figure at one size, in seconds."""
    path = os.path.join(folder, f"store-{size}.json")
    fill(path, size)
    start = time.perf_counter()
    cache: PersistentCache[Any] = PersistentCache("", path)
    cache.get(*call_key(0))
    opened = time.perf_counter() - start
    put = each(lambda n: cache.keep(call_key(n), StoredEntry(CFG, ENVIRONMENT)), range(size, size + puts))
    cache.get(*call_key(0))
    get = each(lambda n: cache.get(*call_key(0)), range(2000))
    missing = each(lambda n: cache.get(DEVICE, OP, f"none{n}"), range(200))
    entry_log = EntryLog(path)
    entry_log.list_entries()
    start = time.perf_counter()
    entry_log.fold()
    folded = time.perf_counter() - start
    again: PersistentCache[Any] = PersistentCache("", path)
    assert len(again) == size + puts, "entries were lost"
    assert again.get(*call_key(size)) == CFG
    simple = WholeFile(os.path.join(folder, f"simple-{size}.json"))
    simple.data = {"|".join(call_key(n)): CFG for n in range(size)}
    whole = each(lambda n: simple.put(call_key(n), CFG), range(size, size + max(3, 30_000 // size)))
    return {
        "put": median(put),
        "p99": sorted(put)[int(len(put) * 0.99)],
        "worst": max(put),
        "get": median(get),
        "miss": median(missing),
        "open": opened,
        "fold": folded,
        "whole": median(whole),
    }


def main() -> int:
    """Prints the table; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--puts", type=int, default=1_000)
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, folder in {tempfile.gettempdir()}")
    titles = "".join(f"{title:>9}" for title in ("entries", "put", "p99", "worst", "get", "miss", "open", "fold"))
    print(f"{titles}{'whole-file put':>16}")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            found[size] = row = measure(folder, size, options.puts)
            us = "".join(f"{row[name] * 1e6:>7.0f}us" for name in ("put", "p99", "worst"))
            ms = "".join(f"{row[name] * 1e3:>7.0f}ms" for name in ("open", "fold"))
            times = f"{us}{row['get'] * 1e6:>7.1f}us{row['miss'] * 1e6:>7.1f}us{ms}{row['whole'] * 1e3:>14.1f}ms"
            print(f"{size:>9,}{times}")
    first, last = found[options.sizes[0]], found[options.sizes[-1]]
    broken = [
        text
        for text, bad in (
            (f"put grew {last['put'] / first['put']:.2f} times", last["put"] > 2 * first["put"]),
            ("a put takes over 1 ms", last["put"] > 1e-3),
            ("a get from memory takes over 5 us", last["get"] > 5e-6),
            ("opening takes over 1 s", last["open"] > 1),
        )
        if bad
    ]
    print("limits broken: " + "; ".join(broken) if broken else "all within limits")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
