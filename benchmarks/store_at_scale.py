"""Costs of open, get, put, keys, fold, verify, compact and prune in a store of a million entries, with memory.

Processor seconds of this process, and the most memory that it has held by then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from typing import Any

from store import CFG, DEVICE, ENVIRONMENT, OP, call_key, fill

from ejkernel.ops.store.maintenance import compact, prune, verify
from ejkernel.ops.store.persistent import PersistentCache
from ejkernel.ops.store.store import StoredEntry


def timed(name: str, act: Callable[[], Any]) -> None:
    """Runs one act and prints its figures."""
    start = time.process_time()
    act()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{name:<18}{time.process_time() - start:8.3f} s {held:8,} MiB", flush=True)


def main() -> None:
    """Fills a store in a process of its own, then measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    size = parser.parse_args().entries
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store.json")
        filling = multiprocessing.get_context("spawn").Process(target=fill, args=(path, size))
        filling.start()
        filling.join()
        print(f"{size:,} entries, {os.path.getsize(path) >> 20:,} MiB")
        cache: PersistentCache[Any] = PersistentCache("", path)
        timed("open", lambda: cache.get(*call_key(5)))
        timed("1,000 gets", lambda: [cache.get(*call_key(n * 7)) for n in range(1000)])
        timed("1,000 misses", lambda: [cache.get(DEVICE, OP, f"none{n}") for n in range(1000)])
        timed("400 puts", lambda: [cache.keep(call_key(size + n), StoredEntry(CFG, ENVIRONMENT)) for n in range(400)])
        timed("keys", cache.keys)
        timed("fold", cache.fold)
        timed("verify", lambda: verify(cache))
        timed("compact", lambda: compact(cache))
        timed("prune", lambda: prune(cache, where=lambda key, raw: key.call_key.endswith("ff")))
        timed("verify again", lambda: verify(cache))


if __name__ == "__main__":
    main()
