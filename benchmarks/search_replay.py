"""How near to the best config a search ends, replayed from spaces that were measured exhaustively.

An evaluation is one distinct config, failures included; the truth is the median without the first run, which is cold.
Beside the default strategy: random search and a genetic algorithm, by the same loop in the same batches. Then the same
with the best configs of the same kernel on other devices as seeds, for a few evaluations. Each search runs twice with
one seed in one space, and must take the same path. Exit code 1 where a limit is broken; where the datasets are absent
there is nothing to replay.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from ejkernel.ops.tuning.search.features import Space, space_of
from ejkernel.ops.tuning.search.genetic import GeneticSearch
from ejkernel.ops.tuning.search.guided import GuidedSearch
from ejkernel.ops.tuning.search.loop import search
from ejkernel.ops.tuning.search.random import RandomSearch
from ejkernel.ops.tuning.search.strategy import Strategy

DATASETS = Path(__file__).resolve().parents[2] / "shared" / "datasets"
# One run a config: no truth to compare with.
WITHOUT = ("coulomb3d",)
EVALUATIONS, SEEDED_EVALUATIONS = 200, 15
BATCH = 16
# Within this of the best counts as found.
NEAR = 0.05
# Shares of runs, and mean regret, that must be reached.
LEAST_SHARE, LEAST_SEEDED_SHARE, MOST_REGRET = 0.75, 0.72, 0.05
# How many of a sibling's best configs are seeds; each differs from the others in two fields at least.
BEST_OF_SIBLING, APART = 3, 2

STRATEGIES: dict[str, Strategy] = {"guided": GuidedSearch(), "genetic": GeneticSearch(), "random": RandomSearch()}


@dataclass(frozen=True)
class Measured:
    """One space with the true time of every config; infinity for those that failed."""

    name: str
    cfgs: tuple[dict[str, Any], ...]
    seconds: tuple[float, ...]
    space: Space

    @property
    def best(self) -> float:
        """The time of the fastest."""
        return min(self.seconds)


@dataclass(frozen=True)
class Runs:
    """How far from the best the runs of one strategy in one space ended, as shares of the best."""

    space: str
    regrets: tuple[float, ...]

    @property
    def share(self) -> float:
        """Of the runs that ended near the best."""
        return fmean(regret <= NEAR for regret in self.regrets)


def load(path: Path) -> Measured:
    """A space from its file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        about = json.loads(next(file).removeprefix("#"))
        rows = list(csv.DictReader(file))
    fields = list(about["params"])
    cfgs = tuple({name: _number(row[name]) for name in fields} for row in rows)
    return Measured(path.name.removesuffix(".csv.gz"), cfgs, tuple(map(truth, rows)), space_of(cfgs))


def truth(row: dict[str, str]) -> float:
    """The median of a row's runs without the first."""
    times = [float(row[n]) for n in row if n[0] == "t" and n[1:].isdigit() and n != "t0" and row[n]]
    return median(times) if row["status"] == "ok" and times else float("inf")


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def run(measured: Measured, strategy: Strategy, seed: int, starts: Sequence[int] = (), most: int = EVALUATIONS) -> dict:
    """One search: what it evaluated, in order."""
    space = replace(measured.space, starts=tuple(starts))
    known = measured.seconds
    return search(space, lambda wanted: {i: known[i] for i in wanted}, strategy, most=most, batch=BATCH, seed=seed)


def regret(measured: Measured, path: dict[int, float]) -> float:
    """How much slower than the best the best found is."""
    return min(path.values()) / measured.best - 1


def families(spaces: Iterable[Measured]) -> list[list[Measured]]:
    """Spaces of the same kernel and parameters on several devices."""
    found: dict[tuple[str, ...], list[Measured]] = {}
    for measured in spaces:
        kernel = measured.name.split("_RTX")[0].split("_milo")[0]
        found.setdefault((kernel, *measured.cfgs[0]), []).append(measured)
    return [family for family in found.values() if len(family) > 1]


def seeds_from(sibling: Measured, target: Measured) -> list[int]:
    """The sibling's best configs that the target has, unlike each other, as places in the target."""
    place = {tuple(cfg.values()): i for i, cfg in enumerate(target.cfgs)}
    found: list[int] = []
    for i in np.argsort(sibling.seconds, kind="stable"):
        here = place.get(tuple(sibling.cfgs[i].values()))
        if here is not None and all(target.space.distance(here)[other] >= APART for other in found):
            found.append(here)
        if len(found) == BEST_OF_SIBLING:
            break
    return found


