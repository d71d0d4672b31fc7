"""Pieces of HTML: every text that comes from outside is escaped here. No JAX here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A cell of a table; `value` is what it is sorted by, where that is not its text."""

    markup: str
    value: float | None = None
    sorts: bool = False
    # A class of the style.
    kind: str = ""


def text(value: object) -> str:
    """A text as HTML; characters that a page cannot hold are shown as such."""
    plain = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))
    return html.escape(plain, quote=True)


def cell(value: object, kind: str = "") -> Cell:
    """A cell of plain text."""
    return Cell(f'<span class="{kind}">{text(value)}</span>' if kind else text(value))


def number(shown: str, value: float | None) -> Cell:
    """A cell that is sorted by its number; without one it comes last."""
    return Cell(text(shown), value, sorts=True)


def table(
    caption: str,
    header: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    kind: str = "",
    about: Sequence[str] = (),
) -> str:
    """A table that may be wider than the screen; `about` is the text of each row that the filter looks into."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in header)
    body = []
    for place, row in enumerate(rows):
        words = f' data-f="{text(about[place].lower())}"' if about else ""
        body.append(f"<tr{words}>{''.join(map(_td, row))}</tr>")
    names = f' class="{kind}"' if kind else ""
    return (
        f'<div class="t" role="region" tabindex="0" aria-label="{text(caption)}"><table{names}>'
        f"<caption>{text(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _td(one: Cell) -> str:
    if not one.sorts:
        return f'<td class="{one.kind}">{one.markup}</td>' if one.kind else f"<td>{one.markup}</td>"
    return f'<td data-v="{"" if one.value is None else f"{one.value:.6g}"}">{one.markup}</td>'


def bar(share: float) -> str:
    """A bar of a share of the width."""
    return f'<span class="bar" style="width:{max(0.0, min(share, 1.0)) * 8:.2f}em"></span>'


def listing(items: Iterable[object]) -> str:
    """A list of sentences; empty where there is none."""
    rows = "".join(f"<li>{text(item)}</li>" for item in items)
    return f"<ul>{rows}</ul>" if rows else ""
