"""Operations of the library on a CPU: each tuned, beside plain JAX in the same run.

Both take turns over interleaved rounds. Exit code 1 where the lower end of the paired 95% interval of their ratio is
over 1.02, or where fewer than three operations gain 1.2 times or more.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parent))
from library_cases import Case, collected, operations
from library_programs import TUNED, compiled, study

LIMIT, GAIN, GAINERS = 1.02, 1.2, 3


def sample(program: Callable[..., Any], arrays: Any, calls: int) -> float:
    """Seconds of a call, over so many in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        out = program(*arrays)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def interval(logs: list[float]) -> tuple[float, float, float]:
    """The mean ratio and its 95% interval, from the logarithms of paired ratios."""
    middle, half = fmean(logs), 1.96 * stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def compare(case: Case, number: int, rounds: int) -> dict[str, Any]:
    """The ratio of the tuned call to the plain one."""
    found = study(case, seconds=20.0)
    sides = ("plain", TUNED)
    programs = {
        side: compiled(f"cpu{number}_{at}", found.programs[side], found.arrays) for at, side in enumerate(sides)
    }
    once = max(sample(program, found.arrays, 2) for program in programs.values())
    # A sample is some milliseconds long: shorter ones are mostly the host's own noise.
    calls = max(1, int(5e-3 / once))
    shuffled, logs, seconds = random.Random(0), [], {side: [] for side in sides}
    for _ in range(rounds):
        order = list(sides)
        shuffled.shuffle(order)
        taken = {side: sample(programs[side], found.arrays, calls) for side in order}
        for side in sides:
            seconds[side].append(taken[side])
        logs.append(math.log(taken[TUNED] / taken["plain"]))
    # The host's noise only adds, and to single rounds: the tenth at either end says nothing about the two.
    kept = sorted(logs)[rounds // 10 : rounds - rounds // 10]
    ratio, low, high = interval(kept)
    return {
        "operation": case.op,
        "case": case.name,
        "plain_us": 1e6 * min(seconds["plain"]),
        "tuned_us": 1e6 * min(seconds[TUNED]),
        "ratio": ratio,
        "low": low,
        "high": high,
        "chosen": str(found.chosen),
    }


def main() -> int:
    """Prints a line for each case; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=operations("cpu"), help="operations")
    parser.add_argument("--json", help="where to write everything")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{time.strftime('%Y-%m-%d')}, jax {jax.__version__} on {jax.devices()[0].platform}", flush=True)
    print(f"{'case':<52}{'plain':>9}{'tuned':>9}  tuned/plain (95%)", flush=True)
    rows = []
    with jax.default_device(jax.devices("cpu")[0]):
        for number, case in enumerate(collected("cpu", options.only)):
            row = compare(case, number, options.rounds)
            rows.append(row)
            times = f"{row['plain_us']:>7.0f}us{row['tuned_us']:>7.0f}us"
            ratio = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
            mark = "OVER" if row["low"] > LIMIT else ""
            print(f"{row['operation'] + ' ' + row['case']:<52}{times}  {ratio} {mark} {row['chosen']}", flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    over = sum(row["low"] > LIMIT for row in rows)
    # Surely a gain, and that large: of two equal programs one may look faster where the host is busy.
    gainers = sorted({row["operation"] for row in rows if row["ratio"] <= 1 / GAIN and row["high"] < 1})
    print(f"over the limit: {over}; operations that gain {GAIN} times or more: {', '.join(gainers) or 'none'}")
    few = not options.only and len(gainers) < GAINERS
    return 1 if over or few else 0


if __name__ == "__main__":
    sys.exit(main())
