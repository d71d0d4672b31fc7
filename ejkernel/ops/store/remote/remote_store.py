"""The remote store: entries that a team's machines share, behind any URL that fsspec opens. No JAX here."""

from __future__ import annotations

import json
import random
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, final, get_args

from ...core import codec, invalidation
from ...core.errors import OpsError, SettingError, StoreError
from ...core.key import Key
from ...settings import Settings, default_folder
from ..faults import OnFault
from ..files import LARGEST_ENTRY
from ..layered import ByKey
from ..snapshot import Raw, Snapshot, key_hash, order, read, read_key, spell
from ..store import StoredEntry
from . import layout
from .listings import SharedListings
from .objects import BoundedObjects, FsspecObjects, Objects, require_driver, shown
from .patience import LeftOutError, Patience, UnusableError, said, within
from .signing import Signer, is_signed, signer_of
from .writer import BackgroundWriter

T = TypeVar("T")
R = TypeVar("R")

# A process lists a folder again after so long, when a call of it is missing.
FRESH_SECONDS = 300.0
# A hostile writer can put any number of entries of one key; so many of them are read.
_MOST_READ = 8
# Another process may fold between two reads.
_TRIES = 4
# So long may the import of a driver take, once a process: 0.4 s for the one of S3.
_LOAD_SECONDS = 5.0
# Requests of a command at once.
_PARALLEL = 32


class RemoteWarning(UserWarning):
    """A remote that is left out, or works less well than it was asked to; local work goes on."""


@dataclass
class _Folder:
    """The objects of one operation and device, as of the last listing."""

    listing: layout.Listing
    # By the clock on the wall, which other processes share, and by one that is never set.
    listed: float
    listed_at: float
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    # Objects never change, so what was read once stays; None: not what a writer wrote.
    read: dict[str, tuple[str, Raw] | None] = field(default_factory=dict)


