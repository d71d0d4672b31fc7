"""A race: candidates take turns within rounds, and the clearly slower ones drop out early.

A sample is the logarithm of seconds. It is the sum of three parts: the candidate's own level, the effect that the round
had on all of its candidates (frequency, heat, other programs), and noise. Turns within a round divide the second part
out, so that drift hits all candidates alike. A quantile stands for a level: the median by a device's clock, a lower one
by the host's, where noise only ever adds. The noise is estimated from differences of samples in a row, pooled over all
candidates. A candidate drops out once its gap to the leader exceeds both a least gap, which shrinks with the number of
samples, and three standard errors. The race ends when all that are left are equal for sure, or after enough rounds.
Gaps below four standard errors are declared as ties, and of tied candidates the protected one, the heuristic, wins.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ..core.times import rounded

# One round: seconds of each candidate in this order, or what it raised. One that is left out had no turn: time is up.
Round = Callable[[Sequence[int]], Mapping[int, float | Exception]]


@dataclass(frozen=True)
class Rules:
    """Rules by which a candidate leaves, a race ends, and times are equal. Found by replaying measured spaces."""

    # What a gap to the leader must be at least, by the number of samples: a busy host slows one sample in ten by a
    # fifth and more, so two in a row mean little, five a lot.
    least_gaps: tuple[float, ...] = (1.10, 0.45, 0.30, 0.20, 0.10, 0.06)
    # With no more than so many left none goes after one sample, which a single spike can spoil: another costs little.
    few: int = 0
    # And so many standard errors.
    errors_to_drop: float = 3.0
    # Differences below this are never believed.
    tie: float = 0.01
    # The race ends when all are within this many standard errors of a tie.
    errors_to_tie: float = 3.0
    # Gaps below so many are declared as ties. More: with many candidates one of them is far off by chance alone.
    errors_to_declare: float = 4.0
    # A gain over the protected candidate that is no larger counts only where its interval does not reach below one. Of
    # larger ones with an interval that does, where there was no time for more rounds, nearly all are real.
    slight: float = 0.03
    most_rounds: int = 40
    # Which of a candidate's sorted samples stands for it: the middle for a device's own clock; for the host's, where
    # noise only ever adds, one further down.
    quantile: float = 0.25


@dataclass
class Lane:
    """One candidate's part of the race: log seconds by round."""

    samples: dict[int, float] = field(default_factory=dict)
    dropped_round: int | None = None
    failure: Exception | None = None

    @property
    def running(self) -> bool:
        """Does it still take part?"""
        return self.dropped_round is None and self.failure is None

    @property
    def seconds(self) -> tuple[float, ...]:
        """The candidate's samples in seconds, in order."""
        # Six digits are more than any clock has, and a store of a thousand records stays small.
        return tuple(rounded(math.exp(value), 6) for value in self.samples.values())


@dataclass(frozen=True)
class Outcome:
    """The candidates from the winner on, those that could not be told from it, and how loud the noise was."""

    lanes: tuple[Lane, ...]
    order: tuple[int, ...]
    tied: tuple[int, ...]
    rounds: int
    runs: int
    # Standard deviation of one sample, as a share, once round effects are divided out.
    noise: float
    finished: bool


