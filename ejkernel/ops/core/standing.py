"""Figures of a record that agree with its verdict: times without drift, and the verdict in a sentence. No JAX here.

Candidates run in rounds, and a round slows all of its candidates alike. Medians of candidates that were in different
rounds compare different minutes of the machine. So the effect of each round is divided out, as the race does
(`timing/race.py`), and a candidate's time is shown as the winner's times the ratio of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from . import formatting

if TYPE_CHECKING:
    from .record import Record

# Differences below this are never believed: the race calls such candidates equal.
SAME = 0.01
_WHAT_TO_DO = "tune again on an idle machine, or with more iters"

StandingKind = Literal["faster", "same", "noisy", "changed", "unmeasured"]


@dataclass(frozen=True)
class Standing:
    """One candidate's time without drift, and that over the winner's; None where it has none to compare."""

    seconds: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class TuningVerdict:
    """The outcome of a tuning in one word, and in the sentence that tables, explanations and pages show."""

    kind: StandingKind
    text: str


def standings(record: Record) -> tuple[Standing, ...]:
    """The figures of every candidate, in the order of `trials`."""
    timed = {i: t.samples_s for i, t in enumerate(record.trials) if t.samples_s and min(t.samples_s) > 0}
    winner = record.winner
    if winner is None or winner not in timed:
        return tuple(Standing(trial.seconds) for trial in record.trials)
    best = median(timed[winner])
    levels = _levels({i: timed[i] for i in timed if _raced(record, i)}, by_device=not record.clock.startswith("wall"))
    # A file may name a winner that failed.
    if winner not in levels:
        return tuple(Standing(trial.seconds) for trial in record.trials)
    found = []
    for place, trial in enumerate(record.trials):
        if place not in levels:
            found.append(Standing(trial.seconds))
            continue
        ratio = math.exp(levels[place] - levels[winner])
        if place == winner or abs(ratio - 1) <= SAME:
            ratio = 1.0
        elif place == record.heuristic and record.gain is not None:
            # The gain is told by rounds that had both, and is never below one.
            ratio = record.gain[0]
        found.append(Standing(best * ratio, ratio))
    return tuple(found)


def _raced(record: Record, place: int) -> bool:
    """Did it run in rounds with the winner? Of a search, only the finalists did."""
    trial = record.trials[place]
    if trial.status != "ok" or trial.dropped_round == 0:
        return False
    finalists = {record.winner, record.heuristic, record.runner_up, *record.tied}
    return record.space is None or place in finalists or trial.dropped_round is None


def _levels(samples: dict[int, tuple[float, ...]], *, by_device: bool) -> dict[int, float]:
    """The logarithm of each candidate's time, with the effect that each round had on all divided out."""
    # The host's noise only adds, so that a lower quantile stands for a candidate; a device's has two sides.
    quantile = 0.5 if by_device else 0.25
    logs = {place: [math.log(value) for value in values] for place, values in samples.items()}
    raw = {place: _quantile(values, quantile) for place, values in logs.items()}
    rounds = max(map(len, logs.values()), default=0)
    effects = [
        _quantile([values[r] - raw[place] for place, values in logs.items() if r < len(values)], quantile)
        for r in range(rounds)
    ]
    return {
        place: _quantile([value - effect for value, effect in zip(values, effects, strict=False)], quantile)
        for place, values in logs.items()
    }


def _quantile(values: Sequence[float], quantile: float) -> float:
    return sorted(values)[int((len(values) - 1) * quantile)]


def verdict(record: Record) -> TuningVerdict:
    """The outcome of a tuning, as all texts say it."""
    if record.winner is None:
        why = {"deadline": "the time was up before anything was measured", "failed": "no candidate can be used"}
        return TuningVerdict("unmeasured", why.get(record.stop, "nothing was measured"))
    # A tuner of the user's own, or another process, keeps its samples to itself.
    if not record.trials[record.winner].samples_s:
        return TuningVerdict("unmeasured", "another tuner or process decided; its samples are not here")
    if record.note:
        return TuningVerdict("changed", record.note)
    faster = _seemingly_faster(record)
    if record.heuristic is None:
        if faster:
            return TuningVerdict("noisy", f"too noisy to tell: {_others(record, faster)}; {_WHAT_TO_DO}")
        timed = sum(bool(trial.samples_s) for trial in record.trials)
        return TuningVerdict("faster" if timed > 1 else "same", f"the fastest of {timed} that were timed")
    if record.winner == record.heuristic:
        return _heuristic_stays(record, faster)
    if record.gain is None:
        text = "the heuristic cfg could not be timed beside it"
        return TuningVerdict(
            "noisy" if faster else "faster", f"too noisy to tell: {_others(record, faster)}" if faster else text
        )
    return verdict_of_gain(record.gain, _others(record, faster) if faster else "")


def verdict_of_gain(gain: tuple[float, float, float], doubt: str = "") -> TuningVerdict:
    """The verdict where only the gain is known, as in the entry of a store; `doubt` names faster losers."""
    middle, low, high = gain
    if low == middle == high == 1.0:
        return TuningVerdict("same", "nothing beats the heuristic cfg")
    interval = f"{low:.2f} to {high:.2f} with 95%"
    if low <= 1.0 or doubt:
        what = f"{middle:.2f} times as fast as the heuristic cfg, {interval}"
        return TuningVerdict("noisy", f"too noisy to tell: {what}{'; ' + doubt if doubt else ''}; {_WHAT_TO_DO}")
    return TuningVerdict("faster", f"{middle:.2f} times as fast as the heuristic cfg ({interval})")


def _heuristic_stays(record: Record, faster: Sequence[int]) -> TuningVerdict:
    if faster:
        return TuningVerdict(
            "noisy", f"too noisy to tell: {_others(record, faster)}; the heuristic cfg stays; {_WHAT_TO_DO}"
        )
    tied = len([place for place in record.tied if place != record.winner])
    also = f"; {tied} cannot be told from it" if tied else ""
    timed = sum(bool(trial.samples_s) for trial in record.trials)
    if timed == 1:
        return TuningVerdict("same", "the heuristic cfg is the only one that could be timed")
    return TuningVerdict("same", f"nothing beats the heuristic cfg{also}")


def _seemingly_faster(record: Record) -> list[int]:
    """The candidates with a shorter time than the winner's, by more than what is never believed."""
    shown = standings(record)
    return [i for i, one in enumerate(shown) if one.ratio is not None and one.ratio < 1 - SAME]


def _others(record: Record, places: Sequence[int]) -> str:
    shown = standings(record)
    best = min(places, key=lambda place: shown[place].ratio or 1.0)
    share = 1 - (shown[best].ratio or 1.0)
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{formatting.short(record.trials[best].cfg)}{more} took up to {share:.0%} less time, within the noise"
