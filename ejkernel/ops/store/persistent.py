"""The store on disk: a readable JSON file for each operation. A put that was acknowledged is never lost."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, get_args

from .._version import __version__
from ..core import codec, formatting, invalidation
from ..core.errors import BadNameError, ConfigTypeError, SettingError, StoreError
from ..core.key import Key
from ..core.record import Record
from ..core.shown import Shown
from ..core.typevars import Cfg
from ..settings import default_folder
from . import files
from .entry_files import StoredText
from .entry_log import EntryLog
from .faults import CacheStatus as CacheStatus
from .faults import DegradingStore, OnFault, why
from .faults import StoreWarning as StoreWarning
from .snapshot import Raw, line, spell
from .store import StoredEntry


class PersistentCache(DegradingStore, Shown, Generic[Cfg]):
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
        where = str(_path(os.fspath(opname), path))
        super().__init__(where, _resolved(where), durable=durable, on_fault=on_fault)
        self.loader = loader
        self.dumper = dumper
        self.cfg_type = cfg_type

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
            path = self._entry_log.record_path(key, found.raw)
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
                known = self._entry_log.keys()
            except OSError as error:
                self._degrade("memory-only", f"{self.path} cannot be read ({why(error)})")
                known = []
            there = set(known) if self._kept or self._unwritten else set()
            more = {*self._kept, *self._unwritten} - there
            return sorted([*known, *more]) if more else list(known)

    def fold(self, drop: Callable[[Key, Raw], bool] | None = None) -> bool:
        """Brings the file at `path` up to date; False where another process is at it right now. `drop` prunes."""
        with self._mutex:
            if drop is None:
                return self._fold()
            folded = self._entry_log.fold(drop)
            self._forget()
            return folded

    @contextlib.contextmanager
    def held(self) -> Iterator[EntryLog]:
        """The files behind the store, for maintenance; other threads wait until the block ends."""
        with self._mutex:
            yield self._entry_log

    def close(self) -> None:
        """Folds what is pending; the cache can still be used."""
        with self._mutex:
            if self._unwritten:
                self._flush()
            if self._entry_log.has_pending and self.status == "read-write":
                self._fold()

    def __len__(self) -> int:
        return len(self.keys())

    def in_short(self) -> str:
        """The path, as messages name the store."""
        return formatting.at_home(str(self))

    def __str__(self) -> str:
        """Name of the store in messages."""
        return self.path

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
            answers=found.owner in (os.getuid(), 0) or self._entry_log.is_site_of(found.owner),
        )


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
