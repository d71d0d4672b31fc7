"""A store with a disk that fails: entries wait in memory, the status says so, and the next put tries again.

`read-write`: a put that returned is on disk. `read-only`: what lies there is served, and puts wait in memory.
`memory-only`: nothing can be read either. Entry files that are not folded yet are folded when the process ends.
No JAX here.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Literal

from ..core.errors import RecordFormatError, StoreError
from ..core.key import Key
from ..core.record import Record
from . import files
from .entry_files import StoredText
from .entry_log import EntryLog
from .snapshot import Raw
from .store import StoredEntry

CacheStatus = Literal["read-write", "read-only", "memory-only"]
OnFault = Literal["warn", "raise"]


class StoreWarning(UserWarning):
    """A store that works less well than it was asked to."""


class DegradingStore:
    """Entries of one entry log, and those that the disk has not taken yet."""

    def __init__(self, path: str, file: str, *, durable: bool, on_fault: OnFault) -> None:
        self.path = path
        self.durable = durable
        self.on_fault = on_fault
        self.status: CacheStatus = "read-write"
        self.reason = ""
        # Not a method: the entry log is held for the end of the process, and must not keep the cache alive.
        self._say = _Voice()
        self._entry_log = EntryLog(file, durable=durable, report=self._say)
        # The entries read since that read of the entry log, or put.
        self._kept: dict[Key, StoredEntry] = {}
        self._kept_since = 0
        # The puts that the disk did not take: served from here, written when that works.
        self._unwritten: dict[Key, tuple[dict[str, Any], Record | None]] = {}
        self._mutex = threading.RLock()
        # A cache without references is folded when the process ends: a finalizer cannot touch files safely.
        weakref.finalize(self, _leave, self._entry_log).atexit = False
        _open_stores.add(self)

    def _up_to_date(self) -> bool:
        """True where nothing changed on disk; else reads, and forgets what was read before."""
        try:
            if self._entry_log.unchanged():
                # A put or a fold of this process may have read, and seen changes of other processes.
                if self._kept_since == self._entry_log.listings:
                    return True
            else:
                self._entry_log.list_entries()
        except OSError as error:
            self._degrade("memory-only", f"{self.path} cannot be read ({why(error)})")
            return True
        self._forget()
        return False

    def _forget(self) -> None:
        """Forgets what was read from disk."""
        self._kept = {key: self._kept[key] for key in self._unwritten}
        self._kept_since = self._entry_log.listings

    def _find(self, key: Key) -> StoredText | None:
        if key in self._unwritten:
            return StoredText(self._unwritten[key][0], os.getuid())
        try:
            # A hand-edited file does not move the counter; on this path there is time to look for one.
            if self._entry_log.is_edited():
                self._entry_log.list_entries()
            found = self._entry_log.find(key)
        except OSError as error:
            self._degrade("memory-only", f"{self.path} cannot be read ({why(error)})")
            return None
        if self._entry_log.newer:
            self._degrade("read-only", f"{self.path} is left as it is: {self._entry_log.newer}")
        elif not self._unwritten:
            # Reading works again, and nothing waits to be written.
            self.status, self.reason = "read-write", ""
        return found

    def _write_record(self, key: Key, raw: Raw, record: Record) -> None:
        path = self._entry_log.record_path(key, raw)
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
                sealed = self._entry_log.add(key, raw)
                written[key] = raw, record, sealed
                del self._unwritten[key]
                if record is not None:
                    self._write_record(key, sealed, record)
        except RecordFormatError as error:
            self._degrade("read-only", f"{self.path} is left as it is: {error}")
            return
        except OSError as error:
            readable = was != "memory-only" and os.path.exists(self._entry_log.path)
            kind: CacheStatus = "read-only" if readable and _is_forbidden(error) else "memory-only"
            self._degrade(kind, f"{self._entry_log.folder} cannot be written ({why(error)})")
            return
        if self._entry_log.wants_folding:
            self._fold()
        if self._take_back_lost(written) and not is_second and self.status == "read-write":
            # Another process has pruned it this very moment. Twice in a row is no accident.
            self._flush(is_second=True)
        elif self._unwritten and self.status == "read-write":
            self._degrade("memory-only", f"{self._entry_log.folder} does not keep what is written there")

    def _take_back_lost(self, written: Mapping[Key, tuple[dict[str, Any], Record | None, Raw]]) -> bool:
        """Takes back the acknowledgement of puts that a reader would not get; were there any?"""
        try:
            gone = [key for key, (_, _, sealed) in written.items() if not self._entry_log.holds(key, sealed)]
        except OSError as error:
            self._degrade("memory-only", f"{self.path} cannot be read ({why(error)})")
            gone = list(written)
        for key in gone:
            self._unwritten[key] = written[key][:2]
        return bool(gone)

    def _fold(self) -> bool:
        try:
            return self._entry_log.fold()
        except RecordFormatError as error:
            self._degrade("read-only", f"{self.path} is left as it is: {error}")
        # Nothing is lost: the entry files lie in the folder, and every reader looks there.
        except OSError as error:
            message = (
                f"{self.path} could not be brought up to date ({why(error)}); its entries are safe in "
                f"{self._entry_log.folder} and are folded when that works again"
            )
            if self.on_fault == "raise":
                raise StoreError(message) from error
            # A store that cannot be used was named already.
            if self.status == "read-write":
                self._say(message)
        return False

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


_open_stores: weakref.WeakSet[DegradingStore] = weakref.WeakSet()


def _after_fork() -> None:
    # A lock that another thread of the parent held would stay locked for ever.
    for store in list(_open_stores):
        store._mutex = threading.RLock()
        store._entry_log.be_another_writer()


os.register_at_fork(after_in_child=_after_fork)


# Stores of this process with entries that are not folded yet, and whether they are durable.
_left: dict[str, bool] = {}


def _leave(entry_log: EntryLog) -> None:
    if entry_log.has_pending:
        _left[entry_log.path] = entry_log.durable


def _fold_at_exit() -> None:
    for store in list(_open_stores):
        _leave(store._entry_log)
    for path, durable in _left.items():
        entry_log = EntryLog(path, durable=durable)
        # The process is ending and its entries are safe in their files: a later process folds them.
        with contextlib.suppress(OSError, RecordFormatError):
            # The user may have removed the store meanwhile: then it is not made again.
            if files.names(entry_log.folder):
                entry_log.fold()


atexit.register(_fold_at_exit)


def why(error: OSError) -> str:
    """The reason that the system gives."""
    return error.strerror or str(error)


def _is_forbidden(error: OSError) -> bool:
    return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
