"""Distances from the best config where searches end, replayed from spaces that were measured exhaustively.

An evaluation is one distinct config, failures included; the truth is the median without the first run, which is cold.
Beside the default strategy at three budgets: random search and a genetic algorithm, by the same loop. Then spaces of
which half or nearly all fails, in a region as limits of a device make it, and times with noise, where the ten best are
told apart by the truth as the last race does. Then short searches with seeds from another device of the same kernel, by
the rule of the store: what its entry keeps of the record of a whole search there. Each search runs twice with one seed
in one space, and must take the same path. Exit code 1 where a limit is broken; where the datasets are absent there is
nothing to replay.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from ejkernel.ops.config.warm_start import MOST_SEEDS, in_turn
from ejkernel.ops.core.record import Record, Trial
from ejkernel.ops.tuning.search.features import Space, space_of
from ejkernel.ops.tuning.search.genetic import GeneticSearch
from ejkernel.ops.tuning.search.guided import GuidedSearch
from ejkernel.ops.tuning.search.loop import search
from ejkernel.ops.tuning.search.random import RandomSearch
from ejkernel.ops.tuning.search.strategy import Strategy, best_first

DATASETS = Path(os.environ.get("EJKERNEL_DATASETS") or Path(__file__).resolve().parents[2] / "shared" / "datasets")
# One run a config: no truth to compare with.
WITHOUT = ("coulomb3d",)
EVALUATIONS, SEEDED_EVALUATIONS = 200, 15
BUDGETS = (50, 100, EVALUATIONS)
LATER_SEEDED_EVALUATIONS = 30
# Variants of each space: the share that fails, and how far a time is off.
VARIANTS = {"half fails": (0.5, 0.0), "98% fails": (0.98, 0.0), "times 10% off": (0.0, 0.1)}
VARIANT_EVALUATIONS = 100
FINALISTS = 10
BATCH = 16
# Within this of the best counts as found.
NEAR = 0.05
# Shares of runs, and mean regret, that must be reached.
LEAST_SHARE, LEAST_SEEDED_SHARE, MOST_REGRET = 0.75, 0.72, 0.05

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
    """Distances from the best at which the runs of one strategy in one space ended, as shares of the best."""

    space: str
    regrets: tuple[float, ...]

    @property
    def share(self) -> float:
        """The share of the runs that ended near the best."""
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
    """The share by which the best found is slower than the best."""
    return min(path.values()) / measured.best - 1


def variant(measured: Measured, failing: float, seed: int) -> Measured:
    """The space with a region that fails: beyond a limit of a sum of some sizes, as memory and registers have them."""
    if not failing:
        return measured
    rng = np.random.default_rng(seed)
    points = measured.space.points
    use = points @ (
        rng.random(points.shape[1]) * (rng.random(points.shape[1]) < 0.5) + 1e-3 * rng.random(points.shape[1])
    )
    limit = np.quantile(use, 1 - failing)
    seconds = tuple(float("inf") if u > limit else s for u, s in zip(use.tolist(), measured.seconds, strict=True))
    return replace(measured, seconds=seconds)


def run_variant(measured: Measured, failing: float, noise: float, seed: int) -> float | None:
    """The regret of one search in a variant of a space; None where nothing of it runs."""
    made = variant(measured, failing, seed)
    if not np.isfinite(made.best):
        return None
    rng = np.random.default_rng(seed)
    off = np.exp(noise * rng.standard_normal(len(made.seconds)))
    seen = (np.array(made.seconds) * off).tolist()
    path = search(
        made.space,
        lambda wanted: {i: seen[i] for i in wanted},
        GuidedSearch(),
        most=VARIANT_EVALUATIONS,
        batch=BATCH,
        seed=seed,
    )
    finalists = best_first(path)[:FINALISTS]
    # Nothing that ran was found: as bad as it gets.
    return min((made.seconds[i] for i in finalists), default=2 * made.best) / made.best - 1


def families(spaces: Iterable[Measured]) -> list[list[Measured]]:
    """Spaces of the same kernel and parameters on several devices."""
    found: dict[tuple[str, ...], list[Measured]] = {}
    for measured in spaces:
        kernel = measured.name.split("_RTX")[0].split("_milo")[0]
        found.setdefault((kernel, *measured.cfgs[0]), []).append(measured)
    return [family for family in found.values() if len(family) > 1]


def seeds_from(sibling: Measured, known: Mapping[int, float]) -> list[dict[str, Any]]:
    """The configs that a store's entry offers to other devices, after a search that measured these."""
    best = best_first(known)
    trials = tuple(Trial(sibling.cfgs[i], samples_s=(known[i],)) for i in best)
    record = Record(trials=trials, winner=0, space=len(sibling.cfgs))
    return [record.cfg, *record.summary()["next"]]


def places_of(cfgs: Iterable[dict[str, Any]], target: Measured) -> list[int]:
    """Places in the target of the cfgs that it has, each once: as many as a search is given."""
    place = {tuple(cfg.values()): i for i, cfg in enumerate(target.cfgs)}
    found = dict.fromkeys(place[values] for cfg in cfgs if (values := tuple(cfg.values())) in place)
    return list(found)[:MOST_SEEDS]