def race(
    count: int,
    sample: Round,
    *,
    least_rounds: int = 3,
    most_runs: float = math.inf,
    protected: int | None = None,
    seed: int = 0,
    rules: Rules | None = None,
    out_of_time: Callable[[], bool] = lambda: False,
    enough: Callable[[], bool] = lambda: False,
    dropped: Callable[[int, float, float], None] = lambda candidate, seconds, ratio: None,
) -> Outcome:
    """Runs candidates against each other; among equals the protected one wins, then the earlier one.

    The protected one, the heuristic, also stays for the least number of rounds, and until it is surely slower than the
    leader in the rounds that had both: the gain is told against it. Being out of time ends the race after any round,
    having enough only one that has had its least number of rounds. `dropped` is told of each candidate that leaves: its
    seconds, and how many times those of the leader they are.
    """
    rules = rules or Rules()
    lanes = tuple(Lane() for _ in range(count))
    shuffled = random.Random(seed)
    rounds = runs = 0
    late = False
    while not late and not _is_decided(lanes, rounds, least_rounds, rules):
        order = [i for i, lane in enumerate(lanes) if lane.running]
        had = min(len(lanes[i].samples) for i in order)
        late = had > 0 and out_of_time()
        if late or (had and runs + len(order) > most_runs) or (had >= least_rounds and enough()):
            break
        shuffled.shuffle(order)
        found = sample(order)
        for i, seconds in found.items():
            if isinstance(seconds, Exception):
                lanes[i].failure = seconds
            else:
                lanes[i].samples[rounds] = math.log(max(seconds, 1e-12))
        rounds += 1
        runs += len(found)
        late = len(found) < len(order)
        if not late:
            for i, ratio in _drop(lanes, rounds, rules, protected, least_rounds):
                dropped(i, median(lanes[i].seconds), ratio)
    return _outcome(lanes, rounds, runs, rules, protected, finished=not late)


def conclude(
    count: int, rows: Sequence[Mapping[int, float]], *, rules: Rules | None = None, protected: int | None = None
) -> Outcome:
    """The outcome of a race that was cut off: what its rounds say, seconds of each candidate."""
    rules = rules or Rules()
    lanes = tuple(Lane() for _ in range(count))
    for r, row in enumerate(rows):
        for i, seconds in row.items():
            lanes[i].samples[r] = math.log(max(seconds, 1e-12))
    _drop(lanes, len(rows), rules, protected, len(rows) + 1)
    return _outcome(lanes, len(rows), 0, rules, protected, finished=False)


def _is_decided(lanes: Sequence[Lane], rounds: int, least: int, rules: Rules) -> bool:
    """Is there nothing more to learn?"""
    live = [i for i, lane in enumerate(lanes) if lane.running]
    if not live:
        return True
    if min(len(lanes[i].samples) for i in live) < least:
        return False
    if len(live) == 1 or rounds >= rules.most_rounds:
        return True
    view = _View(lanes, rules.quantile)
    leader = view.leader(live)
    # All that are left are, for sure, as good as the leader.
    return all(view.gap(i, leader) + rules.errors_to_tie * view.error(i, leader) < rules.tie for i in live)


def _drop(
    lanes: Sequence[Lane], rounds: int, rules: Rules, protected: int | None, least_rounds: int
) -> list[tuple[int, float]]:
    """Takes out the clearly slower candidates; each with its ratio to the leader."""
    live = [i for i, lane in enumerate(lanes) if lane.running and lane.samples]
    gone: list[tuple[int, float]] = []
    if len(live) < 2:
        return gone
    view = _View(lanes, rules.quantile)
    leader = view.leader(live)
    for i in live:
        count = len(lanes[i].samples)
        if count == 1 and len(live) <= rules.few:
            continue
        least = rules.least_gaps[count - 1] if count <= len(rules.least_gaps) else rules.tie
        # One sample tells nothing of the noise.
        needed = least if count == 1 else max(least, rules.errors_to_drop * view.error(i, leader))
        stays = i == protected and (count < least_rounds or not _is_surely_slower(lanes[i], lanes[leader]))
        if i != leader and not stays and view.gap(i, leader) > needed:
            lanes[i].dropped_round = rounds
            gone.append((i, math.exp(view.gap(i, leader))))
    return gone


