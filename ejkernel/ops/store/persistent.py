"""The store on disk: a readable JSON file for each operation. A put that was acknowledged is never lost."""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Literal, get_args

from .._version import __version__
from ..core import codec, formatting, invalidation
from ..core.errors import BadNameError, ConfigTypeError, RecordFormatError, SettingError, StoreError
from ..core.key import Key
from ..core.record import Record
from ..core.shown import Shown
from ..core.typevars import Cfg
from ..settings import default_folder
from . import files
from .entry_files import StoredText
from .entry_log import EntryLog
from .snapshot import Raw, line, spell
from .store import StoredEntry

CacheStatus = Literal["read-write", "read-only", "memory-only"]
OnFault = Literal["warn", "raise"]


class StoreWarning(UserWarning):
    """A store that works less well than it was asked to."""


class PersistentCache(Shown, Generic[Cfg]):
    """The cfgs of one operation: a JSON file at `path`, and a folder beside it with the newer entries."""

    def __init__(
        self,
        opname: str | os.PathLike[str],
        path: str | os.PathLike[str] | Callable[[Any], Cfg] | None = None,
        loader: Callable[[Any], Any] | None = None,
        dumper: Callable[[Any], Any] | None = None,
        cfg_type: type[Cfg] | None = None,
        *,
        durable: bool = False,
        on_fault: OnFault = "warn",
    ) -> None:
        if callable(path) and not isinstance(path, os.PathLike):
            # The documented short form: PersistentCache(path, loader, dumper).
            path, loader, dumper = None, path, dumper or loader
        if on_fault not in get_args(OnFault):
            raise SettingError(f"on_fault={on_fault!r} is unknown; use 'warn' or 'raise'")
        self.path: str = str(_path(os.fspath(opname), path))
        self.loader = loader
        self.dumper = dumper
        self.cfg_type = cfg_type
        self.durable = durable
        self.on_fault = on_fault
        self.status: CacheStatus = "read-write"
        self.reason = ""
        # Not a method: the entry log is held for the end of the process, and must not keep the cache alive.
        self._say = _Voice()
        self._ledger = EntryLog(_resolved(self.path), durable=durable, report=self._say)
        # The entries read since that look of the entry log, or put.
        self._kept: dict[Key, StoredEntry] = {}
        self._kept_since = 0
        # The puts that the disk did not take: served from here, written when that works.
        self._unwritten: dict[Key, tuple[dict[str, Any], Record | None]] = {}
        self._mutex = threading.RLock()
        # A cache without references is folded when the process ends: a finalizer cannot touch files safely.
        weakref.finalize(self, _leave, self._ledger).atexit = False
        _open_caches.add(self)

    def get(self, device: str, op_id: str, call_key: str) -> Cfg | None:
        """The cfg that was put under a key, or None."""
        entry = self.lookup(Key(device, op_id, call_key))
        return None if entry is None else entry.cfg

    def put(self, device: str, op_id: str, call_key: str, cfg: Cfg) -> None:
        """Keeps a cfg; when this returns and `status` is read-write, it is on disk."""
        from ..core.device import environment

        self.keep(Key(device, op_id, call_key), StoredEntry(cfg, environment(device)))

    def lookup(self, key: Key) -> StoredEntry | None:
        """The entry of a key with all that is known about it, or None."""
        key = Key(*key)
        with self._mutex:
            if self._up_to_date() and key in self._kept:
                return self._kept[key]
            found = self._find(key)
            if found is None:
                return None
            try:
                entry = self._load(found)
            # A file can hold what this cfg_type, or a loader of the user's own, does not know.
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                self._say(f"the entry for {key} in {self.path} does not fit and is passed over: {error!r}")
                return None
            self._kept[key] = entry
            return entry

    def keep(self, key: Key, entry: StoredEntry) -> None:
        """Keeps an entry with all that is known about it."""
        key = Key(*key)
        for part in key:
            if not isinstance(part, str):
                raise ConfigTypeError(f"a key is three strings, (device, op_id, call_key); got {tuple(key)!r}")
        raw = self._dump(entry)
        _check_size(key, entry, raw)
        # Loaded before it is kept: a cfg that cannot be read back is an error of this put.
        loaded = self._load(StoredText(raw, os.getuid()))
        with self._mutex:
            self._kept[key] = loaded
            self._unwritten[key] = raw, entry.record
            invalidation.note(key, entry.cfg)
            self._flush()

    def record(self, device: str, op_id: str, call_key: str) -> Record | None:
        """The full record of the tuning behind an entry, or None."""
        key = Key(device, op_id, call_key)
        with self._mutex:
            self._up_to_date()
            if key in self._unwritten:
                return self._unwritten[key][1]
            found = self._find(key)
            if found is None:
                return None
            path = self._ledger.record_path(key, found.raw)
            try:
                content = files.read(path, files.LARGEST_RECORD)
                if content is None:
                    return None
                loaded = Record.loads(content.data.decode(), self._load_cfg)
                # What another user wrote names nothing that could be imported.
                return loaded if content.author in (os.getuid(), 0) else replace(loaded, kernel="")
            # ValueError: damaged, or of another format. The cfg stands without it.
            except (OSError, ValueError, TypeError, RecursionError) as error:
                self._say(f"the record in {path} cannot be read: {error}")
                return None

    def keys(self) -> list[tuple[str, str, str]]:
        """Every key that is kept, sorted."""
        with self._mutex:
            self._up_to_date()
            try:
                known = self._ledger.keys()
            except OSError as error:
                self._degrade("memory-only", f"{self.path} cannot be read ({_why(error)})")
                known = []
            there = set(known) if self._kept or self._unwritten else set()
            more = {*self._kept, *self._unwritten} - there
            return sorted([*known, *more]) if more else list(known)

    def fold(self, drop: Callable[[Key, Raw], bool] | None = None) -> bool:
        """Brings the file at `path` up to date; False where another process is at it right now. `drop` prunes."""
        with self._mutex:
            if drop is None:
                return self._fold()
            folded = self._ledger.fold(drop)
            self._forget()
            return folded

    @contextlib.contextmanager
    def locked(self) -> Iterator[EntryLog]:
        """The files behind the store, for maintenance; other threads wait until the block ends."""
        with self._mutex:
            yield self._ledger

    def close(self) -> None:
        """Folds what is pending; the cache can still be used."""
        with self._mutex:
            if self._unwritten:
                self._flush()
            if self._ledger.has_pending and self.status == "read-write":
                self._fold()

    def __len__(self) -> int:
        return len(self.keys())

    def in_short(self) -> str:
        """The path, as messages name the store."""
        return formatting.at_home(str(self))

    def __str__(self) -> str:
        """Name of the store in messages."""
        return self.path

    def _up_to_date(self) -> bool:
        """True where nothing changed on disk; else looks, and forgets what was read before."""
        try:
            if self._ledger.unchanged():
                # A put or a fold of this process may have looked, and seen changes of other processes.
                if self._kept_since == self._ledger.looks:
                    return True
            else:
                self._ledger.look()
        except OSError as error:
            self._degrade("memory-only", f"{self.path} cannot be read ({_why(error)})")
            return True
        self._forget()
        return False

    def _forget(self) -> None:
        """Forgets what was read from disk."""
        self._kept = {key: self._kept[key] for key in self._unwritten}
        self._kept_since = self._ledger.looks

    def _find(self, key: Key) -> StoredText | None:
        if key in self._unwritten:
            return StoredText(self._unwritten[key][0], os.getuid())
        try:
            # A hand-edited file does not move the counter; on this path there is time to look for one.
            if self._ledger.is_edited():
                self._ledger.look()
            found = self._ledger.find(key)
        except OSError as error:
            self._degrade("memory-only", f"{self.path} cannot be read ({_why(error)})")
            return None
        if self._ledger.newer:
            self._degrade("read-only", f"{self.path} is left as it is: {self._ledger.newer}")
        elif not self._unwritten:
            # Reading works again, and nothing waits to be written.
            self.status, self.reason = "read-write", ""
        return found

    def _write_record(self, key: Key, raw: Raw, record: Record) -> None:
        path = self._ledger.record_path(key, raw)
        try:
            files.make_folder(os.path.dirname(path), durable=self.durable)
            files.write(path, record.dumps().encode(), durable=self.durable)
        # The cfg is safe; its record is for people.
        except (OSError, TypeError, ValueError) as error:
            self._say(f"the record of {key} could not be written beside {self.path}: {error}")

    def _flush(self, *, is_second: bool = False) -> None:
        """Writes what is not on disk yet; what is gone right after that once more."""
        was, self.status, self.reason = self.status, "read-write", ""
        written: dict[Key, tuple[dict[str, Any], Record | None, Raw]] = {}
        self._up_to_date()
        # A file of a newer version, or one that can't be read, is never replaced by this process's entries.
        if self.status != "read-write":
            return
        try:
            for key, (raw, record) in list(self._unwritten.items()):
                sealed = self._ledger.add(key, raw)
                written[key] = raw, record, sealed
                del self._unwritten[key]
                if record is not None:
                    self._write_record(key, sealed, record)
        except RecordFormatError as error:
            self._degrade("read-only", f"{self.path} is left as it is: {error}")
            return
        except OSError as error:
            readable = was != "memory-only" and os.path.exists(self._ledger.path)
            kind: CacheStatus = "read-only" if readable and _is_forbidden(error) else "memory-only"
            self._degrade(kind, f"{self._ledger.folder} cannot be written ({_why(error)})")
            return
        if self._ledger.wants_folding:
            self._fold()
        if self._look_after(written) and not is_second and self.status == "read-write":
            # Another process has pruned it this very moment. Twice in a row is no accident.
            self._flush(is_second=True)
        elif self._unwritten and self.status == "read-write":
            self._degrade("memory-only", f"{self._ledger.folder} does not keep what is written there")

    def _look_after(self, written: Mapping[Key, tuple[dict[str, Any], Record | None, Raw]]) -> bool:
        """Takes back the acknowledgement of puts that a reader would not get; were there any?"""
        try:
            gone = [key for key, (_, _, sealed) in written.items() if not self._ledger.holds(key, sealed)]
        except OSError as error:
            self._degrade("memory-only", f"{self.path} cannot be read ({_why(error)})")
            gone = list(written)
        for key in gone:
            self._unwritten[key] = written[key][:2]
        return bool(gone)

    def _fold(self) -> bool:
        try:
            return self._ledger.fold()
        except RecordFormatError as error:
            self._degrade("read-only", f"{self.path} is left as it is: {error}")
        # Nothing is lost: the entry files lie in the folder, and every reader looks there.
        except OSError as error:
            message = (
                f"{self.path} could not be brought up to date ({_why(error)}); its entries are safe in "
                f"{self._ledger.folder} and are folded when that works again"
            )
            if self.on_fault == "raise":
                raise StoreError(message) from error
            # A store that cannot be used was named already.
            if self.status == "read-write":
                self._say(message)
        return False

    def _dump(self, entry: StoredEntry) -> dict[str, Any]:
        return {
            "cfg": codec.encode(self.dumper(entry.cfg) if self.dumper else entry.cfg),
            "source": entry.source,
            "objective": entry.objective,
            "when": entry.when or datetime.now(UTC).isoformat(timespec="microseconds"),
            "by": entry.by or f"ejkernel-ops {__version__}",
            "environment": dict(entry.environment),
            "summary": codec.encode(dict(entry.summary)),
            **({"call": dict(entry.call)} if entry.call else {}),
        }

    def _load_cfg(self, data: Any) -> Any:
        if self.loader:
            return self.loader(data)
        return data if self.cfg_type is None else codec.decode(self.cfg_type, data)

    def _load(self, found: StoredText) -> StoredEntry:
        return StoredEntry.of(
            found.raw,
            self._load_cfg(found.raw["cfg"]),
            trusted=found.owner == os.getuid(),
            answers=found.owner in (os.getuid(), 0) or self._ledger.is_site_of(found.owner),
        )

    def _degrade(self, status: CacheStatus, reason: str) -> None:
        self.status, self.reason = status, reason
        message = (
            f"the config store is {status}: {reason}; tuned configs are kept for this process only. "
            "Set EJKERNEL_PERSISTENT_CACHE_DIR, or path=, to a folder that can be written"
        )
        if self.on_fault == "raise":
            raise StoreError(message)
        self._say(message)


