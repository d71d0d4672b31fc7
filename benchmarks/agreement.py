"""The cost of agreement, and whether it holds: random keys over real processes on this machine.

    python benchmarks/agreement.py --processes 4 --keys 1000

Each process has another winner, asks in an order of its own, knows some answers beforehand, is slow now and then, and
leaves one key in ten out. The command prints how many keys any two processes disagree on, and how long a decision took.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Starts the processes and prints what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    options = parser.parse_args()
    found = campaign(options.processes, options.keys, options.seed)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<44} {value}")


def campaign(processes: int, keys: int, seed: int) -> dict[str, Any]:
    """Runs the processes and counts."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__]
        start = time.perf_counter()
        running = [
            subprocess.Popen(
                [*command, f"rank={rank}", str(processes), str(keys), str(seed), str(port), folder], env=own
            )
            for rank, own in enumerate([environment] * processes)
        ]
        codes = [process.wait() for process in running]
        seconds = time.perf_counter() - start
        if any(codes):
            raise SystemExit(f"processes ended with {codes}")
        said = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
    return {"processes": processes, "keys": keys, **count(said), "seconds in all": round(seconds, 1)}


def count(said: list[dict[str, Any]]) -> dict[str, Any]:
    """Decisions, disagreements and times of what the processes said."""
    answers: dict[str, set[int]] = {}
    for one in said:
        for key, size in one["sizes"].items():
            answers.setdefault(key, set()).add(size)
    times = {kind: [t for one in said for t in one["seconds"][kind]] for kind in ("led", "followed", "again")}
    return {
        "decisions": sum(len(one["sizes"]) for one in said),
        "keys on which processes disagree": sum(len(sizes) > 1 for sizes in answers.values()),
        "tunings": sum(one["tunings"] for one in said),
        "known beforehand": sum(one["known"] for one in said),
        "ms to decide for all, median": _ms(times["led"], 0.5),
        "ms to follow, median": _ms(times["followed"], 0.5),
        "ms to follow, 99 of 100": _ms(times["followed"], 0.99),
        "ms to choose again, median": _ms(times["again"], 0.5),
        "longest wait, s": round(max(one["longest"] for one in said), 3),
    }


def _ms(seconds: list[float], share: float) -> float | None:
    if not seconds:
        return None
    ranked = sorted(seconds)
    return round(1e3 * (median(ranked) if share == 0.5 else ranked[int(share * (len(ranked) - 1))]), 2)


def rank_main(rank: int, processes: int, keys: int, seed: int, port: int, folder: Path) -> None:
    """One of the processes."""
    import jax
    import numpy as np

    from ejkernel.ops import (
        ConfigCache,
        ConfigSelectorChain,
        Invocation,
        Kernel,
        agreement_report,
        device_fingerprint,
    )

    class Doubling(Kernel[int, jax.Array]):
        """Twice the argument, whatever the cfg says."""

        op_id = "doubling"

        def run(self, x: Any, *, cfg: int) -> Any:
            return x * 2

        def heuristic_cfg(self, inv: Any) -> int:
            return 0

        def candidate_cfgs(self, inv: Any) -> list[int]:
            return list(range(processes + 1))

    class Own:
        """Finds this process's own winner, sometimes slowly."""

        calls = 0

        def autotune(self, make_fn: Any, args: Any, kwargs: Any, candidates: Any) -> int:
            self.calls += 1
            if rng.random() < 0.05:
                time.sleep(0.05)
            return rank + 1

    rng = random.Random(f"{seed} {rank}")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    jax.devices()
    kernel, tuner = Doubling(), Own()
    selector: ConfigSelectorChain[Any, Any] = ConfigSelectorChain(ConfigCache(), tuner=tuner)
    mine = rng.sample(range(keys), keys - keys // 10)
    calls = {number: Invocation("doubling", (np.ones(number + 1, np.float32),), {}) for number in mine}
    known = [number for number in mine if rng.random() < 0.1]
    for number in known:
        selector.cache.put(device_fingerprint(), "doubling@v0", calls[number].call_key, 100 + rank)
    sizes, seconds = {}, {"led": [], "followed": [], "again": []}
    for number in mine:
        before = tuner.calls
        start = time.perf_counter()
        sizes[number] = selector.choose(calls[number], kernel)
        taken = time.perf_counter() - start
        by_this = sizes[number] in (rank + 1, 100 + rank)
        if tuner.calls == before:
            seconds["led" if by_this else "followed"].append(taken)
        start = time.perf_counter()
        selector.choose(calls[number], kernel)
        seconds["again"].append(time.perf_counter() - start)
    longest = max(seconds["followed"] + seconds["led"])
    rows = agreement_report().agreed
    said = {"sizes": sizes, "seconds": seconds, "tunings": tuner.calls, "known": len(known), "longest": longest}
    (folder / f"{rank}.json").write_text(json.dumps(said))
    assert len(rows) == len(mine)
    # The coordinator leaves last: JAX ends every process that it leaves behind.
    if rank == 0:
        while not all((folder / f"{other}.json").exists() for other in range(processes)):
            time.sleep(0.05)
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("rank="):
        rank_main(int(sys.argv[1][5:]), *map(int, sys.argv[2:6]), Path(sys.argv[6]))
    else:
        main()