class _View:
    """Levels and noise of the samples so far, once the effect that each round had on all is divided out."""

    def __init__(self, lanes: Sequence[Lane], quantile: float) -> None:
        self.lanes = lanes
        self.quantile = quantile
        timed = [lane for lane in lanes if lane.samples and lane.failure is None]
        level = [self._level(list(lane.samples.values())) for lane in timed]
        every = sorted({r for lane in timed for r in lane.samples})
        # Two passes are enough: levels from raw samples, round effects from those, then levels again.
        self.effects = {
            r: self._level([lane.samples[r] - at for lane, at in zip(timed, level, strict=True) if r in lane.samples])
            for r in every
        }
        self.levels = {id(lane): self._level(self._corrected(lane)) for lane in timed}
        self.noise = self._noise(timed)

    def _level(self, values: list[float]) -> float:
        return sorted(values)[int((len(values) - 1) * self.quantile)]

    def _corrected(self, lane: Lane) -> list[float]:
        return [value - self.effects[r] for r, value in lane.samples.items()]

    def _noise(self, timed: Sequence[Lane]) -> float:
        # From the differences of samples in a row, pooled over all candidates, which all saw the same machine; their
        # middle, since spikes are rare and one-sided.
        steps = [abs(later - earlier) for lane in timed for earlier, later in itertools.pairwise(self._corrected(lane))]
        return 1.4826 * median(steps) / math.sqrt(2) if steps else math.inf

    def leader(self, live: Sequence[int]) -> int:
        """The fastest so far."""
        return min(live, key=lambda i: (self.levels[id(self.lanes[i])], i))

    def gap(self, one: int, other: int) -> float:
        """The slowdown of one against the other, as a difference of logarithms."""
        return self.levels[id(self.lanes[one])] - self.levels[id(self.lanes[other])]

    def error(self, one: int, other: int) -> float:
        """The standard error of that gap."""
        counts = (len(self.lanes[i].samples) for i in (one, other))
        # 1.2533: a median spreads by so much more than a mean.
        return 1.2533 * self.noise * math.sqrt(sum(1 / n for n in counts))


def _outcome(
    lanes: tuple[Lane, ...], rounds: int, runs: int, rules: Rules, protected: int | None, *, finished: bool
) -> Outcome:
    timed = [i for i, lane in enumerate(lanes) if lane.samples and lane.failure is None]
    if not timed:
        return Outcome(lanes, (), (), rounds, runs, 0.0, finished)
    view = _View(lanes, rules.quantile)
    live = [i for i in timed if lanes[i].running]
    leader = view.leader(live or timed)
    noise = view.noise if math.isfinite(view.noise) else 0.0
    equal = [i for i in live if view.gap(i, leader) <= rules.tie] or [leader]
    declared = [
        i for i in live if view.gap(i, leader) <= max(rules.tie, rules.errors_to_declare * _error(view, i, leader))
    ]
    # What cannot be told from the heuristic is no reason to leave it.
    winner = protected if protected in declared else min(equal)
    if (
        protected is not None
        and protected in timed
        and winner != protected
        and _was_faster(lanes[protected], lanes[winner], view.gap(protected, winner), rules.slight)
    ):
        winner = protected
    rest = sorted((i for i in timed if i != winner), key=lambda i: (not lanes[i].running, view.levels[id(lanes[i])], i))
    tied = tuple(sorted({*declared, winner}))
    return Outcome(lanes, (winner, *rest), tied if len(tied) > 1 else (), rounds, runs, noise, finished)


def _was_faster(one: Lane, other: Lane, gap: float, slight: float) -> bool:
    """Was one faster in the rounds that had both, or not surely slower?

    A gain is told by these rounds: none is told below one, and no slight one with an interval that reaches below it. It
    is slight by them, or by the gap of all rounds: one spike of either candidate makes the latter large.
    """
    gaps = sorted(one.samples[r] - other.samples[r] for r in one.samples.keys() & other.samples.keys())
    if not gaps:
        return False
    middle = median(gaps)
    return gaps[low_end(len(gaps))] <= 0 if min(gap, middle) <= slight else middle < 0


def _is_surely_slower(one: Lane, other: Lane) -> bool:
    """Was one slower in the rounds that had both, by an interval that lies above? Without such rounds it is."""
    gaps = sorted(one.samples[r] - other.samples[r] for r in one.samples.keys() & other.samples.keys())
    return not gaps or gaps[low_end(len(gaps))] > 0


def low_end(count: int) -> int:
    """The place, among so many sorted values, of the low end of an interval for their median: about 95%."""
    return max(0, count // 2 - math.ceil(0.98 * math.sqrt(count)))


def _error(view: _View, one: int, other: int) -> float:
    error = view.error(one, other)
    return error if math.isfinite(error) else 0.0
