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
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..core.errors import RecordFormatError
from ..core.key import Key
from ..core.plain_file import Timeout, lock_at
from . import files
from .entry_files import (
    FOLDED_SECONDS,
    Removed,
    StoredText,
    digest_of,
    folded_at,
    is_folded,
    mark_of,
    marked_at,
    past,
    plain_name,
    sequence_of,
)
from .entry_reader import TRIES, EntryReader
from .snapshot import LARGEST_SEQ, Raw, Snapshot, key_hash, line, order, owned, read, read_key, seal, spell

# Beyond a small snapshot entry files may gather: so many, or this share of its entries, whichever is more.
_PENDING = 512
_PENDING_SHARE = 1 / 64
# A fold that took longer may have been stopped meanwhile: what it read is old, and it begins again.
_LONGEST_FOLD_SECONDS = FOLDED_SECONDS / 2

# An entry file that was read: its name, its spelled key and what it held.
_Folded = tuple[str, str, Raw]


@dataclass
class EntryLog(EntryReader):
    """The files behind one store, and how they change: a put adds an entry file, a fold makes a new snapshot."""

    # The digest that the next snapshot's mark holds, where every line of it was checked.
    _digest: str = ""

    def next_seq(self, key: Key) -> int:
        """The count for the next put of a key: one more than that of any put that was seen."""
        name = spell(key)
        raw = self._snapshot.find(name)
        code = key_hash(name)
        seen = [sequence_of(n) for n in (*self._pending.get(code, ()), *self._folded.get(code, ()))]
        return max([0 if raw is None else order(raw)[0], *seen]) + 1

    def add(self, key: Key, raw: Raw) -> Raw:
        """Writes an entry; when this returns it is on disk."""
        # A file that was edited or checked out meanwhile does not move the counter; what it holds has been seen too.
        if self.is_edited():
            self.list_entries()
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
            if sequence_of(file_name) >= LARGEST_SEQ:
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
        """Would a reader get this entry now, or a later one?"""
        name = spell(key)
        if os.path.lexists(os.path.join(self.folder, f"{key_hash(name)}.{sealed['seq']}.{self.writer}.json")):
            return True
        found = self._find(name)
        if not isinstance(found, StoredText) or order(found.raw) < order(sealed):
            self.list_entries()
            found = self._find(name)
        return isinstance(found, StoredText) and order(found.raw) >= order(sealed)

    def _tell(self) -> None:
        """Moves the counter, so that every other process sees that something changed."""
        count, added = files.append_byte(self.counter)
        before = self._count
        # If this was the only change since the last read, this process need not read.
        is_first = before is False and count[2] == added
        if is_first or (isinstance(before, tuple) and count == (*before[:2], before[2] + added)):
            self._count = count

    def record_path(self, key: Key, raw: Raw) -> str:
        """Path of an entry's full record: made from the key, never taken from a file."""
        seq, _, writer = order(raw)
        safe = key_hash(writer) if not re.fullmatch(r"[0-9a-f]{16}", writer) else writer
        return os.path.join(self.folder, "records", f"{key_hash(spell(key))}.{seq}.{safe}.json")

    def is_site_of(self, owner: int) -> bool:
        """Is this a store that one other user keeps, such as a site's: are its folders that user's to write alone?"""
        return files.are_of(owner, (os.path.dirname(self.path), self.folder))

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
        for _ in range(TRIES):
            try:
                with lock_at(os.path.join(self.folder, "fold.lock"), timeout=0):
                    seen = self._fold(drop)
            except Timeout:
                return done
            self._tell()
            self.list_entries()
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
        self.list_entries()
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
        beside, name = os.path.split(self.path)
        files.sweep(self.folder, ".")
        files.sweep(beside, f".{name}.")
        return seen

    def merge(self) -> tuple[Snapshot, list[_Folded]]:
        """The snapshot with the entry files in it, as of the last read, and the entries with their files."""
        mine = os.getuid()
        entries = [(name, self._entry(name)) for chain in list(self._pending.values()) for name in list(chain)]
        entries += [latest for chain in list(self._folded.values()) for latest in self._latest(chain)]
        if any(isinstance(entry, Removed) for _, entry in entries):
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
            if is_newer or not is_folded(file_name):
                folded.append((file_name, name, found.raw))
            else:
                # The snapshot has it, and with it the earlier ones of its key: nothing has to be written for them.
                self._held.update(self._folded[key_hash(name)])
            self._known[plain_name(file_name)] = entry
        return merged, folded

    def _latest(self, chain: list[str]) -> Iterator[tuple[str, tuple[str, StoredText] | Removed | None]]:
        """The latest of a key's entries that were folded, unless the snapshot is known to have them."""
        top = -1
        for file_name in list(chain):
            if sequence_of(file_name) < top or file_name in self._held:
                return
            found = self._known.get(plain_name(file_name)) or self._entry(file_name)
            if isinstance(found, tuple):
                top = sequence_of(file_name)
            yield file_name, found

    def entries(self) -> Iterator[tuple[Key, Raw]]:
        """Every key with its newest entry, as of the last read."""
        merged, _ = self.merge()
        yield from ((read_key(name), raw) for name, raw in merged.entries())

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
            if name not in dropped and held is not None and order(held) >= order(raw) and not is_folded(file_name):
                self._to_folded(file_name, f"folded/{now}.{file_name}")

    def _announce(self, identity: tuple[int, ...]) -> None:
        path = os.path.join(self.folder, "folded", mark_of(identity))
        try:
            files.note(path, self._digest)
        except FileNotFoundError:
            files.make_folder(os.path.join(self.folder, "folded"), durable=self.durable)
            files.note(path, self._digest)

    def _forget_folded(self, took: float) -> None:
        """Removes entry files that were folded some time ago, where the snapshot that lies there now has them."""
        held = [name for chain in self._folded.values() for name in chain if name in self._held]
        for file_name in (*past(held, folded_at, took), *past(self._marks, marked_at, took)):
            name = file_name if is_folded(file_name) else f"folded/{file_name}"
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
                path = os.path.join(self.folder, plain_name(file_name))
                files.write(path, line(name, raw).encode(), durable=self.durable)
