"""`ejkernel cache`: shows the entries of stores; the commands that change stores are in `changing.py`. No JAX here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ..ops.core import formatting
from ..ops.reporting.summary import summary_of, summary_of_entry
from ..ops.settings import default_folder
from ..ops.store.maintenance import verify
from ..ops.store.persistent import PersistentCache
from ..ops.store.snapshot import FORMAT
from . import changing, sharing
from .entries import EntryRow, add_store, note_if_nothing, record_of, selected, store_paths, why_newer
from .errors import CommandError, ExitStatus
from .filters import Filter, add_filters, filter_of
from .parsing import Command, Group, Parser
from .screen import say, write, write_json, write_table


def _list_arguments(parser: Parser) -> None:
    add_filters(parser)
    add_store(parser)
    parser.add_argument("--json", action="store_true", help="every field of every entry, for scripts")


def _list(options: argparse.Namespace) -> int:
    paths = store_paths(options.store)
    rows = selected(paths, filter_of(options).fits)
    if options.json:
        write_json([row.as_dict() for row in rows])
        return ExitStatus.DONE
    note_if_nothing(paths, options.store)
    if rows:
        write_table(("operation", "call", "device", "cfg", "time", "gain", "age", "source"), [_cells(r) for r in rows])
    say(f"{_count(len(rows), 'entry', 'entries')} in {_count(len(paths), 'store', 'stores')}", "dim")
    return ExitStatus.DONE


def _cells(row: EntryRow) -> Sequence[str]:
    figures = summary_of_entry(row.summary)
    gain = "-" if figures is None else figures.gain_cell()
    cfg, source = formatting.short(row.raw["cfg"]), str(row.raw.get("source", "hand"))
    when = row.when
    age = "-" if when is None else _age(when)
    return row.key.op_id, row.key.call_key, row.key.device, cfg, formatting.seconds(row.seconds), gain, age, source


def _age(when: datetime) -> str:
    seconds = max((datetime.now(UTC) - when).total_seconds(), 0.0)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _show_arguments(parser: Parser) -> None:
    parser.add_argument("call", help="a call key, its beginning, or an operation; `cache list` shows them")
    add_filters(parser)
    add_store(parser)
    parser.add_argument("--json", action="store_true", help="the entry and its whole record, for scripts")


def _show(options: argparse.Namespace) -> int:
    near = [r for r in selected(store_paths(options.store), filter_of(options).fits) if _begins(r, options.call)]
    rows = [row for row in near if row.key.call_key == options.call] or near
    if not rows:
        raise CommandError(
            f"no entry is of such an operation, or has a call key that begins with {options.call}; "
            "`ejkernel cache list` shows all"
        )
    shown = [(row, record_of(row)) for row in rows]
    if options.json:
        write_json([{**row.as_dict(), "record": None if rec is None else rec.as_json()} for row, rec in shown])
        return ExitStatus.DONE
    for row, record in shown:
        write(str(row.key), "title")
        figures = summary_of_entry(row.summary) if record is None else summary_of(record)
        call = ", ".join(f"{name}={text}" for name, text in (row.raw.get("call") or {}).items())
        known = ", ".join(f"{name} {value}" for name, value in (row.raw.get("environment") or {}).items())
        origin = ", ".join(str(row.raw[name]) for name in ("source", "when", "by") if row.raw.get(name))
        about = [("cfg", formatting.short(row.raw["cfg"])), ("call", call), ("source", origin), ("tuned with", known)]
        for name, text in [
            *about,
            *([] if figures is None else figures.rows()),
            ("kept in", formatting.at_home(row.path)),
        ]:
            if text:
                write(f"  {name:<10}  {text}")
        if record is not None:
            write("\n" + record.table())
    return ExitStatus.DONE


def _begins(row: EntryRow, text: str) -> bool:
    """Is this its call key, the beginning of it, or its operation, with or without the package in front?"""
    named = Filter(op=text).fits(row) or Filter(op=f"*.{text}").fits(row)
    return row.key.call_key.startswith(text) or named


def _verify_arguments(parser: Parser) -> None:
    add_store(parser)
    parser.add_argument("--json", action="store_true", help="for scripts")


def _verify(options: argparse.Namespace) -> int:
    paths = store_paths(options.store)
    found = [(path, verify(PersistentCache[Any]("", path)), why_newer(path)) for path in paths]
    if options.json:
        write_json([{"path": p, "entries": v.entries, "damaged": list(v.damaged), "newer": n} for p, v, n in found])
    else:
        note_if_nothing(paths, options.store)
        for path, seen, newer in found:
            state = "sound" if seen.is_sound and not newer else "newer" if seen.is_sound else "damaged"
            write(
                f"{state:<8}{_count(seen.entries, 'entry', 'entries'):>14}  {path}", "" if state == "sound" else "bad"
            )
            for damage in seen.damaged:
                write(f"          {damage}")
            if newer:
                write(f"          {newer}; install the newer ejkernel-ops")
        if any(not seen.is_sound for _, seen, _ in found):
            say("`ejkernel cache compact` sets what is damaged aside and keeps the rest")
    return ExitStatus.FOUND if any(newer or not seen.is_sound for _, seen, newer in found) else ExitStatus.DONE


def _path_arguments(parser: Parser) -> None:
    parser.add_argument("--op", metavar="NAME", help="the file of one operation")
    parser.add_argument("--json", action="store_true", help="the folder, its files and the format, for scripts")


def _path(options: argparse.Namespace) -> int:
    from ..ops.store.folder import OperationStores

    if options.json:
        write_json({"folder": str(default_folder()), "stores": store_paths(None), "format": FORMAT})
    else:
        write(str(default_folder()) if options.op is None else OperationStores().of(options.op).path)
    return ExitStatus.DONE


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


COMMAND = Group(
    "What was tuned and is kept, in one file for each operation.",
    {
        "list": Command(
            "list what is kept",
            (
                "ejkernel cache list",
                "ejkernel cache list --op 'library.*' --min-gain 1.1",
                "ejkernel cache list --json",
            ),
            _list_arguments,
            _list,
        ),
        "show": Command(
            "show one entry and every candidate that was measured for it",
            ("ejkernel cache show 9f3c52e0", "ejkernel cache show 9f3c52e0 --json"),
            _show_arguments,
            _show,
        ),
        "verify": Command(
            "check every entry of every store; status 1 if something is damaged",
            ("ejkernel cache verify", "ejkernel cache verify --store shared.json --json"),
            _verify_arguments,
            _verify,
        ),
        **changing.COMMANDS,
        **sharing.COMMANDS,
        "path": Command(
            "say where everything is kept",
            ("ejkernel cache path", "ejkernel cache path --op matmul"),
            _path_arguments,
            _path,
        ),
    },
)
