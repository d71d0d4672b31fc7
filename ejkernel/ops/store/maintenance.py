"""Maintenance of stores: verify, compact, prune, merge, export and import."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from ..core import cfg as cfgs
from ..core.errors import SettingError, StoreError
from ..core.key import Key
from . import files
from .entry_files import ENTRY_NAME, entry_in, entry_names
from .persistent import PersistentCache
from .snapshot import Raw
from .snapshot_check import check_snapshot
from .store import Store, StoredEntry

Prefer = Literal["newest", "fastest"]


@dataclass(frozen=True)
class Verified:
    """Findings on a store: its number of entries, the damaged places, and the entry files that wait to be folded."""

    entries: int
    damaged: tuple[str, ...]
    pending: int

    @property
    def is_sound(self) -> bool:
        """Is nothing damaged?"""
        return not self.damaged


def verify(cache: PersistentCache[Any]) -> Verified:
    """Reads every entry and checks it; changes nothing on disk."""
    # Not a read of the entry log: that would set damaged files aside.
    path = files.resolved(cache.path)
    folder = path + ".d"
    waiting = entry_names(path)
    pending = [name for name in waiting if ENTRY_NAME.fullmatch(name)]
    damaged: list[str] = []
    names: set[str] = set()
    # Before the snapshot: what a fold takes meanwhile is in there.
    for file_name in waiting:
        try:
            content = files.read(os.path.join(folder, file_name), files.LARGEST_ENTRY)
        except (files.NotPlainError, files.TooLargeError) as error:
            damaged.append(f"{os.path.join(folder, file_name)}: {error.strerror}")
            continue
        if content is None:
            continue
        parsed = entry_in(file_name, content.data)
        if parsed is None:
            damaged.append(os.path.join(folder, file_name))
        else:
            names.add(parsed[0])
    good, bad, checked = check_snapshot(path, names)
    with cache.held() as log:
        if checked is not None:
            log.note_sound(checked)
    places = [f"{cache.path}: {reason}" for reason in bad]
    return Verified(good + len(names), (*places, *damaged), len(pending))


def compact(cache: PersistentCache[Any]) -> int:
    """Folds everything into the file, and removes records without an entry; returns their number."""
    wanted = set()
    with cache.held() as log:
        folder = os.path.join(log.folder, "records")
        # Listed first: a record is written after its entry, so each of these has one by now, if it ever will.
        records = [name for name in files.names(folder) if name.endswith(".json")]
        cache.fold()
        log.list_entries()
        # Without records there is nothing to look for, among a million entries least of all.
        for key, raw in log.entries() if records else ():
            wanted.add(os.path.basename(log.record_path(key, raw)))
    gone = [name for name in records if name not in wanted]
    for name in gone:
        files.remove(os.path.join(folder, name))
    return len(gone)


def prune(
    cache: PersistentCache[Any],
    *,
    older_than: timedelta | None = None,
    version: str | None = None,
    device: str | None = None,
    op_id: str | None = None,
    where: Callable[[Key, Raw], bool] | None = None,
) -> int:
    """Removes the entries that fit everything given (age, version, device, `op@vN`, a test); returns their number."""
    if older_than is None and version is None and device is None and op_id is None and where is None:
        raise SettingError("prune needs to know what: older_than=, version=, device=, op_id= or where=")
    limit = None if older_than is None else datetime.now(UTC) - older_than
    removed: set[Key] = set()

    def drop(key: Key, raw: Raw) -> bool:
        fits = (
            (limit is None or _is_before(raw.get("when"), limit))
            and (version is None or raw.get("by") == f"ejkernel-ops {version}")
            and (device is None or key.device == device)
            and (op_id is None or key.op_id == op_id)
            and (where is None or where(key, raw))
        )
        removed.update((key,) if fits else ())
        return fits

    if not cache.fold(drop):
        raise StoreError(f"{cache.path} is being folded by another process; try again")
    return len(removed)


def _is_before(when: Any, limit: datetime) -> bool:
    try:
        moment = datetime.fromisoformat(str(when))
    # Written by hand, without a date: its age is unknown, so it stays.
    except ValueError:
        return False
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) < limit


@dataclass(frozen=True)
class Merged:
    """Counts of a merge, and the keys for which the two stores had different cfgs."""

    added: int
    replaced: int
    conflicts: tuple[Key, ...]


def merge(into: Store, other: Store, prefer: Prefer = "newest") -> Merged:
    """Brings the entries of one store into another; where both have a key and differ, the newer or the faster wins."""
    later = _preference(prefer)
    added = replaced = 0
    conflicts = []
    for key in map(Key._make, other.keys()):
        theirs, mine = other.lookup(key), into.lookup(key)
        if theirs is None:
            continue
        if mine is None:
            into.keep(key, _imported(theirs))
            added += 1
        elif not cfgs.same_kept(mine.cfg, theirs.cfg):
            conflicts.append(key)
            if later(theirs, mine):
                into.keep(key, _imported(theirs))
                replaced += 1
    return Merged(added, replaced, tuple(conflicts))


def _imported(entry: StoredEntry) -> StoredEntry:
    return entry if entry.source == "autotune" else replace(entry, source="imported")


def _preference(prefer: str) -> Callable[[StoredEntry, StoredEntry], bool]:
    if prefer == "newest":
        return lambda theirs, mine: theirs.when > mine.when
    if prefer == "fastest":
        return lambda theirs, mine: _seconds(theirs) < _seconds(mine)
    raise SettingError(f"prefer={prefer!r} is unknown; use 'newest' or 'fastest'")


def _seconds(entry: StoredEntry) -> float:
    seconds = entry.summary.get("seconds")
    return float(seconds) if isinstance(seconds, (int, float)) else float("inf")


def export_store(cache: PersistentCache[Any], path: str | os.PathLike[str]) -> int:
    """Writes a store's entries to one file that any store can read; returns their number."""
    target = PersistentCache[Any]("", path)
    if files.identity(target.path) is not None:
        raise StoreError(f"{target.path} exists; give the path of a new file")
    with cache.held() as log:
        log.list_entries()
        merged, _ = log.merge()
    files.make_folder(os.path.dirname(target.path))
    files.write(target.path, *merged.pieces(), durable=cache.durable)
    return len(merged.lines)


def import_store(cache: PersistentCache[Any], path: str | os.PathLike[str], prefer: Prefer = "newest") -> Merged:
    """Brings the entries of an exported file into a store."""
    if not os.path.isfile(path):
        raise StoreError(f"{os.fspath(path)} is not a file")
    source = PersistentCache[Any]("", path, cache.loader, cache.dumper, cache.cfg_type, on_fault="raise")
    return merge(cache, source, prefer)
