"""Cfgs on disk: a readable JSON file per operation that nothing acknowledged is ever lost from."""

from __future__ import annotations

import functools
import os
import stat
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, Literal, get_args

from ..core import changes, codec
from ..core.errors import BadNameError, ConfigTypeError, RecordFormatError, SettingError, StoreError
from ..core.invocation import Cfg
from ..core.key import Key
from ..core.record import Record
from ..settings import Settings
from . import files
from .ledger import Found, Ledger
from .store import Source, StoredEntry

CacheStatus = Literal["read-write", "read-only", "memory-only"]
OnFault = Literal["warn", "raise"]


class StoreWarning(UserWarning):
    """A store that works less well than it was asked to."""


class PersistentCache(Generic[Cfg]):
    """The cfgs of one operation: a JSON file at `path`, and a folder beside it with what was put since."""

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
        _refuse_odd_files(Path(self.path))
        self._ledger = Ledger(os.path.realpath(self.path), durable=durable, report=self._say)
        self._kept: dict[Key, StoredEntry] = {}
        # Put while the disk did not take it: served from here, written when it can be.
        self._unwritten: dict[Key, dict[str, Any]] = {}
        self._said: set[str] = set()
        self._mutex = threading.RLock()
        self._closing = weakref.finalize(self, _fold_at_exit, self._ledger)
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
        with self._mutex:
            if self._up_to_date() and key in self._kept:
                return self._kept[key]
            found = self._find(key)
            if found is None:
                return None
            try:
                entry = self._load(found)
            except ConfigTypeError as error:
                self._say(f"the entry for {key} in {self.path} does not fit and is passed over: {error}")
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
        # What comes back must be what went in, before anybody is told that it is kept.
        loaded = self._load(Found(raw, os.getuid()))
        with self._mutex:
            self._kept[key] = loaded
            self._unwritten[key] = raw
            self._write(key, entry.record)
        changes.note(key, entry.cfg)

    def record(self, device: str, op_id: str, call_key: str) -> Record | None:
        """The full record of the tuning behind an entry, or None."""
        key = Key(device, op_id, call_key)
        with self._mutex:
            self._up_to_date()
            found = self._find(key)
            content = files.read(self._ledger.record_path(key, found.raw)) if found is not None else None
        return None if content is None else Record.loads(content.data.decode(), self._load_cfg)

    def keys(self) -> list[tuple[str, str, str]]:
        """Every key that is kept, sorted."""
        with self._mutex:
            self._up_to_date()
            return sorted({*self._ledger.keys(), *self._unwritten})

    def fold(self) -> bool:
        """Brings the file at `path` up to date; False where another process is at it right now."""
        with self._mutex:
            return self._fold()

    def close(self) -> None:
        """Folds what is pending; the cache can still be used."""
        with self._mutex:
            if self._unwritten:
                self._flush()
            if self._ledger._pending and self.status == "read-write":
                self._fold()

    def __len__(self) -> int:
        return len(self.keys())

    def __str__(self) -> str:
        """As messages name it."""
        return self.path

    def _up_to_date(self) -> bool:
        """True where nothing changed on disk; else looks, and forgets what was read before."""
        try:
            if self._ledger.unchanged():
                return True
            self._ledger.look()
        except RecordFormatError as error:
            self._degrade("read-only", f"{self.path} is left as it is: {error}")
            return True
        except OSError as error:
            self._degrade("memory-only", f"{self.path} cannot be read ({_why(error)})")
            return True
        self._kept = {key: self._kept[key] for key in self._unwritten}
        return False

    def _find(self, key: Key) -> Found | None:
        if key in self._unwritten:
            return Found(self._unwritten[key], os.getuid())
        try:
            # A hand-edited file does not move the counter; on this path there is time to look for one.
            if files.identity(self._ledger.path) != self._ledger._snapshot_id:
                self._ledger.look()
            return self._ledger.find(key)
        except RecordFormatError as error:
            self._degrade("read-only", f"{self.path} is left as it is: {error}")
        except OSError as error:
            self._degrade("memory-only", f"{self.path} cannot be read ({_why(error)})")
        return None

    def _write(self, key: Key, record: Record | None) -> None:
        self._flush()
        if key in self._unwritten or record is None:
            return
        found = self._find(key)
        try:
            text = record.dumps().encode()
            if found is not None:
                path = self._ledger.record_path(key, found.raw)
                files.make_folder(os.path.dirname(path))
                files.write(path, text, durable=self.durable)
        # The cfg is safe; its record is for people.
        except (OSError, TypeError) as error:
            self._say(f"the record of {key} could not be written beside {self.path}: {error}")

    def _flush(self) -> None:
        """Writes what is not on disk yet."""
        was, self.status, self.reason = self.status, "read-write", ""
        self._up_to_date()
        # A file that is newer, or that can't be read, is somebody's: never replaced by what this process has.
        if self.status != "read-write":
            return
        try:
            for key in list(self._unwritten):
                self._ledger.add(key, self._unwritten[key])
                del self._unwritten[key]
        except OSError as error:
            readable = was != "memory-only" and os.path.exists(self._ledger.path)
            kind: CacheStatus = "read-only" if readable and _is_forbidden(error) else "memory-only"
            self._degrade(kind, f"{self._ledger.folder} cannot be written ({_why(error)})")
            return
        if self._ledger.wants_folding:
            self._fold()

    def _fold(self) -> bool:
        try:
            return self._ledger.fold()
        except RecordFormatError as error:
            self._degrade("read-only", f"{self.path} is left as it is: {error}")
        # Nothing is lost: what was put lies in the folder, and every reader looks there.
        except OSError as error:
            self._say(
                f"{self.path} could not be brought up to date ({_why(error)}); its entries are safe in "
                f"{self._ledger.folder} and are folded when that works again"
            )
        return False

    def _dump(self, entry: StoredEntry) -> dict[str, Any]:
        return {
            "cfg": codec.encode(self.dumper(entry.cfg) if self.dumper else entry.cfg),
            "source": entry.source,
            "objective": entry.objective,
            "when": entry.when or datetime.now(UTC).isoformat(timespec="microseconds"),
            "by": entry.by or f"ejkernel-ops {version()}",
            "environment": dict(entry.environment),
            "summary": codec.encode(dict(entry.summary)),
        }

    def _load_cfg(self, data: Any) -> Any:
        if self.loader:
            return self.loader(data)
        return data if self.cfg_type is None else codec.decode(self.cfg_type, data)

    def _load(self, found: Found) -> StoredEntry:
        raw = found.raw
        return StoredEntry(
            cfg=self._load_cfg(raw["cfg"]),
            environment=_strings(raw.get("environment")),
            source=raw["source"] if raw.get("source") in get_args(Source) else "hand",
            objective=raw["objective"] if raw.get("objective") in ("forward", "forward+backward") else None,
            when=str(raw.get("when", "")),
            by=str(raw.get("by", "")),
            summary=raw["summary"] if isinstance(raw.get("summary"), dict) else {},
            trusted=found.owner == os.getuid(),
        )

    def _degrade(self, status: CacheStatus, reason: str) -> None:
        self.status, self.reason = status, reason
        message = (
            f"the config store is {status}: {reason}; tuned configs are kept for this process only. "
            "Set EJKERNEL_PERSISTENT_CACHE_DIR, or path=, to a folder that can be written"
        )
        if self.on_fault == "raise":
            raise StoreError(message)
        self._say(message, once_for=(status, reason))

    def _say(self, message: str, once_for: Any = None) -> None:
        if (once_for or message) not in self._said:
            self._said.add(once_for or message)
            warnings.warn(message, StoreWarning, stacklevel=4)


