"""The library on a GPU beside JAX's own kernels, torch and tokamax, row by row, with the issue's limits.

Every row: the floor, our heuristic choice, our tuned one, the tuned one without Pallas-Triton, and each opponent by
device time in one interleaved race; a result that differs from ours is named and not counted. Each operation runs in a
process of its own: where one dies or hangs, the line before it says in which opponent, and the operation goes on with
the next row, without that opponent. Exit code 1 where a limit is broken or a row is missing.

    python benchmarks/opponents_gpu.py --only softmax "attention: 16384" --seconds 240 --json rows.json
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# What a process imports while it waits for its turn.
PACKAGES = ("torch", "torch._dynamo", "torch._inductor.compile_fx", "tokamax")
ROW, TRYING = "@row ", "   trying "
# A process that says nothing for so long hangs: in a kernel, or in a compiler.
SILENCE = 75.0
# A row is begun only with so many seconds left; the first one always is.
ROW_SECONDS = 20.0


def here(options: argparse.Namespace) -> int:
    """The rows of one operation, in this process, once the parent has said from which one on, and for how long."""
    # Before JAX is imported: torch needs memory, too; and torch's compiler starts no processes of its own.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import jax
    from opponents.contest import DeviceLost, compare, told
    from opponents.table import selected
    from opponents.verdict import judged, lines

    for name in (None, "absl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    # Of two packages that bring cuDNN, the first one's is loaded for both; torch is content with a newer one.
    jax.devices()
    for name in PACKAGES:
        # Whatever a package has to say, it says when its opponents are asked for.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        return 0
    if jax.default_backend() != "gpu" and not options.small:
        print("this benchmark needs a GPU, or --small; nothing was measured")
        return 0
    print(f"== {options.here}, jax {jax.__version__} on {jax.devices()[0].device_kind}{others()}", flush=True)
    end = time.monotonic() + order["seconds"]
    entries = [e for e in selected(options.only, options.small) if e.case.op == options.here]
    for number, entry in enumerate(entries):
        if number < order["start"]:
            continue
        print(f"-- {number}: {entry.name}", flush=True)
        if number > order["start"] and time.monotonic() > end - ROW_SECONDS:
            print(f"{ROW}{json.dumps({'name': entry.name, 'missing': 'no time was left'})}", flush=True)
            continue
        jax.clear_caches()
        try:
            without = tuple(order["without"])
            row = compare(entry, number, tune_seconds=options.tune_seconds, store=options.store, without=without)
            row = judged(row, entry.limits, options.tune_seconds)
            print("\n".join(lines(row)), flush=True)
        # The parent knows in which opponent, and does this row once more without it.
        except DeviceLost as error:
            print(f"   {told(error)}", flush=True)
            return 5
        # One row's trouble is not the next one's.
        except Exception as error:
            row = {"missing": told(error)}
            print(f"   no row: {told(error)}", flush=True)
        print(f"{ROW}{json.dumps(row | {'name': entry.name}, default=str)}", flush=True)
    return 0


def others() -> str:
    """Versions of the packages that are there, and of torch's cuDNN."""
    found = {name: sys.modules[name] for name in ("torch", "tokamax") if sys.modules.get(name)}
    said = [f"{name} {getattr(module, '__version__', '')}" for name, module in found.items()]
    with contextlib.suppress(Exception):
        said.append(f"cuDNN {found['torch'].backends.cudnn.version()}")
    return "".join(f", {one}" for one in said)


