"""Quality of predictions for calls that were never measured: each tuning is predicted from a dataset's others.

Beside the prediction: the best cfg of the nearest call alone, and the heuristic's. `unseen_collect.py` makes datasets.
Exit code 1 where a limit is broken; predictions are on by default only where all are kept.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

# Matrices are small: on a busy machine the threads of a numerical library only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from ejkernel.ops.core.description import calls_apart, readable
from ejkernel.ops.core.key import Key
from ejkernel.ops.core.times import read_times
from ejkernel.ops.tuning.prediction.example import Example
from ejkernel.ops.tuning.prediction.predict import Prediction, learn, predict

FOLDER = Path(__file__).parent / "data"
NEAR = 1.05
# Shares of calls: answered, of those near the best, and ends of the share in which the stated bound holds.
ANSWERED, TRUE, HOLDS = 0.70, 0.90, (0.85, 0.95)
# The most of the time over the heuristic's, on average over an operation, and the least share of its gap to close.
OVER_HEURISTIC, CLOSED = 1.02, 0.5


@dataclass(frozen=True)
class Tuning:
    """One tuning of a dataset, and the place of the heuristic's cfg among its times."""

    example: Example
    heuristic: int | None

    @property
    def ratios(self) -> list[float]:
        """Time over the best's, by candidate."""
        return [math.exp(slow) for slow in self.example.slower]


@dataclass(frozen=True)
class Outcome:
    """One call: time over the best's by the prediction, if any, the nearest call's cfg and the heuristic's."""

    operation: str
    predicted: float | None
    chance: float
    bound: float
    nearest: float | None
    heuristic: float | None
    reason: str
    seconds: float


def load(path: Path) -> list[Tuning]:
    """The tunings of a dataset that have two times at least."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    found = []
    for line in map(json.loads, text.splitlines()):
        times = read_times(line.get("summary", {}))
        if sum(seconds is not None for _, seconds in times) < 2:
            continue
        parts = {name: readable(text) for name, text in line["parts"].items() if name != "scheme"}
        parts |= {"passes": line["objective"], "device": line["key"][0]}
        cfgs = [cfg for cfg, _ in times]
        place = cfgs.index(line["heuristic"]) if line["heuristic"] in cfgs else None
        found.append(Tuning(Example(Key(*line["key"]), parts, times), place))
    return found


def study(tunings: Sequence[Tuning]) -> list[Outcome]:
    """Each call of one operation, predicted from all others of it."""
    found = []
    for number, tuning in enumerate(tunings):
        example, ratios = tuning.example, tuning.ratios
        # The same call may have been tuned for other passes: that is no other shape.
        others = [t.example for t in tunings if t is not tuning and _shape(t) != _shape(tuning)]
        order = list(range(len(ratios)))
        if tuning.heuristic is not None:
            order.sort(key=lambda i: i != tuning.heuristic)
        learned = learn(others)
        start = time.perf_counter()
        cfgs = [example.times[i][0] for i in order]
        answer: Prediction | str = learned if isinstance(learned, str) else predict(learned, example.call, cfgs)
        seconds = time.perf_counter() - start
        nearest = min(others, key=lambda other: calls_apart(example.call, other.call), default=None)
        right = not isinstance(answer, str)
        found.append(
            Outcome(
                example.key.op_id,
                ratios[order[cfgs.index(answer.cfg)]] if right else None,
                answer.chance if right else 0.0,
                answer.bound if right else 0.0,
                None if nearest is None else _of_nearest(example, nearest),
                None if tuning.heuristic is None else ratios[tuning.heuristic],
                "" if right else str(answer),
                seconds,
            )
        )
        if sys.stderr.isatty():
            print(f"\r{example.key.op_id} {number + 1}/{len(tunings)}", end="", file=sys.stderr)
    return found


def _shape(tuning: Tuning) -> dict[str, str]:
    return {name: text for name, text in tuning.example.call.items() if name != "passes"}


def _of_nearest(example: Example, nearest: Example) -> float | None:
    """The nearest call's best cfg that this call has a time of."""
    for _, cfg in sorted(zip(nearest.slower.tolist(), nearest.cfgs, strict=True), key=lambda pair: pair[0]):
        place = next((place for place, mine in enumerate(example.cfgs) if mine.text == cfg.text), None)
        if place is not None:
            return math.exp(example.slower[place])
    return None


