"""Pictures of a page as SVG text: the race with every sample, and the roofline. No JAX here."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence

from ..core import formatting
from ..core.record import Record
from ..core.standing import standings
from ..core.table import notes, ranked
from .roofline import Peaks, amount

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 10, 34


def race(record: Record, named: int) -> str:
    """Every sample of a race over its rounds; so many candidates have a line of their own, the others share one."""
    shown = standings(record)
    timed = [place for place in ranked(record) if any(s > 0 for s in record.trials[place].samples_s)]
    if not timed:
        return ""
    samples = [s for place in timed for s in record.trials[place].samples_s if s > 0]
    rounds = max(len(record.trials[place].samples_s) for place in timed)
    across = _Axis(1, max(rounds, 2), _LEFT + 8, _WIDTH - _RIGHT)
    up = _Axis(min(samples), max(samples), _HEIGHT - _BOTTOM, _TOP, log=True)

    def points(place: int) -> str:
        found = [(across(r), up(s)) for r, s in enumerate(record.trials[place].samples_s, 1) if s > 0]
        # Steps from the last point are shorter to write than places.
        steps = [f"{x - a} {y - b}" if y >= b else f"{x - a}{y - b}" for (a, b), (x, y) in itertools.pairwise(found)]
        return f"M{found[0][0]} {found[0][1]}" + (f"l{' '.join(steps)}" if steps else "h0")

    own = [place for place in timed[:named] if place not in (record.winner, record.heuristic)]
    others = [place for place in timed[named:] if place not in (record.winner, record.heuristic)]
    drawn = []
    if others:
        drawn.append(_path("o", "".join(map(points, others)), f"{len(others)} more candidates"))
    # The winner last, so that it lies on top.
    for kind, place in [*(("o", place) for place in reversed(own)), ("h", record.heuristic), ("w", record.winner)]:
        if place is None or place not in timed or (kind == "h" and place == record.winner):
            continue
        about = [formatting.short(record.trials[place].cfg), formatting.seconds(shown[place].seconds)]
        drawn.append(_path(kind, points(place), ", ".join([*about, notes(record, place, shown[place])]).rstrip(", ")))
    crosses = ""
    for place in timed:
        trial = record.trials[place]
        if trial.dropped_round is not None and trial.samples_s[-1] > 0:
            x, y = across(len(trial.samples_s)), up(trial.samples_s[-1])
            crosses += f"M{x} {y}h0"
    drawn.append(f'<path class="x" d="{crosses}"/>' if crosses else "")
    ticks = [_tick(_LEFT, up(value), formatting.seconds(value)) for value in _ticks(min(samples), max(samples))]
    unit = "round" if record.space is None else "sample"
    ends = f'<text x="{across(1)}" y="{_HEIGHT - 18}">1</text>'
    ends += f'<text class="e" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 18}">{unit} {rounds}</text>'
    span = f"{formatting.seconds(min(samples))} to {formatting.seconds(max(samples))}"
    return _svg(f"The race: {len(timed)} candidates over {rounds} {unit}s, {span}", [*ticks, ends, *drawn])


def roofline(points: Sequence[tuple[str, float, float, float]], peaks: Peaks) -> str:
    """Calls as (name, bytes, operations, seconds) under the roof that a device's peaks are."""
    known = [(name, done / moved, done / taken) for name, moved, done, taken in points if moved and done and taken]
    if not known:
        return ""
    ridge = peaks.operations_s / peaks.bytes_s
    low = min([ridge / 10, *(x for _, x, _ in known)]) / 2
    high = max([ridge * 10, *(x for _, x, _ in known)]) * 2
    floor = min([peaks.bytes_s * low, *(y for _, _, y in known)]) / 2
    across = _Axis(low, high, _LEFT + 8, _WIDTH - _RIGHT, log=True)
    up = _Axis(floor, peaks.operations_s * 1.5, _HEIGHT - _BOTTOM, _TOP, log=True)
    start = max(low, floor / peaks.bytes_s)
    corner = f"M{across(start)} {up(peaks.bytes_s * start)} {across(ridge)} {up(peaks.operations_s)}"
    drawn = [f'<path class="r" d="{corner} {across(high)} {up(peaks.operations_s)}"/>']
    for name, x, y in known:
        share = y / min(peaks.operations_s, x * peaks.bytes_s)
        label = html.escape(f"{name}: {amount(y, 'FLOP/s')}, {share:.0%} of the roof", quote=True)
        drawn.append(f'<circle class="w" cx="{across(x)}" cy="{up(y)}" r="5" data-t="{label}"/>')
    ticks = [_tick(_LEFT, up(value), amount(value, "FLOP/s")) for value in _ticks(floor, peaks.operations_s)]
    ends = f'<text x="{_LEFT + 8}" y="{_HEIGHT - 18}">{low:.2g}</text>'
    ends += f'<text class="e" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 18}">{high:.3g} operations a byte</text>'
    return _svg(f"Roofline: {len(known)} calls under the peaks of the device", [*ticks, ends, *drawn])


class _Axis:
    """A scale from values to places of the picture, in whole pixels."""

    def __init__(self, low: float, high: float, start: int, end: int, *, log: bool = False) -> None:
        self._of = math.log if log else float
        self._low, high = self._of(low), self._of(high)
        # One value alone stands in the middle.
        self._scale = (end - start) / (high - self._low) if high > self._low else 0.0
        self._start = start if self._scale else (start + end) // 2

    def __call__(self, value: float) -> int:
        return round(self._start + (self._of(value) - self._low) * self._scale)


def _ticks(low: float, high: float) -> list[float]:
    """Both ends, and some between them where they are far apart."""
    if not high > low * 1.02:
        return [low]
    between = [math.exp(math.log(low) + math.log(high / low) * part) for part in (1 / 3, 2 / 3)]
    return [low, *(between if high > 1.3 * low else []), high]


def _tick(x: int, y: int, text: str) -> str:
    return f'<path class="g" d="M{x} {y}H{_WIDTH - _RIGHT}"/><text class="e" x="{x - 4}" y="{y + 4}">{text}</text>'


def _path(kind: str, d: str, label: str) -> str:
    return f'<path class="{kind}" d="{d}" data-t="{html.escape(label, quote=True)}"/>'


def _svg(label: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg role="img" aria-label="{html.escape(label, quote=True)}" {size}>{"".join(parts)}</svg>'
