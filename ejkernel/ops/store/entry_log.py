"""Entries on disk: one immutable file for each put, and a snapshot that they are folded into now and then.

`path` is the snapshot, `path.d` the folder of the entry files. A put writes one file and takes no lock. A fold takes a
lock, or leaves the work to its holder, merges the entry files into a new snapshot, reads that back, and only then
moves them to `path.d/folded`, where they stay for some minutes: where locks do not lock, a slower fold may put an older
snapshot over the new one. So every put that returned is in the snapshot or in a file at any moment. A reader lists the
folders first and reads the snapshot second; if an entry file is gone by then, a fold has moved it, and the reader loads
the snapshot again. A put counts the puts of its key that its writer has seen: the highest count is the newest entry,
and the clock decides between equal counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ..core.errors import RecordFormatError
from ..core.key import Key
from ..core.plain_file import Timeout, lock_at
from . import files
from .snapshot import (
    LARGEST_SEQ,
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
# Up to this size the old snapshot stays in memory until the new one was read.
_HELD_TWICE = 1 << 24
# Another process may fold between two looks; more often than this in a row something else is wrong.
_TRIES = 8
# An entry file that was folded stays so long; where so many newer ones are there only for the shorter time, and for
# some times as long as a fold takes.
_FOLDED_SECONDS = 300
_FOLDED_COUNT, _LEAST_FOLDED_SECONDS = 256, 3
_FOLD_TIMES = 4
# A fold that took longer may have been stopped meanwhile: what it read is old, and it begins again.
_LONGEST_FOLD_SECONDS = _FOLDED_SECONDS / 2

# An entry file that was read: its name, its spelled key and what it held.
_Folded = tuple[str, str, Raw]

ENTRY_NAME = re.compile(r"([0-9a-f]{24})\.(\d{1,18})\.([0-9a-f]{16})\.json")
# The same once it was folded: with the second of that before it.
# A snapshot that a fold wrote, by inode, time and size: one that was edited has no such file.
_MARK_NAME = re.compile(r"by\.(\d+)\.(\d+)\.(\d+)")
FOLDED_NAME = re.compile(r"folded/(\d{1,12})\.(([0-9a-f]{24})\.(\d{1,18})\.([0-9a-f]{16})\.json)")


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
    # Entry files that were folded, with the folder before their names; and those known to be in the snapshot.
    _folded: dict[str, list[str]] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)
    # What entry files hold that were folded and read: they never change.
    _known: dict[str, tuple[str, StoredText]] = field(default_factory=dict)
    # The marks of snapshots that were written by folds.
    _marks: list[str] = field(default_factory=list)
    # Is every line of the snapshot known to fit its checksum? The digest that the next one's mark holds then.
    _is_sound: bool = True
    _digest: str = ""
    # Entry files that were folded before a hand edited the snapshot.
    _retired: list[str] = field(default_factory=list)
    _snapshot: Snapshot = field(default_factory=Snapshot)
    _snapshot_id: tuple[int, ...] | None = None
    _snapshot_owner: int = -1
    # The counter's device, inode and length at the last look; False: there was none.
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
        """Are there entry files that are not folded yet, as of the last look?"""
        return bool(self._pending)

    def unchanged(self) -> bool:
        """Has no process put or folded anything since the last look?"""
        return (files.length(self.counter) or False) == self._count

    def is_edited(self) -> bool:
        """Is the snapshot another file than the one that was read? An editor does not move the counter."""
        return files.identity(self.path) != self._snapshot_id

    def note_sound(self, identity: tuple[int, ...] | None) -> None:
        """Notes that every line of a snapshot was checked, if it is the one that was read."""
        self._is_sound = self._is_sound or identity == self._snapshot_id

    def be_another_writer(self) -> None:
        """In the child of a fork: two processes are two writers, and a look may have been cut short."""
        self.writer = secrets.token_hex(8)
        self._count = None

    def look(self) -> None:
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
        self.looks += 1

    def _is_by_a_fold(self) -> bool:
        if self._snapshot_id is None:
            return False
        mark = _mark(self._snapshot_id)
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
                elif _MARK_NAME.fullmatch(name):
                    self._marks.append(name)
        for chain in (*self._pending.values(), *self._folded.values()):
            chain.sort(key=_sequence, reverse=True)
        there = {_plain_name(name) for chain in self._folded.values() for name in chain}
        self._known = {name: entry for name, entry in self._known.items() if name in there}

    def _load(self, *, thoroughly: bool = False) -> None:
        if self._snapshot_id is not None and self._snapshot_id[3] > _HELD_TWICE:
            # The old file goes out of memory before the new one comes in; if that fails, the next use must look again.
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
        code = key_hash(name)
        # Two writers that had seen the same entries count alike: then the clock decides, so both are read.
        for file_name in sorted(
            (*self._pending.get(code, ()), *self._folded.get(code, ())), key=_sequence, reverse=True
        ):
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
        # After a fold one put may lie in both: then the line counts, which may have been edited.
        if raw is not None and (best is None or order(raw) >= order(best.raw)):
            best = StoredText(raw, self._owner(raw))
        held = 0 if best is None else order(best.raw)[0]
        return best if held >= gone else _Gone()

    def _owner(self, raw: Raw) -> int:
        # The owner that a line names is believed only where this user wrote the snapshot.
        owner = raw.get("owner") if self._snapshot_owner == os.getuid() else None
        return owner if isinstance(owner, int) else self._snapshot_owner

    def is_site_of(self, owner: int) -> bool:
        """Is this a store that one other user keeps, such as a site's: are its folders that user's to write alone?"""
        if owner < 0:
            return False
        for folder in (os.path.dirname(self.path), self.folder):
            try:
                found = os.stat(folder)
            except FileNotFoundError:
                continue
            except OSError:
                return False
            if found.st_uid not in (owner, 0) or found.st_mode & 0o022:
                return False
        return True

    def _entry(self, file_name: str) -> tuple[str, StoredText] | _Gone | None:
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
            return _Gone()
        parsed = entry_in(file_name, content.data)
        if parsed is None:
            self._condemn(file_name)
            return None
        return parsed[0], StoredText(parsed[1], self._author(path, content))

    def _condemn(self, file_name: str) -> None:
        path = os.path.join(self.folder, file_name)
        chains = self._folded if _is_folded(file_name) else self._pending
        chains[_plain_name(file_name)[:24]].remove(file_name)
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
                gone = gone or isinstance(entry, _Gone)
                if isinstance(entry, tuple):
                    found.add(entry[0])
                    break
        if gone:
            self._refresh()
        keys = [read_key(name) for name in self._snapshot.lines]
        keys += [read_key(name) for name in found if name not in self._snapshot.lines]
        keys.sort()
        return keys

    def entries(self) -> Iterator[tuple[Key, Raw]]:
        """Every key with its newest entry, as of the last look."""
        merged, _ = self.merge()
        yield from ((read_key(name), raw) for name, raw in merged.entries())

    def next_seq(self, key: Key) -> int:
        """The count for the next put of a key: one more than that of any put that was seen."""
        name = spell(key)
        raw = self._snapshot.find(name)
        code = key_hash(name)
        seen = [_sequence(n) for n in (*self._pending.get(code, ()), *self._folded.get(code, ()))]
        return max([0 if raw is None else order(raw)[0], *seen]) + 1

    def add(self, key: Key, raw: Raw) -> Raw:
        """Writes an entry; when this returns it is on disk."""
        # A file that was edited or checked out meanwhile does not move the counter; what it holds has been seen too.
        if self.is_edited():
            self.look()
        if self.newer:
            raise RecordFormatError(self.newer)
        seq = self.next_seq(key)
        if seq > LARGEST_SEQ:
            seq = self._make_room(key)
        name = spell(key)
        sealed = seal(name, {**raw, "seq": seq, "writer": self.writer})
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

    def _make_room(self, key: Key) -> int:
        """Sets aside what claims so many puts of a key that none could be counted after it; returns the next count."""
        name = spell(key)
        code = key_hash(name)
        for file_name in (*self._pending.get(code, ()), *self._folded.get(code, ())):
            if _sequence(file_name) >= LARGEST_SEQ:
                self._condemn(file_name)
        raw = self._snapshot.find(name)
        if raw is not None and order(raw)[0] >= LARGEST_SEQ:
            self.report(f"the entry of {key} in {self.path} claims {LARGEST_SEQ:,} puts, and is removed by this one")
            self.fold(lambda other, entry: other == key and order(entry)[0] >= LARGEST_SEQ)
        seq = self.next_seq(key)
        if seq > LARGEST_SEQ:
            raise OSError(f"an entry of {key} claims {LARGEST_SEQ:,} puts and cannot be set aside; remove it")
        return seq

    def holds(self, key: Key, sealed: Raw) -> bool:
        """Would a reader that looks now get this entry, or a later one?"""
        name = spell(key)
        if os.path.lexists(os.path.join(self.folder, f"{key_hash(name)}.{sealed['seq']}.{self.writer}.json")):
            return True
        found = self._find(name)
        if not isinstance(found, StoredText) or order(found.raw) < order(sealed):
            self.look()
            found = self._find(name)
        return isinstance(found, StoredText) and order(found.raw) >= order(sealed)

    def _tell(self) -> None:
        """Moves the counter, so that every other process sees that something changed."""
        count, added = files.append_byte(self.counter)
        before = self._count
        # If this was the only change since the last look, this process need not look.
        is_first = before is False and count[2] == added
        if is_first or (isinstance(before, tuple) and count == (*before[:2], before[2] + added)):
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
                with lock_at(os.path.join(self.folder, "fold.lock"), timeout=0):
                    seen = self._fold(drop)
            except Timeout:
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
        began = time.monotonic()
        self.look()
        if self.newer:
            raise RecordFormatError(self.newer)
        if self._snapshot.damage == "kept in place":
            # There may be room for a copy by now.
            self._load()
            if self._snapshot.damage == "kept in place":
                raise OSError(f"{self.path} is damaged and cannot be copied aside")
        seen = {name for chain in self._pending.values() for name in chain}
        merged, folded = self.merge()
        dropped = self._drop(merged, drop) if drop is not None else set()
        if not folded and not dropped and not self._snapshot.damage:
            return seen
        if self.is_edited() or time.monotonic() - began > _LONGEST_FOLD_SECONDS:
            # It was edited this very moment: leave everything as it is, the next fold sees both.
            return None
        for left in self._retired:
            files.remove(os.path.join(self.folder, left))
        pieces = merged.pieces()
        # Every line of it was checked when it was put, and the others are those of a file that was sound.
        self._digest = digest_of(pieces) if self._is_sound else ""
        files.write(self.path, *pieces, durable=self.durable, announce=self._announce)
        ours = files.same(self.path, pieces)
        # The old file goes out of memory before the new one comes in.
        del merged, pieces
        self._snapshot, self._snapshot_id = Snapshot(), None
        content = files.read(self.path)
        if content is not None:
            there = read(content.data)
            if content.identity == ours:
                # Its lines were checked when they were read: they need not be read again.
                self._snapshot, self._snapshot_id, self._snapshot_owner = there, content.identity, content.author
                self._forget_folded(time.monotonic() - began)
            self._retire(there, folded, dropped)
            # On a disk without locks another process may have put an older snapshot over ours: the entries go back.
            if files.identity(self.path) != content.identity:
                self._put_back([entry for entry in folded if entry[1] not in dropped])
        self._sweep()
        return seen

    def merge(self) -> tuple[Snapshot, list[_Folded]]:
        """The snapshot with the entry files in it, as of the last look, and the entries with their files."""
        mine = os.getuid()
        entries = [(name, self._entry(name)) for chain in list(self._pending.values()) for name in list(chain)]
        entries += [latest for chain in list(self._folded.values()) for latest in self._latest(chain)]
        if any(isinstance(entry, _Gone) for _, entry in entries):
            self._refresh()
        merged = self._snapshot.copy()
        if self._snapshot_owner not in (-1, mine):
            for name, raw in self._snapshot.entries():
                merged.lines[name] = line(name, owned(name, raw, self._snapshot_owner))
        folded: list[_Folded] = []
        for file_name, entry in entries:
            if not isinstance(entry, tuple):
                continue
            name, found = entry
            raw = found.raw if found.owner == mine else owned(name, found.raw, found.owner)
            old = merged.find(name)
            is_newer = old is None or order(raw) > order(old)
            if is_newer:
                merged.lines[name] = line(name, raw)
            if is_newer or not _is_folded(file_name):
                folded.append((file_name, name, found.raw))
            else:
                # The snapshot has it, and with it the earlier ones of its key: nothing has to be written for them.
                self._held.update(self._folded[key_hash(name)])
            self._known[_plain_name(file_name)] = entry
        return merged, folded

    def _latest(self, chain: list[str]) -> Iterator[tuple[str, tuple[str, StoredText] | _Gone | None]]:
        """The latest of a key's entries that were folded, unless the snapshot is known to have them."""
        top = -1
        for file_name in list(chain):
            if _sequence(file_name) < top or file_name in self._held:
                return
            found = self._known.get(_plain_name(file_name)) or self._entry(file_name)
            if isinstance(found, tuple):
                top = _sequence(file_name)
            yield file_name, found

    def _drop(self, merged: Snapshot, drop: Callable[[Key, Raw], bool]) -> set[str]:
        whole = 0
        dropped = set()
        for name, raw in merged.entries(are_checked=self._is_sound):
            whole += 1
            if drop(read_key(name), raw):
                dropped.add(name)
        # Now every line was checked: the next one need not do it again.
        self._is_sound = self._is_sound or whole == len(merged.lines)
        for name in dropped:
            del merged.lines[name]
        return dropped

    def _retire(self, there: Snapshot, folded: list[_Folded], dropped: set[str]) -> None:
        """Moves an entry file away once the snapshot, read back from disk, holds its entry or a newer one."""
        for code in map(key_hash, dropped):
            for file_name in (*self._pending.get(code, ()), *self._folded.get(code, ())):
                files.remove(os.path.join(self.folder, file_name))
        now = int(time.time())
        for file_name, name, raw in folded:
            held = there.find(name)
            if name not in dropped and held is not None and order(held) >= order(raw) and not _is_folded(file_name):
                self._to_folded(file_name, f"folded/{now}.{file_name}")

    def _announce(self, identity: tuple[int, ...]) -> None:
        path = os.path.join(self.folder, "folded", _mark(identity))
        try:
            files.note(path, self._digest)
        except FileNotFoundError:
            files.make_folder(os.path.join(self.folder, "folded"), durable=self.durable)
            files.note(path, self._digest)

    def _forget_folded(self, took: float) -> None:
        """Removes entry files that were folded some time ago, where the snapshot that lies there now has them."""
        held = [name for chain in self._folded.values() for name in chain if name in self._held]
        for file_name in (*_past(held, _second, took), *_past(self._marks, _second_of_mark, took)):
            name = file_name if _is_folded(file_name) else f"folded/{file_name}"
            files.remove(os.path.join(self.folder, name))

    def _to_folded(self, file_name: str, to: str) -> None:
        path = os.path.join(self.folder, file_name)
        try:
            files.move(path, os.path.join(self.folder, to))
        except FileNotFoundError:
            files.make_folder(os.path.join(self.folder, "folded"), durable=self.durable)
            files.move(path, os.path.join(self.folder, to))

    def _put_back(self, folded: list[_Folded]) -> None:
        content = files.read(self.path)
        there = Snapshot() if content is None else read(content.data)
        for file_name, name, raw in folded:
            held = there.find(name)
            if held is None or order(held) < order(raw):
                path = os.path.join(self.folder, _plain_name(file_name))
                files.write(path, line(name, raw).encode(), durable=self.durable)

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
    return int(file_name.split(".")[-3])


