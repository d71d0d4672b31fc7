"""Counts slow picks of the race on a busy host, replayed from measured spaces and a recorded trace of noise.

Each trial draws some configs of one dataset. A config's time is its true one, times the next sample of the trace. The
race has as many runs as the rule "three in a row by mean", which sees the same configs and the same stretch of the
trace. Pairs of races with other seeds and other stretches must agree, or declare the tie. Exit code 1 where a limit is
broken; where the datasets are absent there is nothing to replay.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import platform
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from ejkernel.ops.timing.race import Outcome, low_end, race
from ejkernel.ops.timing.sampler import HOST_RULES

DATASETS = Path(os.environ.get("EJKERNEL_DATASETS") or Path(__file__).resolve().parents[2] / "shared" / "datasets")
TRACE = "128_contended"
# One run a config and no noise of its own: nothing to learn from.
WITHOUT = ("coulomb3d",)
ARMS = 32
RUNS_PER_ARM = 3
# Off by more than this is a bad pick, and this share of picks may be bad.
OFF = 0.05
BAD_SHARE = 0.01


@dataclass(frozen=True)
class Replay:
    """The outcome for one dataset."""

    name: str
    trials: int
    bad: int
    bad_in_a_row: int
    most_runs: int
    pairs: int
    agreed: int

    @property
    def broken(self) -> list[str]:
        """The limits that it breaks."""
        found = []
        if self.bad > BAD_SHARE * self.trials:
            found.append("picks")
        if self.most_runs > RUNS_PER_ARM * ARMS:
            found.append("runs")
        if self.agreed < self.pairs:
            found.append("pairs")
        return found


def datasets(folder: Path) -> list[Path]:
    """The measured spaces that have repeats."""
    return [path for path in sorted(folder.glob("*.csv.gz")) if not path.name.startswith(WITHOUT)]


def true_times(path: Path) -> list[float]:
    """The time of each config that ran: the median without the first run, which is cold."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        next(file)
        rows = csv.DictReader(file)
        repeats = [name for name in rows.fieldnames or () if name[0] == "t" and name[1:].isdigit() and name != "t0"]
        every = ([float(row[name]) for name in repeats if row[name]] for row in rows if row["status"] == "ok")
        return [median(times) for times in every if times]


def noise(folder: Path) -> list[float]:
    """The recorded trace over its median."""
    trace = json.loads((folder / "host_noise_traces.json").read_text(encoding="utf-8"))[TRACE]
    middle = median(trace)
    return [sample / middle for sample in trace]


def stretch(trace: Sequence[float], start: int) -> Iterator[float]:
    """The trace from a place on; behind its end comes its beginning."""
    while True:
        yield from trace[start:]
        start = 0


def by_race(arms: Sequence[float], noisy: Iterator[float], seed: int) -> Outcome:
    """The race under the host's rules, with no more runs than three per arm."""
    return race(
        len(arms),
        lambda order: {i: arms[i] * next(noisy) for i in order},
        most_runs=RUNS_PER_ARM * len(arms),
        seed=seed,
        rules=HOST_RULES,
    )


def in_a_row(arms: Sequence[float], noisy: Iterator[float]) -> int:
    """Three runs of each in a row, and the smallest mean wins."""
    means = [fmean(time * next(noisy) for _ in range(RUNS_PER_ARM)) for time in arms]
    return means.index(min(means))


def agree(one: Outcome, other: Outcome) -> bool:
    """Do both pick the same, or does one declare a tie that holds the other's pick?"""
    picks = one.order[0], other.order[0]
    return picks[0] == picks[1] or picks[1] in one.tied or picks[0] in other.tied


def replay(name: str, times: Sequence[float], trace: Sequence[float], *, trials: int, pairs: int) -> Replay:
    """Runs so many trials and pairs on one space, the same ones each time."""
    drawn = random.Random(name)

    def start() -> int:
        return drawn.randrange(len(trace))

    def off(arms: Sequence[float], pick: int) -> bool:
        return arms[pick] > (1 + OFF) * min(arms)

    bad = bad_in_a_row = most = agreed = 0
    for seed in range(trials):
        arms, at = drawn.sample(times, ARMS), start()
        outcome = by_race(arms, stretch(trace, at), seed)
        bad += off(arms, outcome.order[0])
        bad_in_a_row += off(arms, in_a_row(arms, stretch(trace, at)))
        most = max(most, outcome.runs)
    for seed in range(pairs):
        arms = drawn.sample(times, ARMS)
        one, other = (by_race(arms, stretch(trace, start()), 2 * seed + side) for side in (0, 1))
        agreed += agree(one, other)
    return Replay(name, trials, bad, bad_in_a_row, most, pairs, agreed)