@final
class RemoteStore(ByKey):
    """Entries below a URL: `s3://bucket/folder`, `sftp://host/path`, `https://...` (read only), `file:///path`.

    Every wait is bounded, two seconds in all; a remote that does not work is named in one warning and left out.
    `key` signs and verifies entries: the secret itself, `file:PATH` or `command:COMMAND`; None is the setting
    `EJKERNEL_OPS_REMOTE_KEY`, and an empty text none at all. An entry without a valid signature is not trusted.
    """

    def __init__(
        self,
        url: str,
        *,
        write: bool = False,
        key: str | None = None,
        on_fault: OnFault = "warn",
        fresh_seconds: float = FRESH_SECONDS,
        objects: Objects | None = None,
        patience: Patience | None = None,
    ) -> None:
        if on_fault not in get_args(OnFault):
            raise SettingError(f"on_fault={on_fault!r} is unknown; use 'warn' or 'raise'")
        self.url = url
        self.write = write
        self.on_fault = on_fault
        # Jitter: processes that started together do not list together again.
        self._fresh = fresh_seconds * random.uniform(0.75, 1.25)
        self.signer: Signer | None = signer_of(Settings.read().remote_key if key is None else key)
        self.objects: Objects = BoundedObjects(FsspecObjects(url)) if objects is None else objects
        self._patience = patience or Patience(self._left_out)
        self._shared = SharedListings(default_folder() / "remote", url) if fresh_seconds > 0 else None
        self._folders: dict[str, _Folder] = {}
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._writing = threading.Lock()
        self._marking = threading.Lock()
        self._writer = secrets.token_hex(8)
        self._later = BackgroundWriter(self)
        self._said: set[str] = set()
        self._greeted = self._marked = self._loaded = False
        if objects is None:
            self._require_driver()

    def _require_driver(self) -> None:
        try:
            require_driver(self.url)
        except OpsError as error:
            if self.on_fault == "raise":
                raise
            self._patience.give_up(str(error))

    @property
    def reason(self) -> str:
        """Reason why the remote is left out at this moment; empty while it is asked."""
        return self._patience.reason

    def lookup(self, key: Key) -> StoredEntry | None:
        """The newest entry of a key, a signed one before any other; None where there is none, or no answer in time."""
        key = Key(*key)
        try:
            found = self._ask(lambda: self._find(key))
        except OSError as error:
            self._failed(error)
            return None
        if found is None:
            return None
        raw, trusted = found
        return StoredEntry.of(raw, raw["cfg"], trusted=trusted)

    def keep(self, key: Key, entry: StoredEntry) -> None:
        """Writes an entry; when this returns, every reader that lists from now on finds it."""
        key = Key(*key)
        self.refuse_unless_written()
        raw = layout.dumped(key, entry)
        self.put_raw(key, raw)
        invalidation.note(key, entry.cfg)

    def keep_later(self, key: Key, entry: StoredEntry) -> None:
        """Writes an entry in the background; what cannot be written is named in one warning at the end."""
        key = Key(*key)
        self.refuse_unless_written()
        self._later.add(key, layout.dumped(key, entry))

    def flush(self, seconds: float) -> int:
        """Waits for what is written in the background; returns the number of entries that are not written yet."""
        return self._later.flush(seconds)

    def put_raw(self, key: Key, raw: Raw) -> None:
        """Writes an entry as it lies in a file, with a count, a writer and a signature of its own."""
        folder = layout.folder_of(key)
        self._mark()
        seen = self._listed(folder)
        self._snapshots(seen, folder)
        with self._writing:
            seq = 1 + self._latest(seen, folder, key)
            name, data = layout.made(key, raw, seq, self._writer, self.signer)
            # Before it is written: another thread's put of this key counts from here.
            seen.read[name] = layout.opened(name, data)
            seen.listing.add(name)
        try:
            self.objects.write(f"{folder}/{name}", data)
        except BaseException:
            seen.listing.discard(name)
            raise
        if self._shared is not None:
            self._shared.drop(folder)

    def knows(self, key: Key, raw: Raw) -> bool:
        """Does the remote have this very cfg for this environment and objective already, as well signed?"""
        found = self._find(key)
        if found is None:
            return False
        there, trusted = found
        same = all(there.get(name) == raw.get(name) for name in ("cfg", "environment", "objective"))
        return same and (trusted or self.signer is None)

    def keys(self) -> list[tuple[str, str, str]]:
        """Every key, sorted; lists every folder."""
        return sorted(key for folder in self.folders() for key, _, _ in self.entries(folder))

    def folders(self) -> list[str]:
        """The folders of all operations and devices."""
        names = self.objects.names
        return [
            f"{layout.ENTRIES}/{operation}/{device}"
            for operation in names(layout.ENTRIES)
            for device in names(f"{layout.ENTRIES}/{operation}")
        ]

    def entries(self, folder: str) -> list[tuple[Key, Raw, bool]]:
        """The newest entry of each key in a folder, and whether it is signed."""
        after = 0.0
        for _ in range(_TRIES):
            seen = self._listed(folder, after)
            try:
                return self._all(seen, folder)
            except _Gone:
                after = seen.listed
        raise StoreError(f"objects of {shown(self.url)} vanish faster than they can be read; try again")

    def forget(self) -> None:
        """Forgets every listing: the next read asks the remote."""
        with self._lock:
            self._folders.clear()

    def check(self) -> None:
        """Raises where there is no remote: a bucket that does not exist, or a place with something else in it."""
        try:
            self._greet()
        except UnusableError as error:
            raise StoreError(f"{self} is no remote: {error}") from error

    def is_trusted(self, name: str, raw: Raw) -> bool:
        """Is this entry signed with this store's key?"""
        return is_signed(name, raw, self.signer)

    def __str__(self) -> str:
        """Name of the store in messages."""
        return shown(self.url)

    def _ask(self, request: Callable[[], T]) -> T:
        # A command waits for each request; a program has its patience for all of them.
        if self.on_fault == "raise":
            return request()
        if not self._loaded and not self._patience.reason:
            self._load()
        return self._patience.call(request, probe=lambda: self.objects.names(""))

    def _load(self) -> None:
        # Work of this machine and no wait for the remote; on a busy one it takes seconds.
        try:
            within(_LOAD_SECONDS, self.objects.load)
        # Whatever an import raises: the program goes on without the remote.
        except Exception as error:
            self._patience.give_up(said(error))
        self._loaded = True

    def _find(self, key: Key) -> tuple[Raw, bool] | None:
        folder = layout.folder_of(key)
        after = 0.0
        for _ in range(_TRIES):
            seen = self._listed(folder, after)
            try:
                return self._best(seen, folder, key)
            except _Gone:
                # A fold took it since the listing: this one, and what other processes listed before, is out of date.
                after = seen.listed
        return None

    def _best(self, seen: _Folder, folder: str, key: Key) -> tuple[Raw, bool] | None:
        name = spell(key)
        held = [snapshot.find(name) for snapshot in self._snapshots(seen, folder)]
        found = [(raw, self.is_trusted(name, raw)) for raw in held if raw is not None]
        for object_name in seen.listing.entries.get(key_hash(name), ())[:_MOST_READ]:
            best = max((order(raw)[0] for raw, trusted in found if trusted or self.signer is None), default=-1)
            if layout.sequence(object_name) < best:
                break
            parsed = self._entry(seen, folder, object_name)
            if parsed is not None and parsed[0] == name:
                found.append((parsed[1], self.is_trusted(*parsed)))
        # Signed before unsigned, whatever an unsigned one says of its count and its time.
        return max(found, key=lambda pair: (pair[1], order(pair[0])), default=None)

    def _latest(self, seen: _Folder, folder: str, key: Key) -> int:
        name = spell(key)
        held = [snapshot.find(name) for snapshot in self._snapshots(seen, folder)]
        counts = [layout.sequence(found) for found in seen.listing.entries.get(key_hash(name), ())]
        counts += [order(raw)[0] for raw in held if raw is not None]
        return max((count for count in counts if count < layout.SANE_SEQ), default=0)

    def _all(self, seen: _Folder, folder: str) -> list[tuple[Key, Raw, bool]]:
        best: dict[str, tuple[Raw, bool]] = {}
        rows = [row for snapshot in self._snapshots(seen, folder) for row in snapshot.entries()]
        names = [name for chain in seen.listing.entries.values() for name in chain]
        rows += filter(None, in_parallel(lambda name: self._entry(seen, folder, name), names))
        for name, raw in rows:
            new = raw, self.is_trusted(name, raw)
            old = best.get(name)
            if old is None or (new[1], order(raw)) > (old[1], order(old[0])):
                best[name] = new
        return [(read_key(name), raw, trusted) for name, (raw, trusted) in best.items()]

    def _entry(self, seen: _Folder, folder: str, name: str) -> tuple[str, Raw] | None:
        if name not in seen.read:
            data = self.objects.read(f"{folder}/{name}", LARGEST_ENTRY)
            if data is None:
                raise _Gone
            seen.read[name] = layout.opened(name, data)
        return seen.read[name]

    def _snapshots(self, seen: _Folder, folder: str) -> list[Snapshot]:
        for name in seen.listing.snapshots:
            if name not in seen.snapshots:
                data = self.objects.read(f"{folder}/{name}", layout.LARGEST_SNAPSHOT)
                if data is None:
                    raise _Gone
                # Cut short or changed on the way: the lines that fit their checksum count.
                seen.snapshots[name] = read(data)
        return [seen.snapshots[name] for name in seen.listing.snapshots]

    def _listed(self, folder: str, after: float = 0.0) -> _Folder:
        """The objects of a folder; listed again where that is old, or was made before `after`."""
        with self._lock:
            turn = self._turns.setdefault(folder, threading.Lock())
        # One thread lists a folder, and the others have its answer.
        with turn:
            seen = self._folders.get(folder)
            if seen is not None and seen.listed > after and time.monotonic() - seen.listed_at < self._fresh:
                return seen
            found = self._list(folder, after)
            if seen is not None:
                found.snapshots, found.read = seen.snapshots, seen.read
            self._folders[folder] = found
            return found

    def _list(self, folder: str, after: float) -> _Folder:
        def ask() -> list[str]:
            return self.objects.names(folder)

        listed = time.time()
        shared = self._shared
        names = ask() if shared is None else shared.get(folder, ask, wait=self._patience.left, after=after)
        if not names and not self._greeted:
            self._greet()
        self._greeted = True
        return _Folder(layout.Listing.of(names), listed, time.monotonic())

    def _greet(self) -> None:
        """Looks at a remote in which nothing was found: is there one at all?"""
        why = self.objects.why_unusable()
        if not why and not self.write:
            names = self.objects.names("")
            if names and layout.MARK not in names:
                why = "it holds something else, and no entries of ejkernel"
        if not why:
            why = self._newer()
        if why and not self.write:
            raise UnusableError(why)

    def _newer(self) -> str:
        data = self.objects.read(layout.MARK, LARGEST_ENTRY)
        try:
            found = codec.loads(data) if data else {"format": layout.FORMAT}
            newer = int(found["format"]) > layout.FORMAT
        except (ValueError, TypeError, KeyError):
            return f"its {layout.MARK} cannot be read"
        return "a newer version of ejkernel-ops wrote it; install that" if newer else ""

    def _mark(self) -> None:
        if self._marked:
            return
        # Of several puts at once the first writes the mark.
        with self._marking:
            if self._marked:
                return
            why = self._newer()
            if why:
                raise StoreError(f"{self} is not written: {why}")
            if layout.MARK not in self.objects.names(""):
                self.objects.write(layout.MARK, json.dumps({"format": layout.FORMAT}).encode())
            self._marked = True

    def refuse_unless_written(self) -> None:
        """Raises where this store was opened for reading alone."""
        if not self.write:
            raise StoreError(
                f"{self} is read-only here; open it with RemoteStore(url, write=True), or set "
                "EJKERNEL_OPS_REMOTE_WRITE=on"
            )

    def _failed(self, error: OSError) -> None:
        if self.on_fault == "raise":
            raise error
        # One that was left out was named then.
        if not isinstance(error, LeftOutError) and not self._patience.reason:
            self.say(f"{self} could not be asked ({error}); local work goes on")

    def _left_out(self, reason: str) -> None:
        self.say(f"the remote {self} is left out for a while, and local work goes on: {reason}")

    def say(self, message: str) -> None:
        """Warns once for each message."""
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, RemoteWarning, stacklevel=4)


def in_parallel(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results of one request each, many at a time: behind 50 ms of latency thousands would take minutes."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_PARALLEL, len(items)), thread_name_prefix="ejkernel-remote") as pool:
        return list(pool.map(work, items))


class _Gone(Exception):
    """An object that was listed, and is not there any more."""