_open_caches: weakref.WeakSet[PersistentCache[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    # A lock that another thread of the parent held would stay locked for ever, and two processes are two writers.
    for cache in list(_open_caches):
        cache._mutex = threading.RLock()
        cache._ledger.writer = os.urandom(8).hex()


os.register_at_fork(after_in_child=_after_fork)


def _fold_at_exit(ledger: Ledger) -> None:
    try:
        if ledger._pending:
            ledger.fold()
    # The process is ending and its entries are safe in their files: the next one folds them.
    except (OSError, RecordFormatError):
        pass


@functools.cache
def version() -> str:
    """This package's version."""
    try:
        return metadata.version("ejkernel-ops")
    # Used from a source tree that was never installed.
    except metadata.PackageNotFoundError:
        return "0+source"


def default_folder() -> Path:
    """Where stores live unless told otherwise."""
    chosen = Settings.read().cache_dir
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("ejkernel", appauthor=False))


def _path(opname: str, path: Any) -> Path:
    if path is not None:
        return Path(os.path.abspath(os.path.expanduser(os.fspath(path))))
    separators = [s for s in (os.sep, os.altsep, "/") if s]
    if any(s in opname for s in separators) or opname.endswith(".json"):
        return Path(os.path.abspath(os.path.expanduser(opname)))
    if not opname or opname in (".", "..") or "\0" in opname:
        raise BadNameError(f"{opname!r} is no name for a store; use an operation's name, or give a path")
    return default_folder() / f"{opname}.json"


def _refuse_odd_files(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise StoreError(f"{path} is a link to nothing; give the path of a JSON file")
    try:
        mode = path.stat().st_mode
    # Not there yet, or not to be seen: the first use will say so.
    except OSError:
        return
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a plain file"
        raise StoreError(f"{path} is {kind}; give the path of a JSON file, such as {path / 'ops.json'}")


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _is_forbidden(error: OSError) -> bool:
    import errno

    return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)


def _strings(value: Any) -> Mapping[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}