def replay_all(folder: Path, *, trials: int, pairs: int, tell: Callable[[Replay], None]) -> list[Replay]:
    """Every dataset of a folder; each is told as it ends."""
    trace = noise(folder)
    found = []
    for path in datasets(folder):
        found.append(replay(path.name.removesuffix(".csv.gz"), true_times(path), trace, trials=trials, pairs=pairs))
        tell(found[-1])
    return found


def show(found: Replay) -> None:
    """One line of the table."""
    shares = f"{found.bad / found.trials:>9.1%}{found.bad_in_a_row / found.trials:>13.1%}"
    agreed = f"{found.agreed}/{found.pairs}"
    print(f"{found.name:<28}{shares}{found.most_runs:>7}{agreed:>10} {', '.join(found.broken)}", flush=True)


@dataclass
class Guarded:
    """Picks of races that had a heuristic config among their arms."""

    arms: int
    runs_per_arm: int
    picks: int = 0
    # More than `OFF` slower than the best arm.
    bad: int = 0
    # Picks other than the heuristic, with an interval over it that reaches below one, and how many of them are slower.
    unsure: int = 0
    slower: int = 0
    runs: int = 0

    def add(self, arms: Sequence[float], guess: int, outcome: Outcome) -> None:
        """Counts one race."""
        pick = outcome.order[0]
        one, other = (outcome.lanes[i].samples for i in (guess, pick))
        gaps = sorted(one[r] - other[r] for r in one.keys() & other.keys())
        is_unsure = pick != guess and bool(gaps) and gaps[low_end(len(gaps))] <= 0
        self.picks += 1
        self.bad += arms[pick] > (1 + OFF) * min(arms)
        self.unsure += is_unsure
        self.slower += is_unsure and arms[pick] > arms[guess]
        self.runs += outcome.runs

    def __str__(self) -> str:
        """One line of the table."""
        shares = f"{self.bad / self.picks:.1%} over {OFF:.0%} off, {self.runs / self.picks:.1f} runs"
        return f"{self.arms:>3} arms, {self.picks} picks: {shares}; {self.unsure} unsure, {self.slower} of them slower"


def with_heuristics(folder: Path, *, trials: int) -> list[Guarded]:
    """Races of few and many arms, one of the better half of which is the heuristic."""
    trace = noise(folder)
    found = [Guarded(32, 3), Guarded(8, 5), Guarded(4, 3)]
    for path in datasets(folder):
        times, drawn = true_times(path), random.Random(path.name)
        for seed in range(trials):
            for row in found:
                arms, noisy = drawn.sample(times, row.arms), stretch(trace, drawn.randrange(len(trace)))
                guess = sorted(range(row.arms), key=arms.__getitem__)[drawn.randrange(row.arms // 2)]
                outcome = race(
                    row.arms,
                    lambda order, arms=arms, noisy=noisy: {i: arms[i] * next(noisy) for i in order},
                    most_runs=row.runs_per_arm * row.arms,
                    protected=guess,
                    seed=seed,
                    rules=HOST_RULES,
                )
                row.add(arms, guess, outcome)
    return found


def main() -> int:
    """Prints the table; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", type=Path, default=DATASETS)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--heuristic", action="store_true", help="races with a heuristic config among the arms")
    options = parser.parse_args()
    if not options.datasets.is_dir():
        print("skipped: needs measured search spaces; --datasets or EJKERNEL_DATASETS names their folder")
        return 0
    if options.heuristic:
        print(*with_heuristics(options.datasets, trials=options.trials), sep="\n")
        return 0
    print(f"{ARMS} arms, {options.trials} trials, trace {TRACE}, Python {platform.python_version()}")
    print(f"picks more than {OFF:.0%} off: limit {BAD_SHARE:.0%}; runs: limit {RUNS_PER_ARM * ARMS}; pairs: all agree")
    print(f"{'dataset':<28}{'race':>9}{'3 in a row':>13}{'runs':>7}{'agreed':>10} over")
    found = replay_all(options.datasets, trials=options.trials, pairs=options.pairs, tell=show)
    worst = max(found, key=lambda r: (r.bad / r.trials, r.pairs - r.agreed))
    print(f"worst: {worst.name}, {worst.bad} of {worst.trials} picks more than {OFF:.0%} off")
    broken = sum(len(r.broken) for r in found)
    print(f"limits broken: {broken}" if broken else "all within limits")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
