"""Entries on disk: one immutable file for each put, and a snapshot that they are folded into now and then.

`path` is the snapshot, `path.d` the folder of the entry files. A put writes one file and takes no lock. A fold takes a
lock, or leaves the work to its holder, merges the entry files into a new snapshot, reads that back, and only then
removes them. So every put that returned is in the snapshot or in the folder at any moment. A reader lists the folder
first and reads the snapshot second; if an entry file is gone by then, a fold has moved it, and the reader loads the
snapshot again. A put counts the puts of its key that its writer has seen: the highest count is the newest entry, and
the clock decides between equal counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import filelock

from ..core.errors import RecordFormatError
from ..core.key import Key
from . import files
from .snapshot import (
    Raw,
    Snapshot,
    is_whole,
    key_hash,
    line,
    order,
    owned,
    parse,
    read,
    read_key,
    read_thoroughly,
    seal,
    spell,
)

# Up to this size the snapshot is brought up to date by every put.
SMALL = 64 * 1024
# Beyond it entry files may gather: so many, or this share of the snapshot's entries, whichever is more.
_PENDING = 512
_PENDING_SHARE = 1 / 64
# A temporary file that is older was left by a process that died.
_STALE_SECONDS = 3600.0
# Another process may fold between two looks; more often than this in a row something else is wrong.
_TRIES = 8

# An entry file that was read: its name, its spelled key and what it held.
_Folded = tuple[str, str, Raw]

ENTRY_NAME = re.compile(r"([0-9a-f]{24})\.(\d{1,18})\.([0-9a-f]{16})\.json")


@dataclass(frozen=True)
class StoredText:
    """An entry as it lies on disk, and the user that owns its file."""

    raw: Raw
    owner: int


@dataclass
class EntryLog:
    """The files behind one store."""

    path: str
    durable: bool = False
    # Called with a message about a damaged file.
    report: Callable[[str], None] = lambda message: None
    writer: str = field(default_factory=lambda: secrets.token_hex(8))
    # Counts the looks that worked: an entry that was read before the last one may be old.
    looks: int = 0
    _pending: dict[str, list[str]] = field(default_factory=dict)
    _snapshot: Snapshot = field(default_factory=Snapshot)
    _snapshot_id: tuple[int, ...] | None = None
    _snapshot_owner: int = -1
    _count: int | None = None

    def __post_init__(self) -> None:
        """Names the folder and what lies in it."""
        self.folder = self.path + ".d"
        self.counter = os.path.join(self.folder, "changes")

    @property
    def newer(self) -> str:
        """Reason why this version must not write here: a newer one wrote the snapshot; else empty."""
        return self._snapshot.newer

    @property
    def has_pending(self) -> bool:
        """Are there entry files that are not folded yet, as of the last look?"""
        return bool(self._pending)

    def unchanged(self) -> bool:
        """Has no process put or folded anything since the last look?"""
        return files.size(self.counter) == self._count

    def is_edited(self) -> bool:
        """Is the snapshot another file than the one that was read? An editor does not move the counter."""
        return files.identity(self.path) != self._snapshot_id

    def be_another_writer(self) -> None:
        """In the child of a fork: two processes are two writers, and a look may have been cut short."""
        self.writer = secrets.token_hex(8)
        self._count = None

    def look(self) -> None:
        """Lists the entry files, and reads the snapshot if it is another one."""
        count = files.size(self.counter)
        # The folder before the snapshot: an entry that a fold takes from the folder is in the snapshot by then.
        self._index(files.names(self.folder))
        self._refresh()
        self._count = count
        self.looks += 1

    def _refresh(self) -> None:
        if files.identity(self.path) != self._snapshot_id or self._snapshot_id is None:
            self._load()

    def _index(self, names: list[str]) -> None:
        self._pending = {}
        for name in names:
            match = ENTRY_NAME.fullmatch(name)
            if match:
                self._pending.setdefault(match[1], []).append(name)
        for chain in self._pending.values():
            chain.sort(key=_sequence, reverse=True)

    def _load(self, *, thoroughly: bool = False) -> None:
        content = files.read(self.path)
        if content is None:
            self._snapshot, self._snapshot_id, self._snapshot_owner = Snapshot(), None, -1
            return
        # A line of a large file is checked when it is asked for; all of them are once one was found damaged.
        thoroughly = thoroughly or len(content.data) <= SMALL
        loaded = read_thoroughly(content.data) if thoroughly else read(content.data)
        self._snapshot, self._snapshot_id, self._snapshot_owner = loaded, content.identity, content.owner
        if loaded.damage:
            self._set_aside(content.data, loaded)

    def _set_aside(self, data: bytes, loaded: Snapshot) -> None:
        aside = f"{self.path}.damaged-{key_hash(data.decode('latin-1'))[:8]}"
        kept = f"{self.path} is damaged ({loaded.damage}); {len(loaded.lines)} entries of it were kept"
        try:
            if files.identity(aside) is None:
                files.write(aside, data, durable=self.durable)
        except OSError as error:
            # Then nothing may replace the damaged file, or its entries would be lost.
            self._snapshot.damage = "kept in place"
            self.report(f"{kept}, and it stays where it is, since no copy can be made ({error.strerror})")
            return
        self.report(f"{kept}, and the file as it was is in {aside}")

    def find(self, key: Key) -> StoredText | None:
        """The newest entry of a key, as of the last look."""
        name = spell(key)
        for _ in range(_TRIES):
            found = self._find(name)
            if not isinstance(found, _Gone):
                return found
            self.look()
        raise OSError(f"entries of {self.path} vanish faster than they can be read")

    def _find(self, name: str) -> StoredText | _Gone | None:
        best: StoredText | None = None
        gone = 0
        for file_name in list(self._pending.get(key_hash(name), ())):
            # Two writers that had seen the same entries count alike: then the clock decides, so both are read.
            if best is not None and _sequence(file_name) < order(best.raw)[0]:
                break
            entry = self._entry(file_name)
            if isinstance(entry, _Gone):
                gone = max(gone, _sequence(file_name))
            elif entry is not None and (best is None or order(entry[1].raw) > order(best.raw)):
                best = entry[1]
        # A folded entry is in the snapshot by now. The folder is not listed again: others may change it for ever.
        if gone:
            self._refresh()
        raw = self._snapshot.find(name)
        if raw is None and name in self._snapshot.lines:
            self._load(thoroughly=True)
            raw = self._snapshot.find(name)
        # After a fold that was cut short one put may lie in both: then the line counts, which may have been edited.
        if raw is not None and (best is None or order(raw) >= order(best.raw)):
            best = StoredText(raw, self._owner(raw))
        held = 0 if best is None else order(best.raw)[0]
        return best if held >= gone else _Gone()

    def _owner(self, raw: Raw) -> int:
        # The owner that a line names is believed only where this user wrote the snapshot.
        owner = raw.get("owner") if self._snapshot_owner == os.getuid() else None
        return owner if isinstance(owner, int) else self._snapshot_owner

    def _entry(self, file_name: str) -> tuple[str, StoredText] | _Gone | None:
        """Reads an entry file with its spelled key; None where it is damaged, or this user may not read it."""
        path = os.path.join(self.folder, file_name)
        try:
            content = files.read(path, files.LARGEST_ENTRY)
        except PermissionError as error:
            self.report(f"{path} is another user's and cannot be read ({error.strerror}); it is passed over")
            return None
        # No writer makes a link or a device, so this one was planted: it is set aside and not followed.
        except files.NotPlainError:
            self._condemn(file_name)
            return None
        if content is None:
            return _Gone()
        parsed = parse(content.data.decode("utf-8", "replace"))
        if parsed is None or not is_whole(*parsed) or key_hash(parsed[0]) != file_name[:24]:
            self._condemn(file_name)
            return None
        return parsed[0], StoredText(parsed[1], content.owner)

    def _condemn(self, file_name: str) -> None:
        path = os.path.join(self.folder, file_name)
        self._pending[file_name[:24]].remove(file_name)
        try:
            files.move(path, path + ".damaged")
        # A folder that this user may only read.
        except OSError as error:
            self.report(f"{path} is damaged, and stays where it is ({error.strerror}); every other entry is kept")
            return
        self.report(f"{path} is damaged; it is set aside as {file_name}.damaged, every other entry is kept")

    def keys(self) -> list[Key]:
        """Every key, sorted."""
        found: set[str] = set()
        gone = False
        for chain in list(self._pending.values()):
            for file_name in list(chain):
                entry = self._entry(file_name)
                gone = gone or isinstance(entry, _Gone)
                if isinstance(entry, tuple):
                    found.add(entry[0])
                    break
        if gone:
            self._refresh()
        return sorted(read_key(name) for name in found.union(self._snapshot.lines))

    def next_seq(self, key: Key) -> int:
        """The count for the next put of a key: one more than that of any put that was seen."""
        name = spell(key)
        raw = self._snapshot.find(name)
        seen = [_sequence(n) for n in self._pending.get(key_hash(name), ())]
        return max([0 if raw is None else order(raw)[0], *seen]) + 1

    def add(self, key: Key, raw: Raw) -> Raw:
        """Writes an entry; when this returns it is on disk."""
        # A file that was edited or checked out meanwhile does not move the counter; what it holds has been seen too.
        if self.is_edited():
            self.look()
        if self.newer:
            raise RecordFormatError(self.newer)
        name = spell(key)
        sealed = seal(name, {**raw, "seq": self.next_seq(key), "writer": self.writer})
        file_name = f"{key_hash(name)}.{sealed['seq']}.{self.writer}.json"
        path = os.path.join(self.folder, file_name)
        try:
            files.write(path, line(name, sealed).encode(), durable=self.durable)
        except FileNotFoundError:
            files.make_folder(self.folder, durable=self.durable)
            files.write(path, line(name, sealed).encode(), durable=self.durable)
        try:
            self._tell()
        except OSError:
            # Other processes would not notice the file. The put is repeated, and its files must not pile up until then.
            with contextlib.suppress(OSError):
                files.remove(path)
            raise
        self._pending.setdefault(key_hash(name), []).insert(0, file_name)
        return sealed

    def _tell(self) -> None:
        """Moves the counter, so that every other process sees that something changed."""
        count = files.append_byte(self.counter)
        # If this was the only change since the last look, this process need not look.
        if self._count is not None and count in (self._count + 1, 1):
            self._count = count

    def record_path(self, key: Key, raw: Raw) -> str:
        """Path of an entry's full record: made from the key, never taken from a file."""
        seq, _, writer = order(raw)
        safe = key_hash(writer) if not re.fullmatch(r"[0-9a-f]{16}", writer) else writer
        return os.path.join(self.folder, "records", f"{key_hash(spell(key))}.{seq}.{safe}.json")

    @property
    def _is_small(self) -> bool:
        return (self._snapshot_id[3] if self._snapshot_id else 0) <= SMALL

    @property
    def wants_folding(self) -> bool:
        """Is the snapshot small, or are there enough entry files to pay for a new one?"""
        pending = sum(map(len, self._pending.values()))
        if not pending:
            return False
        return self._is_small or pending >= max(_PENDING, len(self._snapshot.lines) * _PENDING_SHARE)

    def fold(self, drop: Callable[[Key, Raw], bool] | None = None) -> bool:
        """Merges the entry files into the snapshot; False where another process is folding. `drop` prunes."""
        files.make_folder(self.folder, durable=self.durable)
        done = False
        for _ in range(_TRIES):
            try:
                lock = filelock.FileLock(os.path.join(self.folder, "fold.lock"), timeout=0)
                with lock:
                    seen = self._fold(drop)
            except filelock.Timeout:
                return done
            self._tell()
            self.look()
            if seen is None:
                continue
            done = True
            # A process that put an entry meanwhile found the lock taken and left the fold to us; a large file can wait.
            if not self._is_small or seen.issuperset(name for chain in self._pending.values() for name in chain):
                break
        return done

    def _fold(self, drop: Callable[[Key, Raw], bool] | None) -> set[str] | None:
        """Folds once; returns the entry files that it saw, or None where the snapshot was edited meanwhile."""
        self.look()
        if self.newer:
            raise RecordFormatError(self.newer)
        if self._snapshot.damage == "kept in place":
            raise OSError(f"{self.path} is damaged and cannot be copied aside")
        seen = {name for chain in self._pending.values() for name in chain}
        merged, folded = self.merge()
        dropped = self._drop(merged, drop) if drop is not None else set()
        if not folded and not dropped and not self._snapshot.damage:
            return seen
        if self.is_edited():
            # It was edited this very moment: leave everything as it is, the next fold sees both.
            return None
        files.write(self.path, merged.text().encode(), durable=self.durable)
        content = files.read(self.path)
        if content is not None:
            there = read(content.data)
            if there.lines == merged.lines:
                # Its lines were checked when they were read: they need not be read again.
                self._snapshot, self._snapshot_id, self._snapshot_owner = there, content.identity, content.owner
            self._remove_what_is_held(there, folded, dropped)
            # On a disk without locks another process may have put an older snapshot over ours: the entries go back.
            if files.identity(self.path) != content.identity:
                self._put_back([entry for entry in folded if entry[1] not in dropped])
        self._sweep()
        return seen

    def merge(self) -> tuple[Snapshot, list[_Folded]]:
        """The snapshot with the entry files in it, as of the last look, and the entries with their files."""
        mine = os.getuid()
        entries = [(name, self._entry(name)) for chain in list(self._pending.values()) for name in list(chain)]
        if any(isinstance(entry, _Gone) for _, entry in entries):
            self._refresh()
        merged = Snapshot(dict(self._snapshot.lines))
        if self._snapshot_owner not in (-1, mine):
            for name in merged.lines:
                raw = merged.find(name)
                if raw is not None:
                    merged.lines[name] = line(name, owned(name, raw, self._snapshot_owner))
        folded: list[_Folded] = []
        for file_name, entry in entries:
            if not isinstance(entry, tuple):
                continue
            name, found = entry
            raw = found.raw if found.owner == mine else owned(name, found.raw, found.owner)
            old = merged.find(name)
            if old is None or order(raw) > order(old):
                merged.lines[name] = line(name, raw)
            folded.append((file_name, name, found.raw))
        return merged, folded

    def _drop(self, merged: Snapshot, drop: Callable[[Key, Raw], bool]) -> set[str]:
        dropped = set()
        for name in list(merged.lines):
            raw = merged.find(name)
            if raw is not None and drop(read_key(name), raw):
                del merged.lines[name]
                dropped.add(name)
        return dropped

    def _remove_what_is_held(self, there: Snapshot, folded: list[_Folded], dropped: set[str]) -> None:
        """Removes an entry file once the snapshot, read back from disk, holds its entry or a newer one."""
        for file_name, name, raw in folded:
            held = there.find(name)
            if name in dropped or (held is not None and order(held) >= order(raw)):
                files.remove(os.path.join(self.folder, file_name))

    def _put_back(self, folded: list[_Folded]) -> None:
        content = files.read(self.path)
        there = Snapshot() if content is None else read(content.data)
        for file_name, name, raw in folded:
            held = there.find(name)
            if held is None or order(held) < order(raw):
                files.write(os.path.join(self.folder, file_name), line(name, raw).encode(), durable=self.durable)

    def _sweep(self) -> None:
        """Removes temporary files of processes that died long ago."""
        beside, name = os.path.split(self.path)
        for folder, start in ((self.folder, "."), (beside, f".{name}.")):
            for left in files.names(folder):
                if left.startswith(start) and left.endswith(".tmp"):
                    found = files.identity(os.path.join(folder, left))
                    if found and time.time() - found[2] / 1e9 > _STALE_SECONDS:
                        files.remove(os.path.join(folder, left))


class _Gone:
    """An entry file that a fold removed since the last look."""


def _sequence(file_name: str) -> int:
    return int(file_name.split(".")[1])