def in_turn(groups: Sequence[Sequence[int]]) -> list[int]:
    """The first of each, then the second of each, and so on."""
    return list(dict.fromkeys(i for row in zip_longest(*groups) for i in row if i is not None))


def seeded(spaces: Sequence[Measured], runs: int, *, together: bool) -> list[Runs]:
    """Short searches with the best configs of each sibling as seeds, or of all siblings together."""
    found = []
    for family in families(spaces):
        for target in family:
            each = [(s.name, seeds_from(s, target)) for s in family if s is not target]
            sets = [("all siblings", in_turn([starts for _, starts in each]))] if together else each
            for name, starts in sets:
                paths = [run(target, GuidedSearch(), s, starts, SEEDED_EVALUATIONS) for s in range(runs)]
                found.append(Runs(f"{target.name} from {name}", tuple(regret(target, path) for path in paths)))
    return found


def summed(found: Sequence[Runs]) -> tuple[float, float]:
    """Share of near runs and mean regret over all."""
    every = [value for runs in found for value in runs.regrets]
    return fmean(value <= NEAR for value in every), fmean(every)


def repeats(spaces: Sequence[Measured]) -> bool:
    """Does the same seed take the same path?"""
    return all(list(run(m, GuidedSearch(), 7).items()) == list(run(m, GuidedSearch(), 7).items()) for m in spaces[:3])


def show(name: str, columns: Iterable[str]) -> None:
    """One line of a table."""
    print(f"{name:<58}" + "".join(f"{column:>18}" for column in columns), flush=True)


def spell(runs: Sequence[Runs]) -> str:
    """`95%  0.4%`: share of near runs, mean regret."""
    share, mean = summed(runs)
    return f"{share:.1%} {mean:.1%}"


def main() -> int:
    """Prints the tables; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", type=Path, default=DATASETS)
    parser.add_argument("--seeds", type=int, default=20, help="runs in each space")
    parser.add_argument("--only", nargs="*", help="names of spaces")
    options = parser.parse_args()
    paths = [p for p in sorted(options.datasets.glob("*.csv.gz")) if not p.name.startswith(WITHOUT)]
    spaces = [load(p) for p in paths if not options.only or p.name.removesuffix(".csv.gz") in options.only]
    if not spaces:
        print(f"skipped: there are no datasets at {options.datasets}")
        return 0
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {len(spaces)} spaces, {options.seeds} seeds")
    print(f"share within {NEAR:.0%} of the best and mean regret after {EVALUATIONS} evaluations in batches of {BATCH}")
    show("space (configs)", STRATEGIES)
    found: dict[str, list[Runs]] = {name: [] for name in STRATEGIES}
    spent, start = 0.0, 0.0
    for measured in spaces:
        for name, strategy in STRATEGIES.items():
            start = time.perf_counter()
            regrets = tuple(regret(measured, run(measured, strategy, s)) for s in range(options.seeds))
            spent += (time.perf_counter() - start) * (name == "guided")
            found[name].append(Runs(measured.name, regrets))
        show(f"{measured.name} ({len(measured.cfgs):,})", [spell(runs[-1:]) for runs in found.values()])
    show("all", [spell(runs) for runs in found.values()])
    worst = {name: min(runs, key=lambda r: (r.share, -fmean(r.regrets))) for name, runs in found.items()}
    show("worst space", [f"{w.share:.1%} {fmean(w.regrets):.1%}" for w in worst.values()])
    batches = -(-EVALUATIONS // BATCH) * options.seeds * len(spaces)
    print(f"worst of guided: {worst['guided'].space}; a proposal takes {spent / batches * 1e3:.0f} ms on average")
    share, mean = summed(found["guided"])
    limits = {"share": share >= LEAST_SHARE, "regret": mean <= MOST_REGRET, "same path": repeats(spaces)}
    if families(spaces):
        print(f"seeded with {BEST_OF_SIBLING} of the best of a sibling device, {SEEDED_EVALUATIONS} evaluations")
        single, together = (seeded(spaces, options.seeds, together=flag) for flag in (False, True))
        for runs in together:
            show(runs.space, [spell([runs])])
        show("all siblings together", [spell(together)])
        show("one sibling at a time", [spell(single)])
        limits["seeded share"] = summed(together)[0] >= LEAST_SEEDED_SHARE
    print("limits: " + ", ".join(f"{name} {'kept' if kept else 'BROKEN'}" for name, kept in limits.items()))
    return 0 if all(limits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
