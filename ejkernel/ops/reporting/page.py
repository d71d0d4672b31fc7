"""A page about tunings: one HTML file that needs no network, no server and no script to be read. No JAX here."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..core import formatting
from ..core.description import one_line
from ..core.errors import SettingError
from ..core.standing import StandingKind
from ..store import files
from . import charts
from .compare import differences, environments
from .gather import CallFacts, Subject, subject_of
from .markup import Cell, bar, cell, listing, number, table, text
from .page_style import MARKER, SCRIPT, STYLE
from .roofline import floor_of, peaks_of
from .sections import Detail, in_common, search_text, section

if TYPE_CHECKING:
    from .profile import Attribution

# What a mail takes and a browser opens at once. Calls are told in full as far as that reaches, the costliest first.
_LARGEST = 244_000
_MOST_ROWS = 1000
# With less than this left no call can be told in more detail.
_LEAST = 400


def report(
    source: Any,
    path: str | os.PathLike[str],
    *,
    against: Any = None,
    profile: Attribution | None = None,
    title: str = "",
) -> Path:
    """Writes a page about a result, a record, a store, or the path of one; returns the path of the page.

    `against` is an earlier run of the same kinds, and the page says what differs. `profile` is what `attribute` gave.
    """
    subject = subject_of(source, title)
    before = None if against is None else subject_of(against)
    target = Path(path).expanduser()
    if target.is_dir():
        raise SettingError(f"{path} is a folder; give the path of a file, such as {target / 'report.html'}")
    files.write(os.path.realpath(target), html_page(subject, before, profile).encode(), durable=False)
    return target


def html_page(subject: Subject, before: Subject | None = None, profile: Attribution | None = None) -> str:
    """The text of a page."""
    calls = subject.calls
    parts = [_opening(subject), _notes(subject)]
    if before is not None:
        parts.append(_against(subject, before))
    if profile is not None:
        from .profile import profile_section

        parts.append(profile_section(profile))
    parts += [_calls_table(subject), _roofline(calls)]
    return _page(subject.title, "".join(parts) + _sections(calls, sum(map(_size, parts))))


def _page(title: str, body: str) -> str:
    made = f"Made by ejkernel-ops {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>{text(title)} - ejkernel</title><link rel="icon" href="data:,"><style>{STYLE.strip()}</style></head>'
        f'<body>{MARKER}<main>{body}</main><footer><p class="d">{made}</p></footer><div id="tip" aria-hidden="true">'
        f"</div><script>{SCRIPT.strip()}</script></body></html>\n"
    )


def _opening(subject: Subject) -> str:
    calls = subject.calls
    devices = Counter(one.key.device or "an unknown device" for one in calls)
    kinds = Counter(one.verdict.kind for one in calls)
    words: dict[StandingKind, str] = {
        "faster": "surely faster",
        "same": "heuristic cfg is best",
        "noisy": "too noisy to tell",
        "changed": "taken back",
        "unmeasured": "not measured",
    }
    said = [f"{what} {kinds[kind]}" for kind, what in words.items() if kinds[kind]]
    count = "1 call" if len(calls) == 1 else f"{len(calls):,} calls"
    where = ", ".join(f"{device} ({n})" if len(devices) > 1 else device for device, n in devices.most_common(6))
    lead = f"{count}{' on ' + where if where else ''}" + (f"; {', '.join(said)}" if said else "")
    gains = [one.figures.gain[0] for one in calls if one.verdict.kind == "faster" and one.figures and one.figures.gain]
    mean = math.exp(sum(map(math.log, gains)) / len(gains)) if gains and min(gains) > 0 else None
    gained = (
        "" if mean is None else f" Those that gain are {mean:.2f} times as fast as their heuristic cfgs on average."
    )
    confirmed = f'<p class="n">The program itself: {text(subject.confirmation)}</p>' if subject.confirmation else ""
    return f"<header><h1>{text(subject.title)}</h1><p>{text(lead)}.{gained}</p></header>{confirmed}"


def _notes(subject: Subject) -> str:
    shown = subject.notes[:50]
    more = [f"and {len(subject.notes) - len(shown)} more"] if len(subject.notes) > len(shown) else []
    found = listing([*shown, *more])
    return f"<h2>What is missing</h2>{found}" if found else ""


def _against(subject: Subject, before: Subject) -> str:
    found, other = differences(before, subject), environments(before, subject)
    lead = f"<h2>What differs from {text(before.title)}</h2>{listing(other)}"
    if not found:
        return f"{lead}<p>Every call has the cfg that it had, and its time within 2%.</p>"
    rows = [
        (
            cell(one.name),
            cell(one.what),
            *(number(formatting.seconds(seconds), seconds) for seconds in one.seconds),
        )
        for one in found[:_MOST_ROWS]
    ]
    same = len({c.key for c in subject.calls} | {c.key for c in before.calls}) - len(found)
    title = f"{len(found)} calls differ, {same} do not"
    return lead + table(title, ("call", "difference", "before", "now"), rows, kind="s")


def _calls_table(subject: Subject) -> str:
    listed = subject.calls[:_MOST_ROWS]
    if not listed:
        return '<h2>Calls</h2><p class="n">There is no call here: nothing was tuned yet, or the store is empty.</p>'
    total = sum(one.worth for one in subject.calls)
    rows = [_row(one, place, total, subject.is_program) for place, one in enumerate(listed)]
    header = ["call", "cfg", "time", "gain", "outcome", "over its floor", "candidates", "from"]
    if subject.is_program:
        header[6:6] = ["share of the calls' time"]
    more = len(subject.calls) - len(listed)
    hidden = f'<p class="n">{more:,} more calls, the ones that take least, are not on this page.</p>' if more else ""
    box = (
        '<p class="noprint" hidden><label>Filter: <input id="filter" type="search" placeholder="operation, dtype, cfg, '
        'outcome"></label> <span id="found" role="status" class="d"></span></p>'
    )
    shares = (
        "" if subject.is_program else '<p class="d">Shares need a program: make the page of an autotune result.</p>'
    )
    about = [search_text(one) for one in listed]
    shown = table("Calls, the costliest first", header, rows, kind="s", about=about)
    return f'<h2 id="calls">Calls</h2>{box}{shown}{hidden}{shares}'


def _row(one: CallFacts, place: int, total: float, is_program: bool) -> list[Cell]:
    figures, record = one.figures, one.record
    gain = None if figures is None else figures.gain
    middle = None if gain is None else gain[0]
    interval = "-" if gain is None else f"{gain[0]:.2f}x ({gain[1]:.2f} to {gain[2]:.2f})"
    floor = None if record is None else floor_of(record, peaks_of(one.key.device))
    tried = None if figures is None else figures.candidates
    failed = f", {figures.failed} failed" if figures is not None and figures.failed else ""
    name = one_line(one.key.op_id, one.call) if one.call else f"{one.key.op_id} {one.key.call_key}"
    words = {"faster": "faster", "same": "heuristic is best", "noisy": "too noisy to tell", "changed": "taken back"}
    row = [
        Cell(f'<a href="#c{place}">{text(name)}</a>'),
        Cell(f'<span class="c">{text(formatting.short(one.cfg))}</span>'),
        number(formatting.seconds(one.seconds), one.seconds),
        number(interval, middle),
        cell(words.get(one.verdict.kind, "not measured"), one.verdict.kind),
        number("-" if floor is None else f"{floor.ratio:.2f}x", None if floor is None else floor.ratio),
        number("-" if tried is None else f"{tried}{failed}", tried),
        cell(one.source + (f": {one.note}" if one.note else "")),
    ]
    if is_program:
        share = one.worth / total if total else 0.0
        row[6:6] = [Cell(f"{bar(share)} {share:.0%} of {one.count} runs", share, sorts=True)]
    return row


def _roofline(calls: Sequence[CallFacts]) -> str:
    parts = []
    for device in dict.fromkeys(one.key.device for one in calls):
        peaks = peaks_of(device)
        here = [one for one in calls if one.key.device == device and one.record is not None and one.record.cost]
        if peaks is None or not here:
            continue
        points = [
            (one.key.op_id, r.cost.get("bytes", 0.0), r.cost.get("operations", 0.0), one.seconds or 0.0)
            for one in here[:200]
            if (r := one.record) is not None
        ]
        drawn = charts.roofline(points, peaks)
        if drawn:
            stated = f"{peaks.bytes_s / 1e12:.2f} TB/s and {peaks.operations_s / 1e12:,.0f} TFLOP/s: {peaks.origin}"
            parts.append(f'<h2>Roofline of {text(device)}</h2>{drawn}<p class="d">Peaks: {text(stated)}.</p>')
    return "".join(parts)


def _sections(calls: Sequence[CallFacts], used: int) -> str:
    """The sections of as many calls as fit, the costliest first and in full as far as room is left for the others."""
    listed = calls[:_MOST_ROWS]
    if not listed:
        return ""
    common = in_common(listed)
    left = _LARGEST - used - _size(STYLE + SCRIPT)
    shorts: list[str] = []
    for place, one in enumerate(listed):
        made = section(one, f"c{place}", "brief", common)
        if shorts and left < _size(made):
            break
        left -= _size(made)
        shorts.append(made)
    details: tuple[Detail, ...] = ("short", "full")
    for detail in details:
        for place, made in enumerate(shorts):
            if left < _LEAST:
                break
            whole = section(listed[place], f"c{place}", detail, common)
            more = _size(whole) - _size(made)
            if left >= more:
                left -= more
                shorts[place] = whole
    left_out = len(listed) - len(shorts)
    rest = (
        f'<p class="n">{left_out:,} more calls are in the table alone, to keep this page small; '
        "<code>ejkernel report --op NAME</code> makes a page of one operation.</p>"
    )
    rest = rest if left_out else ""
    legend = (
        '<p class="d">In a race: blue the winner, dashed the heuristic cfg, grey the others, a red cross where a '
        "candidate was dropped; every dot is a sample, as it was measured. Times in tables are without the drift "
        "between rounds.</p>"
    )
    made = "; ".join(f"{name}: {value}" for name, value in common.items())
    alike = f'<p class="d">All calls have in common: {text(made)}.</p>' if made else ""
    return f"<h2>Each call</h2>{legend}{alike}{''.join(shorts)}{rest}"


def _size(made: str) -> int:
    return len(made.encode())
