"""Values as people read them: tables of text and HTML, times, cfgs and paths. No JAX here."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from typing import Any

from . import codec
from .errors import ConfigTypeError

TableRows = Sequence[Sequence[str]]

# A message can be long, and a table is looked at as a whole.
_WIDEST = 60
# A name of a column with cells that are never cut: half a cfg is none.
_WHOLE = "cfg"

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


def as_text(header: Sequence[str], rows: TableRows) -> str:
    """Rows as aligned text, two spaces between the columns; long cells are cut, but not those of a column `cfg`."""
    lines = [[_line(c) if name == _WHOLE else _cut(c) for name, c in zip(header, row, strict=True)] for row in rows]
    cells = [list(header), *lines]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def as_html(header: Sequence[str], rows: TableRows) -> str:
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


def duration(value: float, digits: int = 1) -> str:
    """A time that a person waited, or will: in seconds, however long."""
    return f"{value:.{digits}f} s"


def short(cfg: Any) -> str:
    """A cfg's fields that say something: `triton rows=8` for an implementation with one more field.

    A store gives a cfg back as plain JSON, so the name of its class is left out; so are fields that are None.
    """
    try:
        fields = codec.encode(cfg)
    # A record may hold what no store can.
    except ConfigTypeError:
        return _line(repr(cfg))
    if not isinstance(fields, dict) or not fields:
        return _line(repr(cfg))
    said = {name: value for name, value in fields.items() if value is not None}
    first = [said.pop("implementation")] if isinstance(said.get("implementation"), str) else []
    return _line(" ".join([*first, *(f"{name}={_plain(value)}" for name, value in said.items())])) or "no field is set"


def _plain(value: Any) -> str:
    if isinstance(value, str) and value and not set(value) & set(" ='\""):
        return value
    return value if isinstance(value, str) and not value else repr(value)


def at_home(text: str) -> str:
    """A text with the user's home folder written as `~`."""
    home = os.path.expanduser("~")
    return text.replace(home + os.sep, "~" + os.sep) if len(home) > 1 else text


def _line(cell: str) -> str:
    return " ".join(shown(cell).split())


def _cut(cell: str) -> str:
    line = _line(cell)
    return line if len(line) <= _WIDEST else line[: _WIDEST - 3] + "..."
