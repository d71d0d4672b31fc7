"""Output for people and scripts: colours on terminals alone, tables that fit the window, JSON for scripts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from ..ops.core import formatting
from ..ops.settings import no_color

_CODES = {"title": "1", "good": "32", "bad": "31", "dim": "2", "": ""}
# JSON's own escapes, for what a terminal would not show as it is.
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in formatting.HIDDEN}
# Narrower columns say nothing.
_NARROWEST = 6


def write(text: str = "", style: str = "") -> None:
    """Writes a line of output."""
    print(styled(text, style, sys.stdout))


def say(text: str, style: str = "") -> None:
    """Writes a line for the user to the error stream, so that the output holds only what was asked for."""
    # The stream may be closed, or its reader gone; the status still tells.
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(styled(text, style, sys.stderr), file=sys.stderr, flush=True)


def styled(text: str, style: str, stream: TextIO | None) -> str:
    """Text in colour, on a terminal where the user allows it; control characters cannot steer that terminal."""
    text = formatting.shown(text)
    code = _CODES[style]
    wanted = code and stream is not None and stream.isatty() and not no_color()
    return f"\x1b[{code}m{text}\x1b[0m" if wanted else text


def write_json(data: Any) -> None:
    """Writes JSON for scripts; a list has one item a line, so that other tools can take it apart."""
    if isinstance(data, list):
        lines = ",\n".join(_dumped(item) for item in data)
        print(f"[\n{lines}\n]" if data else "[]")
    else:
        print(_dumped(data, indent=1))


def _dumped(data: Any, indent: int | None = None) -> str:
    return json.dumps(data, indent=indent, ensure_ascii=False).translate(_ESCAPED)


def write_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes aligned columns; in a terminal the widest are cut until they fit its window."""
    fitted = _fitted(header, rows, shutil.get_terminal_size().columns) if _on_terminal() else rows
    first, *others = formatting.as_text(header, fitted).splitlines()
    write(first, "title")
    if others:
        write("\n".join(others))


def _on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _fitted(header: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> list[list[str]]:
    widths = [max([len(name), *(len(row[i]) for row in rows)]) for i, name in enumerate(header)]
    least = [max(len(name), _NARROWEST) for name in header]
    while sum(widths) + 2 * (len(widths) - 1) > columns:
        room = [width - small for width, small in zip(widths, least, strict=True)]
        widest = max(range(len(widths)), key=lambda i: room[i])
        # The window is too narrow for any table: then its lines are broken.
        if room[widest] <= 0:
            break
        widths[widest] -= 1
    return [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows]


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 2] + ".."


def print_anything() -> None:
    """Makes the streams escape what their encoding lacks: a key may hold any text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Shows each warning as one line, without its place in our code."""

    def show(message: Warning | str, *about: Any, **more: Any) -> None:
        say(f"ejkernel: warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        # Deprecations concern the authors of a program, not the user of a command.
        for kind in (DeprecationWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", kind)
        warnings.showwarning = show
        yield


def close_output() -> None:
    """Discards what is still in the buffers: the reader is gone, or the disk is full."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            continue
        # A second failure at the end of the process would change its status.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
