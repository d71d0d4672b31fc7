"""Verdicts of rows: ratios to the best opponent and to the floor, limits that a row breaks, and its lines."""

from __future__ import annotations

from typing import Any

from library_programs import HEURISTIC, TUNED

from .ours import BARE
from .table import HEURISTIC as HEURISTIC_LIMIT
from .table import NOISE, WITHOUT_TRITON, Limits

OURS = (HEURISTIC, TUNED, BARE)


def judged(row: dict[str, Any], limits: Limits, tune_seconds: float) -> dict[str, Any]:
    """The row with its ratios, and `broken`: a sentence for each limit that it breaks."""
    us = row["us"]
    others = {name: time for name, time in us.items() if name not in OURS}
    best = min(others, key=others.__getitem__, default=None)
    tuned = us[TUNED]
    ratios = {
        "over_opponent": tuned / others[best] if best else None,
        "over_floor": tuned / row["floor_us"],
        "heuristic_over_tuned": us[HEURISTIC] / tuned if HEURISTIC in us else None,
        "bare_over_tuned": us[BARE] / tuned if BARE in us else None,
    }
    asked = {
        "over_opponent": limits.over_opponent,
        "over_floor": limits.over_floor,
        "heuristic_over_tuned": HEURISTIC_LIMIT,
        "bare_over_tuned": WITHOUT_TRITON,
    }
    broken = [
        f"{name} is {ratios[name]:.3f}, more than {most}"
        for name, most in asked.items()
        # The host's clock says nothing about a GPU's limits.
        if row["clock"] != "wall" and most is not None and ratios[name] is not None and ratios[name] > most + NOISE
    ]
    broken += [f"ours ({name}) did not run: {row['not_counted'].get(name)}" for name in OURS if name not in us]
    if best is None:
        broken.append("no opponent ran and agreed with ours, which may itself be wrong")
    # A tuning is bounded to within a second.
    if row["clock"] != "wall" and row["tuning_s"] > tune_seconds + 1:
        broken.append(f"tuning took {row['tuning_s']:.1f} s")
    return row | {"best": best, "ratios": ratios, "limits": vars(limits), "broken": broken}


def lines(row: dict[str, Any]) -> list[str]:
    """A row as it is read."""
    spelled = {name: "-" if ratio is None else f"{ratio:.3f}" for name, ratio in row["ratios"].items()}
    times = sorted(row["us"].items(), key=lambda pair: pair[1])
    found = [
        f"{row['operation']}: {row['case']}: floor {row['floor_us']:.1f} us, {row['clock']}",
        "   " + ", ".join(f"{name} {us:.1f}" for name, us in times),
        f"   ours {spelled['over_opponent']} of {row['best']}, {spelled['over_floor']} of the floor; "
        f"heuristic {spelled['heuristic_over_tuned']} of tuned, without Triton {spelled['bare_over_tuned']} of with it",
        f"   {row['candidates']} candidates, tuned in {row['tuning_s']:.1f} s: {row['chosen'][TUNED]}",
    ]
    if row["not_tuned"]:
        found.append(f"   not tuned: {row['not_tuned']}")
    if row["chosen"][BARE] != row["chosen"][TUNED]:
        found.append(f"   without Triton, in {row['bare_tuning_s']:.1f} s: {row['chosen'][BARE]}")
    found += _reasons(row["not_counted"])
    found += [f"   left out: {name}: {why}" for name, why in row["left_out"].items()]
    return [*found, *(f"   LIMIT BROKEN: {why}" for why in row["broken"])] if row["broken"] else [*found, "   ok"]


def _reasons(failed: dict[str, str]) -> list[str]:
    """A line for each reason, since a package's configs often share one."""
    alike: dict[str, list[str]] = {}
    for name, why in failed.items():
        alike.setdefault(why[:50], []).append(name)
    return [
        f"   not counted: {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {failed[names[0]]}"
        for names in alike.values()
    ]