def _second(file_name: str) -> int:
    return int(file_name.removeprefix("folded/").split(".")[0])


def _mark(identity: tuple[int, ...]) -> str:
    # Without the device, which has other numbers on other machines.
    return ".".join(("by", *map(str, identity[1:])))


def _second_of_mark(name: str) -> int:
    return int(name.split(".")[2]) // 10**9


def _past(names: list[str], second: Callable[[str], int], took: float) -> Iterator[str]:
    """Those that have been there for long enough."""
    now, least = int(time.time()), max(_LEAST_FOLDED_SECONDS, _FOLD_TIMES * took)
    for place, name in enumerate(sorted(names, key=second, reverse=True)):
        # Where clocks differ one may be of the future.
        if not -_FOLDED_SECONDS <= now - second(name) <= (least if place >= _FOLDED_COUNT else _FOLDED_SECONDS):
            yield name


def _is_folded(file_name: str) -> bool:
    return file_name.startswith("folded/")


def _plain_name(file_name: str) -> str:
    """The name that an entry file had before it was folded."""
    return file_name.split(".", 1)[1] if _is_folded(file_name) else file_name


def digest_of(pieces: Iterable[bytes | memoryview]) -> str:
    """The digest of a whole snapshot, in the mark of the fold that wrote it."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def is_as_folded(path: str, identity: tuple[int, ...], pieces: Iterable[bytes]) -> bool:
    """Is this snapshot, byte for byte, one that a fold of this user wrote with every line checked?"""
    try:
        mark = files.read(os.path.join(f"{path}.d", "folded", _mark(identity)), 1024)
    except OSError:
        return False
    known = mark is not None and mark.data and mark.author in (os.getuid(), 0)
    return bool(known) and mark is not None and mark.data.decode("latin-1") == digest_of(pieces)


def entry_names(path: str) -> list[str]:
    """The entry files beside a snapshot; those that were folded lately too, unless a hand has edited it since."""
    names = files.names(f"{path}.d")
    lately = files.names(os.path.join(f"{path}.d", "folded")) if "folded" in names else []
    there = files.identity(path)
    lately = lately if there is not None and _mark(there) in lately else []
    return [name for name in names if ENTRY_NAME.fullmatch(name)] + [
        f"folded/{name}" for name in lately if FOLDED_NAME.fullmatch(f"folded/{name}")
    ]


def entry_in(file_name: str, data: bytes) -> tuple[str, Raw] | None:
    """The spelled key and the entry in an entry file; None where it is damaged, or is not what its name says."""
    parsed = parse(data.decode("utf-8", "replace"))
    if parsed is None or not is_whole(*parsed):
        return None
    name, raw = parsed
    code, seq, writer, _ = file_name.split(".")[-4:]
    told = f"{key_hash(name)}.{raw.get('seq')}.{raw.get('writer')}"
    return parsed if told == f"{os.path.basename(code)}.{seq}.{writer}" else None
