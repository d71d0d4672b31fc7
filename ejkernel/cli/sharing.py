"""The commands between a local store and a remote: push, pull, sync, and the fold of a remote. No JAX here."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..ops.core.key import Key
from ..ops.settings import default_folder
from ..ops.store.remote.compiler_files import FileChange, pull_files, push_files
from ..ops.store.remote.exchange import EntryChange, pull, push
from ..ops.store.remote.folding import compact_remote
from ..ops.store.remote.objects import is_url
from ..ops.store.remote.remote_store import RemoteStore
from ..ops.store.snapshot import Raw
from .entries import EntryRow, refuse_newer, selected, store_paths, target
from .errors import CommandError, ExitStatus, UsageError
from .filters import add_filters, filter_of
from .parsing import Command, Parser
from .screen import say, write, write_json


def _arguments(parser: Parser) -> None:
    parser.add_argument(
        "local", nargs="?", metavar="LOCAL", help="a folder of stores or one store's file; else the cache folder"
    )
    parser.add_argument("remote", metavar="REMOTE", help="a URL: s3://, gs://, sftp://, https:// (to pull), file://")
    add_filters(parser)
    parser.add_argument(
        "--prefer",
        choices=("newest", "fastest"),
        default="newest",
        help="which entry wins where both have a call (newest)",
    )
    parser.add_argument(
        "--compiler", metavar="DIR", help="exchange the files of JAX's compilation cache in this folder as well; signed"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")
    parser.add_argument("--json", action="store_true", help="every change and its reason, for scripts")


def _push(options: argparse.Namespace) -> int:
    remote = _remote(options, write=True)
    changes: list[EntryChange | FileChange] = [*_pushed(options, remote)]
    if options.compiler:
        changes += push_files(_folder(options.compiler), remote, dry_run=options.dry_run)
    return _told(options, changes)


def _pull(options: argparse.Namespace) -> int:
    remote = _remote(options)
    changes: list[EntryChange | FileChange] = [*_pulled(options, remote)]
    if options.compiler:
        changes += pull_files(os.path.expanduser(options.compiler), remote, dry_run=options.dry_run)
    return _told(options, changes)


def _sync(options: argparse.Namespace) -> int:
    remote = _remote(options, write=True)
    # Pulled first: an entry that the remote has newer is not pushed over.
    changes: list[EntryChange | FileChange] = [*_pulled(options, remote), *_pushed(options, remote)]
    if options.compiler:
        changes += pull_files(os.path.expanduser(options.compiler), remote, dry_run=options.dry_run)
        changes += push_files(_folder(options.compiler), remote, dry_run=options.dry_run)
    return _told(options, changes)


def _pushed(options: argparse.Namespace, remote: RemoteStore) -> list[EntryChange]:
    wanted = filter_of(options)
    local = _local(options.local)
    if not local:
        say(f"nothing is kept in {options.local or default_folder()} yet")
    return push(
        local,
        remote,
        fits=lambda key, raw: wanted.fits(EntryRow(key, raw, "")),
        prefer=options.prefer,
        dry_run=options.dry_run,
    )


def _pulled(options: argparse.Namespace, remote: RemoteStore) -> list[EntryChange]:
    wanted = filter_of(options)
    local, into = _local(options.local), target(options.local)
    refuse_newer(into, (key.op_id for key in local))
    return pull(
        local,
        into,
        remote,
        fits=lambda key, raw: wanted.fits(EntryRow(key, raw, str(remote))),
        prefer=options.prefer,
        dry_run=options.dry_run,
    )


def _remote(options: argparse.Namespace, *, write: bool = False) -> RemoteStore:
    if options.local and is_url(options.local):
        raise UsageError(f"LOCAL is a path, and {options.local} is a URL; write `LOCAL REMOTE`, or leave LOCAL out")
    return opened_remote(options.remote, write=write)


def _local(store: str | None) -> dict[Key, Raw]:
    # A pull may make the store.
    paths = store_paths(store) if not store or os.path.exists(store) or os.path.exists(f"{store}.d") else []
    return {row.key: row.raw for row in selected(paths, lambda row: True)}


def _folder(path: str) -> str:
    place = os.path.expanduser(path)
    if not os.path.isdir(place):
        raise CommandError(f"{path} is no folder; give JAX's compilation cache, the value of JAX_COMPILATION_CACHE_DIR")
    return place


def opened_remote(url: str, *, write: bool = False) -> RemoteStore:
    """A remote for one command: errors are raised, and listings are asked for anew."""
    if not is_url(url):
        raise UsageError(f"{url} is no URL; REMOTE is one such as s3://bucket/folder or file:///path")
    remote = RemoteStore(url, write=write, on_fault="raise", fresh_seconds=0.0)
    remote.check()
    return remote


def _told(options: argparse.Namespace, changes: Sequence[EntryChange | FileChange]) -> int:
    if options.json:
        write_json([_as_dict(change) for change in changes])
    else:
        for change in changes:
            write(str(change), "dim" if change.what == "kept" else "")
        counts = Counter(change.what for change in changes)
        done = ", ".join(f"{counts[what]} {what}" for what in ("added", "replaced", "kept", "refused") if counts[what])
        say(f"{done or 'nothing fits'}{'; nothing was changed (--dry-run)' if options.dry_run else ''}")
    return ExitStatus.FOUND if any(change.what == "refused" for change in changes) else ExitStatus.DONE


def _as_dict(change: EntryChange | FileChange) -> dict[str, Any]:
    if isinstance(change, FileChange):
        return asdict(change)
    return {"way": change.way, "what": change.what, "why": change.why, **change.key._asdict()}


def fold_remote(url: str) -> int:
    """Folds a remote, and says what became of each folder."""
    for folded in compact_remote(opened_remote(url, write=True)):
        damaged = f", {folded.damaged} damaged objects left as they are" if folded.damaged else ""
        write(f"{folded.folder}: {folded.entries} entries, {folded.removed} objects folded{damaged}")
    return ExitStatus.DONE


COMMANDS: dict[str, Any] = {
    "push": Command(
        "bring entries to a remote that others read; signed where EJKERNEL_OPS_REMOTE_KEY is set",
        (
            "ejkernel cache push s3://team/ejkernel --min-gain 1.05",
            "ejkernel cache push ./tuned sftp://host/srv/ejkernel --op 'library.*' --dry-run",
        ),
        _arguments,
        _push,
    ),
    "pull": Command(
        "bring the signed entries of a remote into yours; status 1 if some were refused",
        ("ejkernel cache pull s3://team/ejkernel --device H200", "ejkernel cache pull ./image https://host/ejkernel"),
        _arguments,
        _pull,
    ),
    "sync": Command(
        "pull, then push: both have the newest entry of each call",
        ("ejkernel cache sync s3://team/ejkernel", "ejkernel cache sync s3://team/ejkernel --compiler ~/.cache/jax"),
        _arguments,
        _sync,
    ),
}
