"""Rows as a table: aligned text for terminals, HTML for notebooks. No JAX here."""

from __future__ import annotations

import html
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]

# A cfg or a message can be long, and a table is looked at as a whole.
_WIDEST = 60

# Control characters, which steer a terminal, and those that turn the direction of text, which hide what it says.
HIDDEN = frozenset(
    chr(code)
    for code in (
        *(*range(32), *range(127, 160), 0x61C, *range(0x200B, 0x2010)),
        *(*range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF),
    )
    if chr(code) not in "\t\n"
)
_SHOWN = str.maketrans(dict.fromkeys(HIDDEN, "?"))


def shown(text: str) -> str:
    """A text from a file with a question mark for each character that a terminal would not show as it is."""
    return text.translate(_SHOWN)


def as_text(header: Sequence[str], rows: Rows) -> str:
    """Rows as aligned text, two spaces between the columns."""
    cells = [list(header), *([_cut(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def as_html(header: Sequence[str], rows: Rows) -> str:
    """Rows as an HTML table; markup in the cells is escaped."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def seconds(value: float | None) -> str:
    """A time with the unit that suits it; a dash where there is none."""
    if value is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        # What rounds to 1000 of a smaller unit is one of this.
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}" if value / size < 1000 else f"{value / size:,.0f} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _cut(cell: str) -> str:
    line = " ".join(shown(cell).split())
    return line if len(line) <= _WIDEST else line[: _WIDEST - 3] + "..."