def three_best(sibling: Measured, known: Mapping[int, float]) -> list[dict[str, Any]]:
    """The three fastest, however alike they are."""
    return [sibling.cfgs[i] for i in best_first(known)[:3]]


def seeded(
    spaces: Sequence[Measured],
    known: Mapping[str, Sequence[Mapping[int, float]]],
    seeds: Callable[[Measured, Mapping[int, float]], list[dict[str, Any]]] = seeds_from,
    most: int = SEEDED_EVALUATIONS,
) -> tuple[list[Runs], ...]:
    """Short searches with the seeds of each sibling, and with those of all siblings together; one a search there."""
    single, together = [], []
    for family in families(spaces):
        for target in family:
            siblings = {s.name: [seeds(s, path) for path in known[s.name]] for s in family if s is not target}
            single += [_seeded(f"{target.name} from {name}", target, sets, most) for name, sets in siblings.items()]
            pooled = [in_turn(sets) for sets in zip(*siblings.values(), strict=True)]
            together.append(_seeded(f"{target.name} from all siblings", target, pooled, most))
    return single, together


def _seeded(name: str, target: Measured, sets: Iterable[Iterable[dict[str, Any]]], most: int) -> Runs:
    starts = (places_of(cfgs, target) for cfgs in sets)
    paths = (run(target, GuidedSearch(), seed, some, most) for seed, some in enumerate(starts))
    return Runs(name, tuple(regret(target, path) for path in paths))


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
    files = [p for p in sorted(options.datasets.glob("*.csv.gz")) if not p.name.startswith(WITHOUT)]
    spaces = [load(p) for p in files if not options.only or p.name.removesuffix(".csv.gz") in options.only]
    if not spaces:
        print("skipped: needs measured search spaces; --datasets or EJKERNEL_DATASETS names their folder")
        return 0
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {len(spaces)} spaces, {options.seeds} seeds")
    print(f"share within {NEAR:.0%} of the best and mean regret, in batches of {BATCH} at most")
    columns = [*((f"guided {budget}", "guided", budget) for budget in BUDGETS)]
    columns += [(f"{name} {EVALUATIONS}", name, EVALUATIONS) for name in STRATEGIES if name != "guided"]
    show("space (configs)", [column for column, _, _ in columns])
    found: dict[str, list[Runs]] = {column: [] for column, _, _ in columns}
    known: dict[str, list[dict[int, float]]] = {}
    spent, start = 0.0, 0.0
    whole_search = f"guided {EVALUATIONS}"
    for measured in spaces:
        for column, name, budget in columns:
            start = time.perf_counter()
            paths = [run(measured, STRATEGIES[name], s, most=budget) for s in range(options.seeds)]
            spent += (time.perf_counter() - start) * (column == whole_search)
            found[column].append(Runs(measured.name, tuple(regret(measured, path) for path in paths)))
            if column == whole_search:
                known[measured.name] = paths
        show(f"{measured.name} ({len(measured.cfgs):,})", [spell(runs[-1:]) for runs in found.values()])
    show("all", [spell(runs) for runs in found.values()])
    worst = {name: min(runs, key=lambda r: (r.share, -fmean(r.regrets))) for name, runs in found.items()}
    show("worst space", [f"{w.share:.1%} {fmean(w.regrets):.1%}" for w in worst.values()])
    batches = -(-EVALUATIONS // BATCH) * options.seeds * len(spaces)
    print(f"worst of guided: {worst[whole_search].space}; a proposal takes {spent / batches * 1e3:.0f} ms on average")
    for title, (failing, noise) in VARIANTS.items():
        ends = [run_variant(m, failing, noise, s) for m in spaces for s in range(options.seeds)]
        runs = Runs(title, tuple(end for end in ends if end is not None))
        show(f"{title}, {VARIANT_EVALUATIONS} evaluations", [spell([runs])])
    share, mean = summed(found[whole_search])
    limits = {"share": share >= LEAST_SHARE, "regret": mean <= MOST_REGRET, "same path": repeats(spaces)}
    if families(spaces):
        print(f"seeded by a search of {EVALUATIONS} evaluations on a sibling device, {SEEDED_EVALUATIONS} evaluations")
        single, together = seeded(spaces, known)
        for runs in [*single, *together]:
            show(runs.space, [spell([runs])])
        # What no user has: every config of the sibling measured. Nothing in these runs is by chance.
        whole, _ = seeded(spaces, {m.name: [dict(enumerate(m.seconds))] for m in spaces}, three_best)
        show("all siblings together", [spell(together)])
        show("the three best of one sibling, measured whole", [spell(whole)])
        show("one sibling at a time", [spell(single)])
        later, _ = seeded(spaces, known, most=LATER_SEEDED_EVALUATIONS)
        show(f"one sibling at a time, {LATER_SEEDED_EVALUATIONS} evaluations", [spell(later)])
        limits["seeded share"] = summed(single)[0] >= LEAST_SEEDED_SHARE
    print("limits: " + ", ".join(f"{name} {'kept' if kept else 'BROKEN'}" for name, kept in limits.items()))
    return 0 if all(limits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
