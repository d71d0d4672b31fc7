"""Gains and costs of a remote: an empty machine with one and without, local hits, 10,000 entries behind latency.

    python benchmarks/remote.py                      on any machine; the remote is a folder
    python benchmarks/remote.py --url s3://b/folder  another remote, empty as yet
    python benchmarks/remote.py --part compiler      the compiler's caches as well: a second process measures nothing

Exit code 1 where an empty machine with a remote of signed entries tunes, where a local hit costs more with a remote
than without, or where a second process with the first one's compiler caches compiles or measures.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECRET = "the benchmark's own secret, known to all"

# A program as a user would write it: three operations of the library, some of them differentiated.
PROGRAM = """
import json, time
start = time.perf_counter()
import jax, jax.numpy as jnp
from ejkernel.library import layer_norm, matmul, rms_norm, softmax
from ejkernel.ops import counters, default_selector
seen = {"hits": 0, "misses": 0}
def count(event, **more):
    if event.startswith("/jax/compilation_cache/cache_"):
        seen[event.rsplit("_", 1)[1]] = seen.get(event.rsplit("_", 1)[1], 0) + 1
jax.monitoring.register_event_listener(count)
size = SIZE
x = jnp.ones((size, 1024)) * 0.5
jax.block_until_ready(x)
imported = time.perf_counter()
out = [rms_norm(x, jnp.ones(1024)), softmax(x), layer_norm(x, jnp.ones(1024), jnp.zeros(1024)), matmul(x, x.T)]
jax.block_until_ready(out)
first = time.perf_counter()
remote = default_selector().remote
left = 0 if remote is None or not remote.write else remote.flush(30.0)
found = counters().as_dict()
print(json.dumps({"import": imported - start, "first": first - imported, "tunings": found["autotune"],
                  "remote": found["remote"], "persistent": found["persistent"], "unwritten": left, **seen}))
