"""The commands that change stores: compact, prune, merge, export and import. No JAX here."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any

from ..ops.store import files
from ..ops.store.maintenance import Merged, compact, merge, prune
from ..ops.store.snapshot import Snapshot, line, spell
from .entries import EntryRow, add_store, note_if_nothing, opened, refuse_newer, selected, store_paths, target
from .errors import CommandError, ExitStatus, UsageError
from .filters import add_filters, filter_of
from .parsing import Command, Parser
from .screen import write, write_json


def _compact_arguments(parser: Parser) -> None:
    parser.add_argument("url", nargs="?", metavar="URL", help="a remote to fold in place of local stores")
    add_store(parser)


def _compact(options: argparse.Namespace) -> int:
    if options.url:
        if options.store:
            raise UsageError("compact folds a remote or local stores; give a URL or --store")
        from .sharing import fold_remote

        return fold_remote(options.url)
    paths = store_paths(options.store)
    note_if_nothing(paths, options.store)
    for path in paths:
        gone = compact(opened(path))
        write(f"{path}: {gone} records without an entry removed" if gone else f"{path}: up to date")
    return ExitStatus.DONE


def _prune_arguments(parser: Parser) -> None:
    add_filters(parser)
    add_store(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    parser.add_argument("--json", action="store_true", help="the keys that went, for scripts")


def _prune(options: argparse.Namespace) -> int:
    wanted = filter_of(options)
    if wanted.is_empty:
        raise UsageError("prune needs to know what: --op, --device, --older-than, --newer-than, --min- or --max-gain")
    paths = store_paths(options.store)
    gone = selected(paths, wanted.fits)
    if not options.dry_run:
        for path in sorted({row.path for row in gone}):
            # The filter sees each entry again, since another process may have put a better one meanwhile.
            prune(opened(path), where=lambda key, raw, path=path: wanted.fits(EntryRow(key, raw, path)))  # type: ignore[misc]
    if options.json:
        write_json([row.key._asdict() for row in gone])
        return ExitStatus.DONE
    note_if_nothing(paths, options.store)
    for row in gone:
        write(str(row.key))
    write(f"{len(gone)} {'entry' if len(gone) == 1 else 'entries'} {'would go' if options.dry_run else 'removed'}")
    return ExitStatus.DONE


def _merge_arguments(parser: Parser) -> None:
    parser.add_argument("sources", nargs="+", metavar="path", help="folders of stores, or store files")
    _prefer_arguments(parser)


def _prefer_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--prefer",
        choices=("newest", "fastest"),
        default="newest",
        help="which entry wins where both have a call (newest)",
    )
    parser.add_argument("--store", metavar="PATH", help="where to; a folder or a .json file; else the cache folder")
    parser.add_argument("--json", action="store_true", help="counts and conflicts, for scripts")


def _merge(options: argparse.Namespace) -> int:
    into = target(options.store)
    paths = [path for source in options.sources for path in store_paths(source)]
    sources = [opened(path) for path in paths]
    # Checked before the first entry is merged: all of them are, or none.
    refuse_newer(into, (op_id for source in sources for _, op_id, _ in source.keys()))
    done = [merge(into, source, options.prefer) for source in sources]
    total = Merged(
        sum(one.added for one in done),
        sum(one.replaced for one in done),
        tuple(key for one in done for key in one.conflicts),
    )
    if options.json:
        write_json({**asdict(total), "conflicts": [key._asdict() for key in total.conflicts]})
        return ExitStatus.DONE
    for key in total.conflicts:
        write(f"both had {key}")
    write(f"{total.added} added, {total.replaced} replaced in {into}; {options.prefer} wins")
    return ExitStatus.DONE


def _import(options: argparse.Namespace) -> int:
    for source in options.sources:
        if not os.path.isfile(source):
            raise CommandError(f"{source} is no file; `cache import` takes what `cache export` wrote")
    return _merge(options)


def _export_arguments(parser: Parser) -> None:
    parser.add_argument("file", help="a file that does not exist yet")
    add_filters(parser)
    add_store(parser)


def _export(options: argparse.Namespace) -> int:
    path = os.path.abspath(os.path.expanduser(options.file))
    if files.identity(path) is not None:
        raise CommandError(f"{options.file} exists; give the path of a new file, or remove it")
    rows = selected(store_paths(options.store), filter_of(options).fits)
    if not rows:
        raise CommandError("nothing fits, so nothing is written; `ejkernel cache list` shows what there is")
    lines: dict[str, str] = {spell(row.key): line(spell(row.key), row.raw) for row in rows}
    files.make_folder(os.path.dirname(path))
    files.write(path, Snapshot(lines).text().encode(), durable=False)
    write(f"{len(lines)} {'entry' if len(lines) == 1 else 'entries'} written to {path}")
    return ExitStatus.DONE


COMMANDS: dict[str, Any] = {
    "compact": Command(
        "fold new entries into their files, set damaged ones aside, remove records without an entry",
        (
            "ejkernel cache compact",
            "ejkernel cache compact --store /shared/ejkernel",
            "ejkernel cache compact s3://team/ejkernel",
        ),
        _compact_arguments,
        _compact,
    ),
    "prune": Command(
        "remove the entries that fit all the filters given",
        ("ejkernel cache prune --older-than 1y --dry-run", "ejkernel cache prune --op matmul@v1"),
        _prune_arguments,
        _prune,
    ),
    "merge": Command(
        "bring the entries of other stores into yours",
        ("ejkernel cache merge /shared/ejkernel", "ejkernel cache merge other.json --prefer fastest"),
        _merge_arguments,
        _merge,
    ),
    "export": Command(
        "write entries to one file that other stores can read",
        ("ejkernel cache export mine.json", "ejkernel cache export h200.json --device H200 --min-gain 1.05"),
        _export_arguments,
        _export,
    ),
    "import": Command(
        "bring the entries of an exported file into yours",
        ("ejkernel cache import h200.json", "ejkernel cache import h200.json --prefer fastest"),
        _merge_arguments,
        _import,
    ),
}
