"""One call of a page: what was chosen, the race, parameters, floor, failures, time and origin. No JAX here."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from ..core import formatting
from ..core.description import one_line
from ..core.record import Record
from ..core.standing import standings
from ..core.table import notes, ranked
from . import charts
from .effects import effects, heat_map
from .gather import CallFacts
from .markup import Cell, bar, cell, listing, number, table, text
from .roofline import floor_of, peaks_of

Detail = Literal["full", "short", "brief"]
# Candidates with a line and a row of their own, parameters, values of one, and failures that are quoted.
_MOST = {"full": (200, 6, 16, 40), "short": (4, 3, 6, 1), "brief": (3, 0, 0, 0)}


def section(facts: CallFacts, anchor: str, detail: Detail, common: Mapping[str, str]) -> str:
    """A call with everything that is known of it, but for what all calls of the page have in common."""
    candidates, parameters, values, quoted = _MOST[detail]
    is_full = detail == "full"
    name = one_line(facts.key.op_id, facts.call) if facts.call else str(facts.key.op_id)
    said = facts.verdict
    parts = [
        f'<section id="{anchor}"><h3>{text(name)}</h3>',
        f'<p><code>{text(formatting.short(facts.cfg))}</code> <span class="{said.kind}">{text(said.text)}</span></p>',
        f'<p class="d">{text("; ".join(f"{name}: {value}" for name, value in _rows(facts)))}</p>',
    ]
    record = facts.record
    if record is None or not any(trial.samples_s for trial in record.trials):
        parts.append('<p class="n">No samples are known of this call: no race, no parameters, no floor to show.</p>')
    if record is not None:
        parts += [
            "" if detail == "brief" else charts.race(record, candidates),
            _candidates(record, candidates, is_full=is_full),
            *_parameters(record, parameters, values, is_full=is_full),
            _floor(facts, record),
            _failures(record, quoted, is_full=is_full),
            "" if detail == "brief" else _time(record, is_full=is_full),
        ]
    parts += [_origin_line(facts, common), "</section>"]
    return "".join(parts)


def search_text(facts: CallFacts) -> str:
    """The words by which the filter finds a call."""
    words = [*facts.key, *facts.call.values(), formatting.short(facts.cfg), facts.verdict.kind, facts.source]
    return " ".join(words).lower()


def _rows(facts: CallFacts) -> list[tuple[str, str]]:
    rows = [] if facts.figures is None else facts.figures.rows()
    return [(name, value) for name, value in rows if name in ("tuning", "time", "runner-up", "check")]


def _candidates(record: Record, most: int, *, is_full: bool) -> str:
    shown, order = standings(record), ranked(record)
    if not is_full:
        lines = []
        for place in order[:most]:
            time, ratio = formatting.seconds(shown[place].seconds), shown[place].ratio
            said = [formatting.short(record.trials[place].cfg), time, "" if ratio is None else f"{ratio:.2f}x"]
            lines.append(", ".join(filter(None, [*said, _clipped(notes(record, place, shown[place]))])))
        hidden = [f"{len(order) - most} more"] if len(order) > most else []
        return listing([*lines, *hidden])
    rows = [
        (
            Cell(f'<span class="c">{text(formatting.short(record.trials[place].cfg))}</span>'),
            number(formatting.seconds(shown[place].seconds), shown[place].seconds),
            number("-" if (ratio := shown[place].ratio) is None else f"{ratio:.2f}x", ratio),
            cell(record.trials[place].status),
            cell(_clipped(notes(record, place, shown[place]))),
        )
        for place in order[:most]
    ]
    more = f"; {len(order) - most} more are in the record" if len(order) > most else ""
    title = f"Candidates, the fastest first{more}"
    return table(title, ("cfg", "time", "over the winner", "status", ""), rows, kind="s")


def _parameters(record: Record, most: int, values: int, *, is_full: bool) -> list[str]:
    found = effects(record)[:most]
    if not found:
        return []
    if not is_full:
        lines = []
        for effect in found:
            shown = [f"{value} {best:.2f}x" for value, (best, _, _) in list(effect.values.items())[:values]]
            more = f", {len(effect.values) - values} more" if len(effect.values) > values else ""
            lines.append(f"{effect.name}: {', '.join(shown)}{more}")
        return ["<h4>What each parameter does: best time over the winner's</h4>", listing(lines), _grid(record, 16)]
    rows = []
    for effect in found:
        for value, (best, middle, count) in list(effect.values.items())[:values]:
            cells = (cell(effect.name), cell(_clipped(value)), number(f"{best:.2f}x", best))
            rows.append((*cells, number(f"{middle:.2f}x", middle), number(str(count), count), Cell(bar(1 / best))))
    header = ("parameter", "value", "best", "middle", "candidates", "")
    title = "Best and middle time over the winner's, by value; the parameter that matters most first"
    return ["<h4>What each parameter does</h4>", table(title, header, rows), _grid(record, 144)]


def _grid(record: Record, most: int) -> str:
    """Two parameters as a heat map; each field has its figure."""
    grid = heat_map(record)
    if grid is None or len(grid.row_values) * len(grid.column_values) > most:
        return ""
    body = []
    for row in grid.row_values:
        ratios = [grid.best.get((row, column)) for column in grid.column_values]
        body.append((cell(row), *(_shaded(ratio) for ratio in ratios)))
    header = (f"{grid.rows} \\ {grid.columns}", *grid.column_values)
    return table(f"{grid.rows} and {grid.columns}: best time over the winner's", header, body, kind="m")


def _shaded(ratio: float | None) -> Cell:
    # Darker is faster; beyond three times the winner's time there is no colour.
    steps = (1.05, 1.25, 1.75, 3.0)
    strength = next((i for i, limit in enumerate(steps) if ratio is not None and ratio <= limit), None)
    return Cell("-" if ratio is None else f"{ratio:.2f}x", kind="" if strength is None else f"k{strength}")


def _floor(facts: CallFacts, record: Record) -> str:
    peaks = peaks_of(facts.key.device)
    found = floor_of(record, peaks)
    if found is not None:
        return f"<h4>How far from the floor</h4><p>{text(found)}</p>"
    if not record.cost:
        return '<p class="d">Floor: bytes and operations were not kept with this tuning.</p>'
    return f'<p class="d">Floor: the peaks of {text(facts.key.device)} are not known here.</p>' if peaks is None else ""


def _failures(record: Record, most: int, *, is_full: bool) -> str:
    failed = [*record.failures, *(trial for trial in record.trials if trial.status == "invalid")]
    if not failed:
        return ""
    kinds = Counter(trial.status for trial in failed)
    if not is_full:
        shown = [f"{count} {kind}" for kind, count in kinds.most_common()]
        first = f"; first: {formatting.short(failed[0].cfg)}: {_clipped(failed[0].message)}" if most else ""
        return f"<p>Failures: {text(', '.join(shown) + first)}</p>"
    rows = []
    for kind, count in kinds.most_common():
        quoted = [trial for trial in failed if trial.status == kind][:most]
        reasons = [
            f"{formatting.short(trial.cfg)}: {_clipped(trial.message or 'no reason was kept')}" for trial in quoted
        ]
        more = [f"and {count - len(quoted)} more"] if count > len(quoted) else []
        rows.append((cell(kind), number(str(count), count), Cell(listing([*reasons, *more]))))
    return "<h4>Failures</h4>" + table("Candidates that could not be used, by kind", ("kind", "count", "reasons"), rows)


def _time(record: Record, *, is_full: bool) -> str:
    phases = dict(record.phases)
    if not phases:
        compiled = sum(trial.compile_s or 0.0 for trial in record.trials)
        timed = sum(sum(trial.samples_s) for trial in record.trials)
        phases = {"compiling, all threads together": compiled, "the samples themselves": timed}
    total = sum(phases.values())
    if not total:
        return ""
    if not is_full:
        shown = [f"{name} {formatting.seconds(seconds)}" for name, seconds in phases.items() if seconds > 0.001 * total]
        return f'<p class="d">Time of the tuning: {text(", ".join(shown))}.</p>'
    rows = [
        (
            cell(name),
            number(formatting.seconds(seconds), seconds),
            Cell(f"{bar(seconds / total)} {seconds / total:.0%}"),
        )
        for name, seconds in phases.items()
        if seconds > 0.001 * total
    ]
    return "<h4>Where the time of the tuning went</h4>" + table("Seconds by phase", ("phase", "time", "share"), rows)


def origin(facts: CallFacts) -> dict[str, str]:
    """Origin of a cfg: device, kernel, versions, clock and store."""
    record = facts.record
    known = {
        "device": facts.key.device,
        "call": facts.key.call_key,
        "kernel": "" if record is None else record.kernel,
        "tuned with": ", ".join(f"{name} {value}" for name, value in facts.environment.items()),
        "clock": "" if record is None else record.clock,
        "conditions": "" if record is None else record.conditions,
        "seed": "" if record is None else str(record.seed),
        "budget": "" if record is None or record.budget_s is None else formatting.seconds(record.budget_s),
        "from": ", ".join(filter(None, [facts.source, facts.when, formatting.at_home(facts.where)])),
    }
    return {name: value for name, value in known.items() if value}


def in_common(calls: Sequence[CallFacts]) -> dict[str, str]:
    """Origins that all calls of a page share, to be said once."""
    origins = [origin(one) for one in calls]
    return {} if len(origins) < 2 else dict(set.intersection(*(set(one.items()) for one in origins)))


def _origin_line(facts: CallFacts, common: Mapping[str, str]) -> str:
    said = "; ".join(f"{name}: {value}" for name, value in origin(facts).items() if name not in common)
    again = shlex.join(["ejkernel", "remeasure", "--call", facts.key.call_key or "KEY", "--fix"])
    return f'<p class="d">{text(said)}. Again: <code>{text(again)}</code></p>'


def _clipped(line: str, most: int = 160) -> str:
    plain = " ".join(line.split())
    return plain if len(plain) <= most else plain[: most - 3] + "..."