class Child:
    """A process for one operation: its lines as they come, and the row and the opponent that it was at.

    It is started while the one before it runs, imports what it needs, and waits.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--here", name, "--tune-seconds", str(options.tune_seconds)]
        command += ["--small"] if options.small else []
        command += ["--store", options.store] if options.store else []
        command += ["--only", *options.only] if options.only else []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.row, self.trying = -1, ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def begin(self, **order: Any) -> None:
        """Tells it to begin."""
        assert self.process.stdin is not None
        # One that is already over says so in `follow`.
        with contextlib.suppress(BrokenPipeError), self.process.stdin as orders:
            orders.write(json.dumps(order) + "\n")

    def follow(self, rows: list[dict[str, Any]], end: float) -> str:
        """Passes lines on and collects rows until the process ends; the reason where it ended badly."""
        while True:
            limit = min(SILENCE, end - time.monotonic())
            try:
                line = self.lines.get(timeout=max(limit, 0.1))
            except queue.Empty:
                self.process.kill()
                self.process.wait()
                return f"silent for {SILENCE:.0f} s" if limit == SILENCE else "out of time"
            if line is None:
                status = self.process.wait()
                return f"ended with status {status}" if status else ""
            if line.startswith(ROW):
                rows.append(json.loads(line.removeprefix(ROW)))
                self.trying = ""
                continue
            if line.startswith("-- "):
                self.row, self.trying = int(line[3:].partition(":")[0]), ""
            if line.startswith(TRYING):
                self.trying = line.removeprefix(TRYING)
            elif line == "   racing":
                self.trying = "the race"
            else:
                print(line, flush=True)


def operation(name: str, options: argparse.Namespace, end: float, child: Child | None = None) -> list[dict[str, Any]]:
    """All rows of an operation, over as many processes as it takes."""
    rows: list[dict[str, Any]] = []
    start, without = 0, list(options.without or ())
    while True:
        child = child or Child(name, options)
        child.begin(seconds=end - time.monotonic(), start=start, without=without)
        trouble = child.follow(rows, end)
        if not trouble:
            return rows
        at, trying, child = child.row, child.trying, None
        print(f"   {name}: the process is over: {trouble}; it was at {trying or 'our own programs'}", flush=True)
        known = trying and trying != "the race" and trying not in without
        if trouble == "out of time" or at < 0:
            rows.append({"name": f"{name}, from row {max(at, start)} on", "missing": trouble})
            return rows
        if known:
            # The row once more without the opponent that ended the process.
            without.append(trying)
            start = at
        else:
            rows.append({"name": f"{name}, row {at}", "missing": trouble})
            start = at + 1


def main() -> int:
    """Prints as it goes; 1 where a limit is broken or a row is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="operations, or `operation: text` for the cases with that text")
    parser.add_argument("--without", nargs="*", help="opponents with names that begin so, or a package as it is named")
    parser.add_argument("--json", help="where to write everything")
    parser.add_argument("--seconds", type=float, default=540.0, help="most that all operations may take together")
    parser.add_argument("--tune-seconds", type=float, default=6.0, help="most that one tuning may take")
    parser.add_argument("--store", help="a folder with what was tuned before, and for what is tuned now")
    parser.add_argument("--small", action="store_true", help="small cases, by the host's clock where there is no GPU")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        status = here(options)
        sys.stdout.flush()
        # Compilers that were given up must not be waited for.
        os._exit(status)
    end = time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    asked = counts(options)
    if not asked:
        parser.error(f"no case is called {options.only}; cases are {', '.join(counts(None))}, or `operation: text`")
    names, following = list(asked), None
    for at, name in enumerate(names):
        child = following or Child(name, options)
        following = Child(names[at + 1], options) if at + 1 < len(names) else None
        # Its share of the time that is left; what it does not need is for those after it.
        now = time.monotonic()
        share = (end - now) * asked[name] / asked.total()
        del asked[name]
        rows += operation(name, options, now + share, child)
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return summed(rows)


def counts(options: argparse.Namespace | None) -> Counter[str]:
    """The operations that were asked for, in the table's order, and their rows; nothing here holds the device."""
    from opponents.table import selected

    asked = selected(None) if options is None else selected(options.only, options.small)
    return Counter(entry.case.op for entry in asked)


def summed(rows: list[dict[str, Any]]) -> int:
    """A last look at all rows, and the exit code."""
    if not rows:
        return 0
    print("== ours of the best opponent, of the floor; heuristic of tuned; without Triton of with it")
    bad = 0
    for row in rows:
        if "missing" in row:
            bad += 1
            print(f"{row['name']}: MISSING: {row['missing']}")
            continue
        ratios = ", ".join("-" if ratio is None else f"{ratio:.3f}" for ratio in row["ratios"].values())
        bad += bool(row["broken"])
        print(f"{row['name']}: {ratios}; best {row['best']}{'  LIMIT BROKEN' if row['broken'] else ''}")
    print(f"{bad} of {len(rows)} rows break a limit or are missing" if bad else f"all {len(rows)} rows within limits")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
