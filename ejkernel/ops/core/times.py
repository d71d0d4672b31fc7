"""The times of all candidates of a tuning, small enough to stand in an entry of a store. No JAX here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from . import codec

if TYPE_CHECKING:
    from .record import Trial

# So many candidates of one tuning are kept: the fastest ones, and of the others every so many.
MOST_KEPT = 64
# Failures that say something about the cfg; one that ran out of time, or was not tried, says nothing.
_FAILED = ("compile", "memory", "runtime", "wrong", "crash")


def times_of(trials: Sequence[Trial], *, raced: bool, quantile: float) -> dict[str, Any]:
    """Cfgs and microseconds of the candidates that were timed, and null for those that failed; else empty.

    In a race the samples of two candidates with one index are of one round, so that the round's effect divides out.
    """
    # A candidate that was dropped before the race was timed as another program than it would be.
    able = [t for t in trials if t.status == "ok" and t.dropped_round != 0]
    timed = [t for t in able if t.samples_s and min(t.samples_s) > 0]
    levels = _levels([[math.log(s) for s in t.samples_s] for t in timed], quantile if raced else None)
    known = [(codec.encode(t.cfg), math.exp(level)) for t, level in zip(timed, levels, strict=True)]
    found: list[tuple[Any, float | None]] = [
        *known,
        *((codec.encode(t.cfg), None) for t in trials if t.status in _FAILED),
    ]
    if sum(seconds is not None for _, seconds in found) < 2:
        return {}
    found.sort(key=lambda pair: math.inf if pair[1] is None else pair[1])
    if len(found) > MOST_KEPT:
        half = MOST_KEPT // 2
        rest = len(found) - half
        found = [*found[:half], *(found[half + i * rest // (MOST_KEPT - half)] for i in range(MOST_KEPT - half))]
    cfgs = [cfg for cfg, _ in found]
    us = [None if seconds is None else rounded(seconds * 1e6, 4) for _, seconds in found]
    names = list(cfgs[0]) if isinstance(cfgs[0], dict) else None
    if names is None or any(not isinstance(cfg, dict) or list(cfg) != names for cfg in cfgs):
        return {"cfgs": cfgs, "us": us}
    # The names of the fields stand once.
    return {"fields": names, "cfgs": [list(cfg.values()) for cfg in cfgs], "us": us}


def read_times(summary: Mapping[str, Any]) -> list[tuple[Any, float | None]]:
    """Encoded cfgs and seconds that `times_of` wrote into a summary; a malformed text counts as empty.

    A file may hold anything: what is no positive number is left out, and null is a failure.
    """
    times = summary.get("times")
    if not isinstance(times, dict) or not isinstance(times.get("cfgs"), list) or not isinstance(times.get("us"), list):
        return []
    names, found = times.get("fields"), []
    for cfg, us in zip(times["cfgs"], times["us"], strict=False):
        if us is not None and not (isinstance(us, (int, float)) and math.isfinite(us) and us > 0):
            continue
        if names is not None:
            if not (isinstance(names, list) and isinstance(cfg, list) and len(cfg) == len(names)):
                return []
            cfg = dict(zip(map(str, names), cfg, strict=True))
        found.append((cfg, None if us is None else us * 1e-6))
    return found


def rounded(value: float, digits: int) -> float:
    """A number with so many digits: what is beyond them is noise, and takes room."""
    return float(f"{value:.{digits}g}")


def _levels(samples: Sequence[Sequence[float]], quantile: float | None) -> list[float]:
    """The level of each list of logarithms: its middle; in a race by its rounds with the one that stayed longest."""
    if quantile is None or not samples:
        return [median(own) for own in samples]
    base = max(samples, key=lambda own: (len(own), -median(own)))
    at = sorted(base)[int((len(base) - 1) * quantile)]
    return [at + median(a - b for a, b in zip(own, base, strict=False)) for own in samples]