"""


def program(size: int, cache: str, **settings: str) -> dict[str, Any]:
    """Runs the program on a machine with this cache folder."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "EJKERNEL_PERSISTENT_CACHE_DIR": cache, **settings}
    code = PROGRAM.replace("SIZE", str(size))
    done = subprocess.run([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def empty_machine(url: str, size: int) -> list[str]:
    """Seconds to the first results, and tunings: the machine that fills the remote, one without it, one with it."""
    with tempfile.TemporaryDirectory() as folder:
        team = {"EJKERNEL_OPS_REMOTE": url, "EJKERNEL_OPS_REMOTE_KEY": SECRET}
        rows = {
            "fills the remote": program(size, f"{folder}/a", **team, EJKERNEL_OPS_REMOTE_WRITE="on"),
            "empty, no remote": program(size, f"{folder}/b"),
            "empty, remote": program(size, f"{folder}/c", **team),
            "the same again": program(size, f"{folder}/c", **team),
            "empty, wrong key": program(size, f"{folder}/d", **{**team, "EJKERNEL_OPS_REMOTE_KEY": SECRET[::-1]}),
        }
        # It takes connections, and never answers.
        with socket.create_server(("127.0.0.1", 0)) as dead:
            where = f"http://127.0.0.1:{dead.getsockname()[1]}/x"
            rows["empty, dead remote"] = program(size, f"{folder}/e", EJKERNEL_OPS_REMOTE=where)
    print(f"{'machine':<20}{'first results':>14}{'tunings':>9}{'remote':>8}{'store':>7}")
    for name, row in rows.items():
        print(f"{name:<20}{row['first']:>12.2f} s{row['tunings']:>9}{row['remote']:>8}{row['persistent']:>7}")
    tunes = rows["empty, remote"]["tunings"] or rows["the same again"]["tunings"]
    return ["an empty machine with a remote tunes"] if tunes else []


def local_hits() -> list[str]:
    """A choice that memory or the user's store answers, with and without a remote."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fakes import Doubling, call_of, key_of

    from ejkernel.ops import ConfigCache, ConfigSelectorChain, PersistentCache, RemoteStore

    kernel = Doubling()
    call = call_of(kernel)
    with tempfile.TemporaryDirectory() as folder:
        store: PersistentCache[Any] = PersistentCache("", os.path.join(folder, "ops.json"))
        store.put(*key_of(kernel, call), {"size": 2})
        remote = RemoteStore(f"file://{folder}/team", key=SECRET)
        chains = {"without": None, "with": remote}
        kinds = ("memory", "store")
        found: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind in kinds for name in chains}
        for _ in range(2000):
            # In turns, so that both have the same machine.
            for name, place in chains.items():
                chain: Any = ConfigSelectorChain(ConfigCache(), persistent=store, remote=place)
                for kind in ("store", "memory"):
                    start = time.perf_counter()
                    chain.decide(call, kernel)
                    found[kind, name].append(time.perf_counter() - start)
    broken = []
    for kind in kinds:
        plain, remotely = (median(found[kind, name]) for name in chains)
        figures = f"{plain * 1e6:>8.1f} us without, {remotely * 1e6:.1f} us with: {remotely / plain:.3f}"
        print(f"{kind + ' hit':<20}{figures}")
        broken += [f"a {kind} hit costs more with a remote"] if remotely > 1.1 * plain else []
    return broken


class Far:
    """Objects behind latency, with a count of the requests; a listing has pages of a thousand names, as S3 has."""

    def __init__(self, inner: Any, latency: float) -> None:
        self.inner, self.latency, self.requests = inner, latency, 0

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def request(*args: Any) -> Any:
            answer = getattr(self.inner, verb)(*args)
            pages = max(1, -(-len(answer) // 1000)) if verb == "names" else 1
            self.requests += pages
            time.sleep(pages * self.latency)
            return answer

        return request


def far_entries(count: int, latency: float) -> list[str]:
    """Looks into a remote of so many entries behind so much latency, before and after a fold."""
    from ejkernel.ops.core.key import Key
    from ejkernel.ops.store.remote.folding import compact_remote
    from ejkernel.ops.store.remote.objects import FsspecObjects
    from ejkernel.ops.store.remote.remote_store import RemoteStore, in_parallel
    from ejkernel.ops.store.store import StoredEntry

    cfg = {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3}

    def key(number: int) -> Key:
        return Key("gpu|NVIDIA H200", "matmul@v1", f"{number:016x}")

    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}"
        writer = RemoteStore(url, key=SECRET, write=True, on_fault="raise")
        in_parallel(lambda number: writer.keep(key(number), StoredEntry(cfg)), range(count))
        for title in ("one object each", "folded"):
            far = Far(FsspecObjects(url), latency)
            reader: Any = RemoteStore(url, key=SECRET, objects=far, fresh_seconds=300.0)
            seconds = []
            for number in (0, *range(count // 2, count // 2 + 20), count + 1):
                start = time.perf_counter()
                found = reader.lookup(key(number))
                seconds.append(time.perf_counter() - start)
                assert (found is not None and found.trusted) == (number < count), reader.reason
            print(
                f"{count:,} entries, {latency * 1e3:.0f} ms, {title:<16} first {seconds[0]:.2f} s, next "
                f"{median(seconds[1:-1]) * 1e3:.0f} ms, a miss {seconds[-1] * 1e3:.1f} ms, {far.requests} requests"
            )
            if title == "one object each":
                start = time.perf_counter()
                # Listings of this machine are out of date once it is folded.
                compact_remote(RemoteStore(url, key=SECRET, write=True, on_fault="raise", fresh_seconds=0.0))
                print(f"  a fold of them takes {time.perf_counter() - start:.1f} s without the latency")
                time.sleep(0.01)
    return []


def compiler(url: str, size: int) -> list[str]:
    """A second machine with the first one's compiler caches: does it compile, and does XLA measure?"""
    command = [sys.executable, "-m", "ejkernel.cli", "cache"]
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "EJKERNEL_OPS_REMOTE_KEY": SECRET}
        rows, files = {}, {}
        for name in ("first", "second"):
            caches = {
                "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax-{name}",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "xla_gpu_per_fusion_autotune_cache_dir",
            }
            local = {**variables, "EJKERNEL_PERSISTENT_CACHE_DIR": f"{folder}/{name}"}
            place = [f"{folder}/{name}", url, "--compiler", f"{folder}/jax-{name}"]
            if name == "second":
                subprocess.run([*command, "pull", *place], env=local, check=True, stdout=subprocess.DEVNULL)
            before = set(_below(f"{folder}/jax-{name}"))
            rows[name] = program(size, f"{folder}/{name}", **caches)
            files[name] = [path for path in set(_below(f"{folder}/jax-{name}")) - before if "autotune" in path]
            if name == "first":
                subprocess.run([*command, "push", *place], env=local, check=True, stdout=subprocess.DEVNULL)
    for name, row in rows.items():
        print(
            f"{name + ' machine':<20}{row['first']:>8.2f} s to the first results, {row['tunings']} tunings, "
            f"{row['misses']} programs compiled, {row['hits']} from the cache, {len(files[name])} results of XLA's own "
            "measurements new"
        )
    again = rows["second"]
    return [
        text
        for text, bad in (
            ("the second machine tunes", again["tunings"]),
            ("the second machine compiles", again["misses"]),
            ("XLA measures on the second machine", files["second"]),
        )
        if bad
    ]


def _below(folder: str) -> list[str]:
    return [os.path.relpath(os.path.join(place, name), folder) for place, _, names in os.walk(folder) for name in names]


def main() -> int:
    """Prints the figures; 1 where a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a remote that is empty; else a new folder")
    parser.add_argument("--part", choices=("machine", "hits", "far", "compiler"), action="append")
    parser.add_argument("--size", type=int, default=512, help="rows of the program's arrays")
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--latency", type=float, default=0.05)
    options = parser.parse_args()
    parts = options.part or ["machine", "hits", "far", "compiler"]
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        url = options.url or f"file://{folder}"
        if "machine" in parts:
            broken += empty_machine(f"{url}/machine", options.size)
        if "hits" in parts:
            broken += local_hits()
        if "far" in parts:
            broken += far_entries(options.entries, options.latency)
        if "compiler" in parts:
            broken += compiler(f"{url}/compiler", options.size)
    for text in broken:
        print(f"NOT AS PROMISED: {text}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