class _Voice:
    """Warns once for each message."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(self, message: str) -> None:
        if message not in self.said:
            self.said.add(message)
            warnings.warn(message, StoreWarning, stacklevel=4)


_open_caches: weakref.WeakSet[PersistentCache[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    # A lock that another thread of the parent held would stay locked for ever.
    for cache in list(_open_caches):
        cache._mutex = threading.RLock()
        cache._ledger.be_another_writer()


os.register_at_fork(after_in_child=_after_fork)


# Stores of this process with entries that are not folded yet, and whether they are durable.
_left: dict[str, bool] = {}


def _leave(ledger: EntryLog) -> None:
    if ledger.has_pending:
        _left[ledger.path] = ledger.durable


def _fold_at_exit() -> None:
    for cache in list(_open_caches):
        _leave(cache._ledger)
    for path, durable in _left.items():
        ledger = EntryLog(path, durable=durable)
        # The process is ending and its entries are safe in their files: a later process folds them.
        with contextlib.suppress(OSError, RecordFormatError):
            # The user may have removed the store meanwhile: then it is not made again.
            if files.names(ledger.folder):
                ledger.fold()


atexit.register(_fold_at_exit)


def _path(opname: str, path: Any) -> Path:
    if path is not None:
        return Path(os.path.abspath(os.path.expanduser(os.fspath(path))))
    separators = [s for s in (os.sep, os.altsep, "/") if s]
    if any(s in opname for s in separators) or opname.endswith(".json"):
        return Path(os.path.abspath(os.path.expanduser(opname)))
    if not opname or opname in (".", "..") or "\0" in opname:
        raise BadNameError(f"{opname!r} is no name for a store; use an operation's name, or give a path")
    return default_folder() / f"{opname}.json"


def _resolved(path: str) -> str:
    """The path of the file itself; what is there and no plain file, or behind another user's link, is an error."""
    if os.path.islink(path) and not os.path.exists(path):
        raise StoreError(f"{path} is a link to nothing; give the path of a JSON file")
    try:
        real = files.resolved(path)
    except files.NotPlainError as error:
        raise StoreError(f"{path} is not opened: {error.strerror}") from error
    try:
        mode = os.stat(real).st_mode
    # Missing, or hidden from this user: the first use says so.
    except OSError:
        return real
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a plain file"
        raise StoreError(f"{path} is {kind}; give the path of a JSON file, such as {os.path.join(path, 'ops.json')}")
    return real


def _check_size(key: Key, entry: StoredEntry, raw: Raw) -> None:
    try:
        size = len(line(spell(key), raw).encode())
    # A number of thousands of digits, or an environment that is not made of strings.
    except (TypeError, ValueError) as error:
        raise ConfigTypeError(f"{codec.describe(entry.cfg)} cannot be written as JSON: {error}") from error
    # A little is left for the count, the writer and the checksum that are still to come.
    if size > files.LARGEST_ENTRY - 1024:
        raise ConfigTypeError(
            f"{codec.describe(entry.cfg)} takes {size:,} bytes with its key, and an entry may have "
            f"{files.LARGEST_ENTRY - 1024:,}; keep what is large elsewhere and its name in the cfg"
        )


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _is_forbidden(error: OSError) -> bool:
    import errno

    return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