def share(values: Iterable[bool]) -> float:
    """The share of the values that are true; NaN where there are none."""
    some = list(values)
    return fmean(some) if some else math.nan


def row(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of some calls."""
    answered = [o for o in outcomes if o.predicted is not None]
    beside = [o for o in answered if o.heuristic is not None]
    gaps = [(o.heuristic - 1, o.predicted - 1) for o in beside if o.heuristic > NEAR]  # type: ignore[operator]
    lost = sum(gap for gap, _ in gaps)
    logs = [math.log(o.predicted / o.heuristic) for o in beside]  # type: ignore[operator]
    return {
        "operation": name,
        "calls": len(outcomes),
        "answered": share(o.predicted is not None for o in outcomes),
        "near": share(o.predicted <= NEAR for o in answered),  # type: ignore[operator]
        "stated": fmean(o.chance for o in answered) if answered else math.nan,
        "holds": share(o.predicted <= o.bound for o in answered),  # type: ignore[operator]
        "nearest": share(o.nearest <= NEAR for o in outcomes if o.nearest is not None),
        "heuristic": share(o.heuristic <= NEAR for o in outcomes if o.heuristic is not None),
        "over_heuristic": math.exp(fmean(logs)) if logs else math.nan,
        "closed": 1 - sum(left for _, left in gaps) / lost if lost else math.nan,
    }


def halves(outcomes: Mapping[str, Sequence[Outcome]]) -> list[dict[str, Any]]:
    """The figures of the half of the calls that settings of the model were chosen on, and of the other."""
    chosen: list[Outcome] = []
    other: list[Outcome] = []
    for some in outcomes.values():
        mine = set(random.Random(7).sample(range(len(some)), len(some) // 2))
        for number, outcome in enumerate(some):
            (chosen if number in mine else other).append(outcome)
    return [row("settings chosen on", chosen), row("the others", other)]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table, as documentation has it."""
    names = list(rows[0])
    print("| " + " | ".join(name.replace("_", " ") for name in names) + " |\n|" + " --- |" * len(names))
    for found in rows:
        cells = [found["operation"].removeprefix("library."), str(found["calls"])]
        for name in names[2:]:
            value = found[name]
            cells.append("-" if math.isnan(value) else f"{value:.3f}" if name == "over_heuristic" else f"{value:.0%}")
        print("| " + " | ".join(cells) + " |")


def main() -> int:
    """Prints the table of each dataset; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "datasets", nargs="*", type=Path, help="files of unseen_collect.py; else all in benchmarks/data"
    )
    parser.add_argument("--halves", action="store_true", help="beside all calls, the half that settings were chosen on")
    parser.add_argument("--reasons", action="store_true", help="say why calls have no answer")
    options = parser.parse_args()
    paths = options.datasets or sorted(FOLDER.glob("unseen_*.jsonl.gz"))
    if not paths:
        print("skipped: there is no dataset; make one with unseen_collect.py")
        return 0
    broken = False
    for path in paths:
        tunings = load(path)
        by_operation: dict[str, list[Tuning]] = {}
        for tuning in tunings:
            by_operation.setdefault(tuning.example.key.op_id, []).append(tuning)
        outcomes = {name: study(some) for name, some in sorted(by_operation.items())}
        every = [outcome for some in outcomes.values() for outcome in some]
        rows = [row(name, some) for name, some in outcomes.items()]
        total = row("all", every)
        print(f"{path.name}: {len(tunings)} tunings on {', '.join(sorted({t.example.key.device for t in tunings}))}")
        show([*rows, total, *(halves(outcomes) if options.halves else ())])
        took = [o.seconds for o in every if o.predicted is not None]
        print(f"a question takes {median(took) * 1e3:.1f} ms" if took else "no answer at all")
        limits = {
            "answered": total["answered"] >= ANSWERED,
            "near the best": total["near"] >= TRUE,
            "bound holds": HOLDS[0] <= total["holds"] <= HOLDS[1],
            "over the heuristic": not any(r["over_heuristic"] > OVER_HEURISTIC for r in rows),
            "gap closed": not total["closed"] < CLOSED,
        }
        print("limits: " + ", ".join(f"{name} {'kept' if kept else 'BROKEN'}" for name, kept in limits.items()))
        broken |= not all(limits.values())
        if options.reasons:
            for outcome in every:
                if outcome.reason:
                    print(f"  {outcome.operation}: {outcome.reason}")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
