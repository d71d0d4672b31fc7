"""Operations of the library on a GPU: each beside what JAX alone offers, and the hardware's floor.

For every case: plain JAX, each ready-made implementation, our heuristic choice and our tuned one, re-raced over
interleaved rounds of device time; forward, and for some cases forward and backward. Exit code 1 where the tuned one
takes more than 1.01 times the best ready-made, or the heuristic one more than 1.1 times.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parent))
from library_cases import Case, collected, operations
from library_programs import HEURISTIC, TUNED, lowered, study
from tuning_gpu import raced

# Rates measured on an H200: what the hardware does at most.
FLOPS, TRAFFIC = 790e12, 4.3e12
TUNED_LIMIT, HEURISTIC_LIMIT = 1.01, 1.1
# Device seconds of a race: rounds are as many as fit, within bounds.
RACE_SECONDS, LEAST_ROUNDS, MOST_ROUNDS = 1.0, 10, 60


def compare(case: Case, number: int, tune_seconds: float) -> dict[str, Any]:
    """Every way's device time."""
    found = study(case, seconds=tune_seconds)
    tag = f"case{number}"
    names, failed, programs = list(found.programs), {}, {}
    # Equal programs are one: what two of them differed by would be noise.
    texts: dict[str, int] = {}
    runs_as: dict[str, int] = {}
    for at, name in enumerate(names):
        try:
            made = lowered(f"{tag}_{at}", found.programs[name], found.arrays)
            runs_as[name] = texts.setdefault(made.as_text().replace(f"{tag}_{at}", ""), at)
            if runs_as[name] == at:
                programs[at] = made.compile()
        # What cannot run is no opponent, and is told.
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    first = raced(programs, found.arrays, tag, rounds=3)
    rounds = int(RACE_SECONDS / max(3 * sum(first.values()), 1e-9))
    times = raced(programs, found.arrays, tag, rounds=min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS))
    seconds = {name: times[at] for name, at in runs_as.items() if at in times}
    ready = {name: s for name, s in seconds.items() if name not in (HEURISTIC, TUNED)}
    if HEURISTIC not in seconds or TUNED not in seconds:
        raise RuntimeError(f"{case.op} {case.name}: our own choice cannot run: {failed}")
    best = min(ready, key=ready.__getitem__)
    floor = max(case.flops / FLOPS, case.bytes / TRAFFIC)
    return {
        "operation": case.op,
        "case": case.name,
        "passes": "forward+backward" if case.backward else "forward",
        "us": {name: s * 1e6 for name, s in seconds.items()},
        "best_ready": best,
        "floor_us": floor * 1e6,
        "tuned_over_ready": seconds[TUNED] / ready[best],
        "heuristic_over_ready": seconds[HEURISTIC] / ready[best],
        "chosen": str(found.chosen),
        "tuning_s": found.seconds,
        "first_run_s": found.first_run,
        "candidates": sum(t.status != "invalid" for t in found.record.trials) if found.record else 1,
        "not_used": [f"{t.cfg}: {t.status}: {t.message}" for t in found.record.failures] if found.record else [],
        "failed": failed,
    }


def is_broken(row: dict[str, Any]) -> bool:
    """Is a limit broken?"""
    return row["tuned_over_ready"] > TUNED_LIMIT or row["heuristic_over_ready"] > HEURISTIC_LIMIT


def show(row: dict[str, Any]) -> None:
    """The lines of a case."""
    print(f"{row['operation']} {row['case']}: floor {row['floor_us']:.1f} us")
    print("   " + ", ".join(f"{name} {us:.1f}" for name, us in row["us"].items()))
    ratios = f"tuned {row['tuned_over_ready']:.3f}, heuristic {row['heuristic_over_ready']:.3f} of {row['best_ready']}"
    print(f"   {ratios}; {row['chosen']}; {row['candidates']} candidates in {row['tuning_s']:.1f} s")
    print(f"   first run after {row['first_run_s']:.1f} s")
    for name, why in row["failed"].items():
        print(f"   {name} cannot run: {why}")
    if row["not_used"]:
        print(f"   {len(row['not_used'])} candidates not used, first: {row['not_used'][0][:150]}")
    print("   LIMIT BROKEN" if is_broken(row) else "   ok", flush=True)


def main() -> int:
    """Prints a few lines for each case as it comes; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=operations("gpu"), help="operations")
    parser.add_argument("--json", help="where to write everything")
    parser.add_argument("--seconds", type=float, default=20.0, help="most that one tuning may take")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("this benchmark needs a GPU; nothing was measured")
        return 0
    logging.getLogger().setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(f"{time.strftime('%Y-%m-%d')}, jax {jax.__version__} on {jax.devices()[0].device_kind}", flush=True)
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(collected("gpu", options.only)):
        jax.clear_caches()
        rows.append(compare(case, number, options.seconds))
        show(rows[-1])
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1, default=str), encoding="utf-8")
    broken = sum(map(is_broken, rows))
    print(f"limits broken: {broken} of {len(rows)}" if broken else f"all {len(rows)} within limits")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
