"""The files of a store as a reader sees them: the snapshot, and the entry files that are newer.

A reader lists the folders first and reads the snapshot second; if an entry file is gone by then, a fold has moved it,
and the reader loads the snapshot again. No JAX here.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.key import Key
from . import files
from .entry_files import (
    ENTRY_NAME,
    FOLDED_NAME,
    MARK_NAME,
    Removed,
    StoredText,
    entry_in,
    is_as_folded,
    is_folded,
    mark_of,
    plain_name,
    sequence_of,
)
from .snapshot import Raw, Snapshot, key_hash, order, read, read_key, read_thoroughly, spell

# Up to this size every line of the snapshot is checked, and each put brings it up to date.
SMALL = 64 * 1024
# Up to this size the old snapshot stays in memory until the new one was read.
_HELD_TWICE = 1 << 24
# Another process may fold between two listings; more often than this in a row something else is wrong.
TRIES = 8


@dataclass
class EntryReader:
    """The files behind one store, as of the last read."""

    path: str
    durable: bool = False
    # Called with a message about a damaged file.
    report: Callable[[str], None] = lambda message: None
    writer: str = field(default_factory=lambda: secrets.token_hex(8))
    # Counts the listings that worked: an entry that was read before the last one may be old.
    listings: int = 0
    _pending: dict[str, list[str]] = field(default_factory=dict)
    # Entry files that were folded, with the folder before their names; and those known to be in the snapshot.
    _folded: dict[str, list[str]] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)
    # What entry files hold that were folded and read: they never change.
    _known: dict[str, tuple[str, StoredText]] = field(default_factory=dict)
    # The marks of snapshots that were written by folds.
    _marks: list[str] = field(default_factory=list)
    # Is every line of the snapshot known to fit its checksum?
    _is_sound: bool = True
    # Entry files that were folded before a hand edited the snapshot.
    _retired: list[str] = field(default_factory=list)
    _snapshot: Snapshot = field(default_factory=Snapshot)
    _snapshot_id: tuple[int, ...] | None = None
    _snapshot_owner: int = -1
    # The counter's device, inode and length at the last read; False: there was none.
    _count: tuple[int, int, int] | bool | None = None

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
        """Are there entry files that are not folded yet, as of the last read?"""
        return bool(self._pending)

    def unchanged(self) -> bool:
        """Has no process put or folded anything since the last read?"""
        return (files.length(self.counter) or False) == self._count

    def is_edited(self) -> bool:
        """Is the snapshot another file than the one that was read? An editor does not move the counter."""
        return files.identity(self.path) != self._snapshot_id

    def note_sound(self, identity: tuple[int, ...] | None) -> None:
        """Notes that every line of a snapshot was checked, if it is the one that was read."""
        self._is_sound = self._is_sound or identity == self._snapshot_id

    def be_another_writer(self) -> None:
        """Makes this reader another writer, in the child of a fork; a read may have been cut short there."""
        self.writer = secrets.token_hex(8)
        self._count = None

    def list_entries(self) -> None:
        """Lists the entry files, and reads the snapshot if it is another one."""
        count = files.length(self.counter) or False
        # The folders before the snapshot: an entry that a fold takes from the folder is in the snapshot by then.
        self._index(files.names(self.folder))
        self._refresh()
        # Where a hand has taken a line away, what was folded must not bring it back.
        self._retired = []
        if self._folded and not self._is_by_a_fold():
            self._retired = [name for chain in self._folded.values() for name in chain]
            self._folded = {}
        self._count = count
        self.listings += 1

    def _is_by_a_fold(self) -> bool:
        if self._snapshot_id is None:
            return False
        mark = mark_of(self._snapshot_id)
        # The folder was listed before the snapshot was read: the mark of a fold between the two is not in the list.
        return mark in self._marks or files.identity(os.path.join(self.folder, "folded", mark)) is not None

    def _refresh(self) -> None:
        if files.identity(self.path) != self._snapshot_id or self._snapshot_id is None:
            self._load()

    def _index(self, names: list[str]) -> None:
        self._pending, self._folded, self._marks = {}, {}, []
        for name in names:
            match = ENTRY_NAME.fullmatch(name)
            if match:
                self._pending.setdefault(match[1], []).append(name)
        if "folded" in names:
            for name in files.names(os.path.join(self.folder, "folded")):
                match = FOLDED_NAME.fullmatch(f"folded/{name}")
                if match:
                    self._folded.setdefault(match[3], []).append(match[0])
                elif MARK_NAME.fullmatch(name):
                    self._marks.append(name)
        for chain in (*self._pending.values(), *self._folded.values()):
            chain.sort(key=sequence_of, reverse=True)
        there = {plain_name(name) for chain in self._folded.values() for name in chain}
        self._known = {name: entry for name, entry in self._known.items() if name in there}

    def _load(self, *, thoroughly: bool = False) -> None:
        if self._snapshot_id is not None and self._snapshot_id[3] > _HELD_TWICE:
            # The old file goes out of memory before the new one comes in; if that fails, the next use must read again.
            self._snapshot, self._snapshot_id, self._count = Snapshot(), None, None
        content = files.read(self.path)
        self._held = set()
        self._is_sound = True
        if content is None:
            self._snapshot, self._snapshot_id, self._snapshot_owner = Snapshot(), None, -1
            return
        # A line of a large file is checked when it is asked for; all of them are once one was found damaged.
        thoroughly = thoroughly or len(content.data) <= SMALL
        loaded = read_thoroughly(content.data) if thoroughly else read(content.data)
        self._snapshot, self._snapshot_id = loaded, content.identity
        # A store begins small, where every line is checked; from then on folds hand it on.
        self._is_sound = not loaded.damage and (thoroughly or is_as_folded(self.path, content.identity, [content.data]))
        self._snapshot_owner = self._author(self.path, content)
        if loaded.damage:
            self._set_aside(content.data, loaded)

    def _author(self, path: str, content: files.Content) -> int:
        """The user that wrote a file: one of this user's that its group may write is taken once, and closed."""
        if content.is_left_open:
            files.close_to_group(path)
            self.report(
                f"{path} could be written by its group, as a umask of 002 leaves it: it is taken this once, and only "
                f"this user may write it now; `ejkernel cache compact --store {self.path}` does so for the whole store"
            )
            return content.owner
        return content.author

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

    @property
    def _is_small(self) -> bool:
        return (self._snapshot_id[3] if self._snapshot_id else 0) <= SMALL

    def find(self, key: Key) -> StoredText | None:
        """The newest entry of a key, as of the last read."""
        name = spell(key)
        for _ in range(TRIES):
            found = self._find(name)
            if not isinstance(found, Removed):
                return found
            self.list_entries()
        raise OSError(f"entries of {self.path} vanish faster than they can be read")

    def _find(self, name: str) -> StoredText | Removed | None:
        best: StoredText | None = None
        gone = 0
        code = key_hash(name)
        # Two writers that had seen the same entries count alike: then the clock decides, so both are read.
        for file_name in sorted(
            (*self._pending.get(code, ()), *self._folded.get(code, ())), key=sequence_of, reverse=True
        ):
            if best is not None and sequence_of(file_name) < order(best.raw)[0]:
                break
            entry = self._entry(file_name)
            if isinstance(entry, Removed):
                gone = max(gone, sequence_of(file_name))
            elif entry is not None and (best is None or order(entry[1].raw) > order(best.raw)):
                best = entry[1]
        # A folded entry is in the snapshot by now. The folder is not listed again: others may change it for ever.
        if gone:
            self._refresh()
        raw = self._snapshot.find(name)
        if raw is None and name in self._snapshot.lines:
            self._load(thoroughly=True)
            raw = self._snapshot.find(name)
        # After a fold one put may lie in both: then the line counts, which may have been edited.
        if raw is not None and (best is None or order(raw) >= order(best.raw)):
            best = StoredText(raw, self._owner(raw))
        held = 0 if best is None else order(best.raw)[0]
        return best if held >= gone else Removed()

    def _owner(self, raw: Raw) -> int:
        # The owner that a line names is believed only where this user wrote the snapshot.
        owner = raw.get("owner") if self._snapshot_owner == os.getuid() else None
        return owner if isinstance(owner, int) else self._snapshot_owner

    def _entry(self, file_name: str) -> tuple[str, StoredText] | Removed | None:
        """Reads an entry file with its spelled key; None where it is damaged, or this user may not read it."""
        path = os.path.join(self.folder, file_name)
        try:
            content = files.read(path, files.LARGEST_ENTRY)
        except PermissionError as error:
            self.report(f"{path} is another user's and cannot be read ({error.strerror}); it is passed over")
            return None
        # No writer makes a link, a pipe or a file of that size, so this one was planted: it is set aside unread.
        except (files.NotPlainError, files.TooLargeError):
            self._condemn(file_name)
            return None
        if content is None:
            return Removed()
        parsed = entry_in(file_name, content.data)
        if parsed is None:
            self._condemn(file_name)
            return None
        return parsed[0], StoredText(parsed[1], self._author(path, content))

    def _condemn(self, file_name: str) -> None:
        path = os.path.join(self.folder, file_name)
        chains = self._folded if is_folded(file_name) else self._pending
        chains[plain_name(file_name)[:24]].remove(file_name)
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
        for chain in (*self._pending.values(), *self._folded.values()):
            for file_name in list(chain):
                if file_name in self._held:
                    continue
                entry = self._entry(file_name)
                gone = gone or isinstance(entry, Removed)
                if isinstance(entry, tuple):
                    found.add(entry[0])
                    break
        if gone:
            self._refresh()
        keys = [read_key(name) for name in self._snapshot.lines]
        keys += [read_key(name) for name in found if name not in self._snapshot.lines]
        keys.sort()
        return keys
