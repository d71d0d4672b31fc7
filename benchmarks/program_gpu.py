"""Whole programs on a GPU with plain JAX, the library's heuristics, and the library tuned by one command.

Each program has a process and a fresh store of its own. `--tiny` has sizes for a CPU. Exit code 1 where a limit is
broken: calls left unmeasured, under 80% of the candidates raced, a budget not kept, a tuned step over 1.005 of the one
with heuristics, two tunings that differ by over 1% (2% where one began with median guesses), a pick 2% off the best.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

NAMES = ("dense", "moe", "experts", "decode", "vit")
RACED, SLOWER, AGAIN, MEDIANS, OFF = 0.8, 1.005, 1.01, 1.02, 0.02


def pairs(texts: list[str]) -> dict[str, Any]:
    """`width=1024` as a name and a value."""
    return {name: ast.literal_eval(value) for name, _, value in (text.partition("=") for text in texts)}


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=NAMES, default=list(NAMES))
    parser.add_argument("--budget", nargs="+", default=["60"], help="seconds of a tuning, or none; several in turn")
    parser.add_argument("--set", nargs="*", default=[], dest="sizes", help="sizes, such as width=1024")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--tuning", nargs="*", default=[], help="fields of AutotuneOptions, such as repetitions=2")
    parser.add_argument("--worker", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--backward", action="store_true", help="a policy that tunes forward and backward")
    parser.add_argument("--jitted", action="store_true", help="autotune gets the jitted step, arguments donated")
    parser.add_argument("--median-heuristics", action="store_true", help="once more with guesses that know nothing")
    parser.add_argument("--repeat-tuning", action="store_true", help="once more into a second store")
    parser.add_argument("--exhaustive", action="store_true", help="measure every candidate of every call")
    parser.add_argument("--profile", action="store_true", help="autotune under cProfile")
    parser.add_argument("--processors", action="store_true", help="which processes the processors work for")
    parser.add_argument("--per-call", choices=["matmul"], help="one call alone, in the process and in a worker")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=560.0, help="seconds after which a child is stopped")
    parser.add_argument("--json", help="where to write everything")
    parser.add_argument("--out", help="folder for profiles")
    # What a child is told by its parent.
    for name in ("--child", "--row", "--keep", "--before", "--medians"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.sizes, options.tuning = pairs(options.sizes), pairs(options.tuning)
    options.budgets = [None if text == "none" else float(text) for text in options.budget]
    options.budget = options.budgets[-1]
    return options


def child(options: argparse.Namespace) -> None:
    """Runs one program here."""
    # The parent needs no JAX, which would take the device's memory.
    import program_study
    from programs import PROGRAMS

    warnings.simplefilter("ignore")
    known = {"rows", "inner", "columns"}.union(*(PROGRAMS[name].sizes for name in options.only))
    unknown = [name for name in options.sizes if name not in known]
    if unknown:
        sys.exit(f"no program has the size {unknown[0]}; there are {', '.join(sorted(known))}")
    row = program_study.one_call(options) if options.child == "matmul" else program_study.study(options.child, options)
    program_study.saved(row, options)


def started(name: str, folder: Path, options: argparse.Namespace, *more: str) -> dict[str, Any] | None:
    """A child's row; None, with a line that says so, where it gave none."""
    folder.mkdir(parents=True)
    row = folder / "row.json"
    # Later words win over the parent's own.
    command = [
        sys.executable,
        __file__,
        *sys.argv[1:],
        "--child",
        name,
        "--row",
        str(row),
        "--keep",
        str(folder),
        *more,
    ]
    environment = {**os.environ, "EJKERNEL_PERSISTENT_CACHE_DIR": str(folder / "store")}
    try:
        code = subprocess.run(command, env=environment, timeout=options.limit, check=False).returncode
    except subprocess.TimeoutExpired:
        code = f"stopped after {options.limit:g} s"
    if row.exists():
        return json.loads(row.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    print(f"{name}: the process gave nothing: {code}", flush=True)
    return None


def broken(row: dict[str, Any]) -> list[str]:
    """The limits that a program's row breaks."""
    if row["program"] == "matmul":
        return []
    if "after" not in row:
        return ["it did not come to its end"]
    found, calls, budget = [], row["calls"], row["budget"]
    unmeasured = [call["operation"] for call in calls if not call["measured"] and call["offered"] != 1]
    offered, raced = (sum(call[name] for call in calls) for name in ("offered", "raced"))
    if unmeasured:
        found.append(f"{len(unmeasured)} of {len(calls)} calls not measured ({', '.join(unmeasured)})")
    if raced < RACED * offered:
        found.append(f"{raced} of {offered} candidates raced")
    if budget is not None and row["seconds"] > budget + max(1.0, 0.05 * budget):
        found.append(f"{row['seconds']:.1f} s of a budget of {budget:g}")
    ratios = row["after"].get("device", row["after"]["wall"])["ratios"]
    before = MEDIANS if "tuned / medians" in ratios else AGAIN
    for name, limit in (("tuned / heuristics", SLOWER), ("tuned / tuned before", before)):
        # Surely slower: of two equal steps one may look so.
        if name in ratios and ratios[name][0] > limit and ratios[name][1] > 1:
            found.append(f"{name} is {ratios[name][0]:.4f}")
    for call in row.get("exhaustive", []):
        if call["pick_off"] is None or call["pick_off"] > OFF:
            found.append(f"the pick of {call['operation']} {call['call']} is off by {call['pick_off']}")
    return found


def summary(title: str, row: dict[str, Any]) -> str:
    """A line of the table at the end."""
    if row["program"] == "matmul":
        return f"{title:<18}{row['seconds']:>7.1f} s"
    if "after" not in row:
        return f"{title:<18}{row['seconds']:>7.1f} s, no race"
    clock = row["after"].get("device", row["after"]["wall"])
    times = "  ".join(f"{name} {ms:.2f}" for name, ms in clock["ms"].items())
    measured = f"{sum(call['measured'] for call in row['calls'])}/{len(row['calls'])} calls"
    raced = f"{sum(c['raced'] for c in row['calls'])}/{sum(c['offered'] for c in row['calls'])} raced"
    ratios = "  ".join(f"{name} {three[0]:.4f}" for name, three in clock["ratios"].items())
    return f"{title:<18}{row['seconds']:>7.1f} s  {measured}, {raced}; ms: {times}; {ratios}"


def main() -> int:
    """Starts a process for each program; a table at the end; 1 where a limit is broken."""
    options = parsed()
    if options.child:
        child(options)
        return 0
    rows: dict[str, dict[str, Any] | None] = {}

    def run(title: str, name: str, *more: str) -> None:
        rows[title] = started(name, folder / title.replace(" ", "-"), options, *more)
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="ejkernel-programs-") as name:
        folder = Path(name)
        if options.per_call:
            run("matmul process", "matmul", "--no-worker")
            run("matmul worker", "matmul", "--worker")
        turns = [(program, budget) for program in options.only for budget in options.budgets]
        for program, budget in [] if options.per_call else turns:
            title = program if len(options.budgets) == 1 else f"{program} {budget or 'none'}"
            seconds = ["--budget", str(budget or "none")]
            run(title, program, *seconds)
            first = folder / title.replace(" ", "-")
            before = ["--before", str(first / "result.json")] if (first / "result.json").exists() else []
            if options.repeat_tuning:
                run(f"{title} again", program, *seconds, *before)
            if options.median_heuristics:
                medians = str(first / "medians.json") if (first / "medians.json").exists() else ""
                run(f"{title} medians", program, *seconds, *before, "--medians", medians)
    print()
    faults = {title: broken(row) if row else ["nothing"] for title, row in rows.items()}
    for title, row in rows.items():
        if row:
            print(summary(title, row))
        for fault in faults[title]:
            print(f"   LIMIT BROKEN: {fault}")
    return 1 if any(faults.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
