"""Candidates take turns within each round, so that drift hits all alike; the clearly slower drop out early."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

# A candidate drops out when even its fastest sample is this much slower than the leader's median: after one round,
# after two, later. A busy machine can double one sample, hardly three in a row.
_CLEARLY_SLOWER = (2.0, 1.5, 1.2)
# A sample shorter than this is mostly the clock's and the dispatch's own noise.
_SAMPLE_SECONDS = 1e-3
_MOST_CALLS = 64
# Rounds beyond the least go on while they are cheap.
_MOST_ROUNDS = 25
_RACE_SECONDS = 0.5
# Differences below this are never believed; above it, twice the spread of the faster one decides.
_NOISE_FLOOR = 0.01


@dataclass
class Lane:
    """One candidate in the race."""

    # Seconds per call over so many calls in a row; whatever it raises ends this lane alone.
    time: Callable[[int], float]
    # Not dropped before it has so many samples: what the gain is told against must be known well.
    least: int = 1
    samples: list[float] = field(default_factory=list)
    dropped_round: int | None = None
    failure: Exception | None = None

    @property
    def running(self) -> bool:
        """Does it still take part?"""
        return self.dropped_round is None and self.failure is None


@dataclass(frozen=True)
class Outcome:
    """Who won, who was second, and who could not be told from the winner."""

    order: tuple[int, ...]
    tied: tuple[int, ...]
    finished: bool


def race(
    lanes: Sequence[Lane], *, warmup: int, rounds: int, seed: int, now: Callable[[], float], deadline: float
) -> Outcome:
    """Runs the lanes against each other; the earlier lane wins a tie."""
    calls = [_warm(lane, warmup) for lane in lanes]
    shuffled = random.Random(seed)
    start = now()
    done = 0
    while done < max(rounds, 1) or (_unsettled(lanes) and done < _MOST_ROUNDS and now() - start < _RACE_SECONDS):
        order = [i for i, lane in enumerate(lanes) if lane.running]
        if not order or (done and now() >= deadline):
            break
        shuffled.shuffle(order)
        for i in order:
            _sample(lanes[i], calls[i])
        done += 1
        _drop(lanes, done)
    return _outcome(lanes, finished=done >= max(rounds, 1))


def _warm(lane: Lane, warmup: int) -> int:
    """Runs it as often as asked before any sample counts, and finds how many calls make a sample long enough."""
    seconds = math.inf
    try:
        for _ in range(max(warmup, 1)):
            seconds = min(seconds, lane.time(1))
    # Whatever a candidate raises is the candidate's outcome.
    except Exception as error:
        lane.failure = error
    return max(1, min(_MOST_CALLS, math.ceil(_SAMPLE_SECONDS / max(seconds, 1e-9))))


def _sample(lane: Lane, calls: int) -> None:
    try:
        lane.samples.append(lane.time(calls))
    # As above.
    except Exception as error:
        lane.failure = error


def _drop(lanes: Sequence[Lane], done: int) -> None:
    live = [lane for lane in lanes if lane.running]
    if not live:
        return
    best = min(median(lane.samples) for lane in live)
    limit = best * _CLEARLY_SLOWER[min(done, len(_CLEARLY_SLOWER)) - 1]
    for lane in live:
        if min(lane.samples) > limit and len(lane.samples) >= lane.least:
            lane.dropped_round = done


def _unsettled(lanes: Sequence[Lane]) -> bool:
    return sum(lane.running for lane in lanes) > 1


def _outcome(lanes: Sequence[Lane], *, finished: bool) -> Outcome:
    timed = [i for i, lane in enumerate(lanes) if lane.failure is None and lane.samples]
    order = sorted(timed, key=lambda i: (lanes[i].dropped_round is not None, median(lanes[i].samples), i))
    if not order:
        return Outcome((), (), finished)
    tied = [i for i in order if lanes[i].running and not _slower(lanes[i].samples, lanes[order[0]].samples)]
    winner = min(tied, default=order[0])
    rest = [i for i in order if i != winner]
    return Outcome((winner, *rest), tuple(sorted(tied)) if len(tied) > 1 else (), finished)


def _slower(samples: Sequence[float], best: Sequence[float]) -> bool:
    # Rounds are paired: what slowed both down cancels.
    ratios = [a / b for a, b in zip(samples, best, strict=False)]
    middle = median(ratios)
    spread = median(abs(r - middle) for r in ratios) / math.sqrt(len(ratios))
    return middle - 2 * spread > 1 + _NOISE_FLOOR
