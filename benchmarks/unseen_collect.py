"""Tunes the library's operations at many shapes and writes down the times of all candidates, for `unseen.py`.

One line a tuning, appended as it ends: a run that is cut off goes on where it was. What `unseen.py` reads is the same
file, compressed by `--pack`. On a GPU four processes are fast, since compiling takes most of the time and they time in
turns: `--seconds 330 --each 12 --shard 1/4 --out part1.jsonl` and so on, with XLA_PYTHON_CLIENT_PREALLOCATE=false; then
the parts in one file, and `--seconds 0 --pack`. On a CPU one core is enough, and says more where others are busy:
`taskset -c 1 python unseen_collect.py --each 20 --pack`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parent))
from unseen_calls import Call, calls

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Tuner
from ejkernel.ops.core import codec
from ejkernel.ops.core.record import Record
from ejkernel.ops.timing.clock import WallClock
from ejkernel.ops.timing.race import Rules

FOLDER = Path(__file__).parent / "data"


class PatientClock(WallClock):
    """The host's clock for the truth: the least of several times, and every candidate stays for many rounds."""

    name = "wall, patient"
    rules = Rules(least_gaps=(9.0,) * 2 + (2.0,) * 6 + (0.7,) * 6, tie=0.0, most_rounds=20, few=12)

    def time(self, call: Callable[..., Any], leaves: Sequence[Any], calls: int) -> float:
        """Seconds per call: what else runs on the host only ever adds."""
        # Fewer calls at a time, so that some of them are not interrupted.
        each = max(1, calls // 4)
        return min(WallClock.time(self, call, leaves, each) for _ in range(6))


def tuned(call: Call, seconds: float) -> dict[str, Any]:
    """The line of one call: its key and parts, and what a store would keep of its tuning."""
    records: list[Record] = []

    def listen(event: str, **data: Any) -> None:
        if event == "autotune_finish" and data["record"] is not None:
            records.append(data["record"])

    policy = AutotunePolicy(validate_backward=call.backward)
    # In this process: a worker would have to be started for each.
    clock = PatientClock() if jax.devices()[0].platform == "cpu" else None
    tuner = Tuner(seconds=seconds, isolate=False, clock=clock)
    selector = ConfigSelectorChain(ConfigCache(), policy, tuner, on_event=listen)
    Executor(selector).choose_config(call.kernel, *call.args, **call.kwargs)
    if not records:
        return {}
    record = records[-1]
    if clock is not None:
        # Even the middle of many rounds is spoilt on a busy host; the fastest tenth is not.
        least = [sorted(trial.samples_s)[len(trial.samples_s) // 10 :][:1] for trial in record.trials]
        trials = [replace(trial, samples_s=tuple(few)) for trial, few in zip(record.trials, least, strict=True)]
        record = replace(record, trials=tuple(trials))
    heuristic = None if record.heuristic is None else codec.encode(record.trials[record.heuristic].cfg)
    parts = {name[5:]: text for name, text in record.key.items() if name.startswith("call.")}
    summary = {name: record.summary().get(name, {}) for name in ("seconds", "candidates", "failed", "stop", "times")}
    return {
        "key": [record.key["device"], record.key["op_id"], record.key["call_key"]],
        "parts": parts,
        "objective": record.objective,
        "environment": dict(record.environment),
        "heuristic": heuristic,
        "summary": summary,
    }


def name_of(call: Call) -> str:
    """A call as text, by which a later run knows what is there."""
    arrays = ", ".join(f"{a.dtype}{list(a.shape)}" for a in call.args)
    return f"{call.kernel.op_id}({arrays}, {call.kwargs}){' with gradient' if call.backward else ''}"


def main() -> int:
    """Collects until the time is up, and says how many tunings there are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    platform = jax.devices()[0].platform
    parser.add_argument("--out", type=Path, default=FOLDER / f"unseen_{platform}.jsonl")
    parser.add_argument("--seconds", type=float, default=400.0, help="of this run")
    parser.add_argument("--each", type=float, default=4.0, help="seconds of one tuning at most")
    parser.add_argument("--calls", type=int, default=30, help="of each operation")
    parser.add_argument("--seed", default="", help="draws other calls, to judge what was learned from these")
    parser.add_argument("--only", default="", help="the name of one operation, such as ragged_dot")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th call from the i-th on, for several processes")
    parser.add_argument("--pack", action="store_true", help="compress what was collected, for unseen.py")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    # What an earlier tuning wrote into its journal must not shorten this one.
    os.environ["EJKERNEL_PERSISTENT_CACHE_DIR"] = tempfile.mkdtemp()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = set()
    if options.out.exists():
        done = {json.loads(line)["name"] for line in options.out.read_text(encoding="utf-8").splitlines()}
    start, count = time.perf_counter(), len(done)
    part, parts = map(int, options.shard.split("/"))
    drawn = calls("cpu" if platform == "cpu" else "gpu", options.calls, options.seed, options.only)
    for call in islice(drawn, part - 1, None, parts):
        if time.perf_counter() - start > options.seconds:
            break
        name = name_of(call)
        if name in done:
            continue
        began = time.perf_counter()
        # One call that the library or the device cannot do must not end the collection; it is shown.
        try:
            line = tuned(call, options.each)
        except Exception as error:
            print(f"failed  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            line = {}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **line}) + "\n")
        count += 1
        timed = len(line["summary"]["times"].get("us", ())) if line else 0
        print(f"{count:>4} {time.perf_counter() - began:5.1f} s {timed:>3} candidates  {name}", flush=True)
        # Programs of other calls are not needed any more; those that all tunings share are compiled again.
        if count % 25 == 0:
            jax.clear_caches()
    if options.pack:
        with options.out.open("rb") as plain, gzip.open(f"{options.out}.gz", "wb", 9) as packed:
            shutil.copyfileobj(plain, packed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
