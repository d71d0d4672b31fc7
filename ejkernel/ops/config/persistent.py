"""Cfgs on disk: one JSON file per operation, whole at any moment, shared by processes and threads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, Literal

import filelock

from ..core import changes, codec
from ..core.errors import BadNameError, ConfigTypeError, RecordFormatError, StoreError
from ..core.invocation import Cfg
from ..core.key import Key
from ..settings import Settings
from . import snapshot
from .store import StoredEntry

CacheStatus = Literal["read-write", "read-only", "memory-only"]

# A writer holds the lock for one read and one write of the file; a minute means that its holder hangs.
_LOCK_SECONDS = 60.0


class StoreWarning(UserWarning):
    """A store that works less well than it was asked to."""


class PersistentCache(Generic[Cfg]):
    """The cfgs of one operation in one readable JSON file."""

    def __init__(
        self,
        opname: str | os.PathLike[str],
        path: str | os.PathLike[str] | Callable[[Any], Cfg] | None = None,
        loader: Callable[[Any], Any] | None = None,
        dumper: Callable[[Any], Any] | None = None,
        cfg_type: type[Cfg] | None = None,
        *,
        durable: bool = False,
    ) -> None:
        if callable(path) and not isinstance(path, os.PathLike):
            # The documented short form: PersistentCache(path, loader, dumper).
            path, loader, dumper = None, path, loader
        self.path: str = str(_path(os.fspath(opname), path))
        self.loader = loader
        self.dumper = dumper
        self.cfg_type = cfg_type
        self.durable = durable
        self.status: CacheStatus = "read-write"
        self.reason = ""
        self._kept: dict[Key, Any] = {}
        self._unwritten: dict[Key, dict[str, Any]] = {}
        self._entries: Mapping[Key, Mapping[str, Any]] = {}
        self._seen: tuple[int, ...] | None = None
        self._said: set[str] = set()
        self._mutex = threading.RLock()
        _refuse_odd_files(Path(self.path))

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
            if key in self._kept:
                return self._kept[key]  # type: ignore[no-any-return]
            self._refresh()
            raw = self._entries.get(key)
            if raw is None:
                return None
            try:
                entry = self._load(raw)
            except ConfigTypeError as error:
                self._say(f"the entry for {key} in {self.path} does not fit and is passed over: {error}")
                return None
            self._kept[key] = entry
            return entry

    def keep(self, key: Key, entry: StoredEntry) -> None:
        """Keeps an entry with all that is known about it."""
        for part in key:
            if not isinstance(part, str):
                raise ConfigTypeError(f"a key is three strings, (device, op_id, call_key); got {tuple(key)!r}")
        raw = self._dump(entry)
        with self._mutex:
            # What comes back must be what went in, before anybody is told that it is kept.
            self._kept[key] = self._load(raw)
            self._unwritten[key] = raw
            self._flush()
        changes.note(key, entry.cfg)

    def keys(self) -> list[tuple[str, str, str]]:
        """Every key that is kept, sorted."""
        with self._mutex:
            self._refresh()
            return sorted({*self._entries, *self._unwritten})

    def __len__(self) -> int:
        return len(self.keys())

    def __str__(self) -> str:
        """As messages name it."""
        return self.path

    def _dump(self, entry: StoredEntry) -> dict[str, Any]:
        cfg = codec.encode(self.dumper(entry.cfg) if self.dumper else entry.cfg)
        raw = {
            "cfg": cfg,
            "source": entry.source,
            "objective": entry.objective,
            "when": entry.when or datetime.now(UTC).isoformat(timespec="microseconds"),
            "by": entry.by or f"ejkernel-ops {version()}",
            "environment": dict(entry.environment),
            "summary": dict(entry.summary),
        }
        return {**raw, "sha256": checksum(raw)}

    def _load(self, raw: Mapping[str, Any]) -> StoredEntry:
        data = raw["cfg"]
        cfg = self.loader(data) if self.loader else data if self.cfg_type is None else codec.decode(self.cfg_type, data)
        # A line that somebody edited says nothing reliable about how its cfg was found.
        if raw.get("sha256") != checksum(raw):
            return StoredEntry(cfg, environment=_strings(raw.get("environment")))
        return StoredEntry(cfg, **{name: raw[name] for name in raw if name not in ("cfg", "sha256")})

    def _refresh(self) -> None:
        """Reads the file if it is another one than was read last."""
        try:
            with open(self.path, encoding="utf-8", errors="surrogateescape") as file:
                seen = _identity(os.fstat(file.fileno()))
                if seen == self._seen:
                    return
                text = file.read()
        except FileNotFoundError:
            self._entries, self._seen = {}, None
            return
        except OSError as error:
            self._degrade("memory-only", f"{self.path} cannot be read ({error.strerror})")
            return
        try:
            content = snapshot.read(text)
        except RecordFormatError as error:
            self._degrade("read-only", f"{self.path} is left as it is: {error}")
            return
        self._entries, self._seen = content.entries, seen
        if content.damage:
            aside = self._set_aside(text)
            self._say(
                f"{self.path} is damaged ({content.damage}); {len(content.entries)} entries were kept"
                + (f", and the file as it was is now {aside}" if aside else "")
            )

    def _set_aside(self, text: str) -> str:
        aside = f"{self.path}.damaged-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"
        try:
            _replace(aside, text, durable=False)
        # A folder that can't be written keeps the damaged file where it is; nothing will replace it either.
        except OSError:
            return ""
        return aside

    def _flush(self) -> None:
        """Adds what is not on disk yet to what is there."""
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with self._lock():
                self.status, self.reason = "read-write", ""
                self._refresh()
                # A file that is newer, or that can't be read, is somebody's: never replaced by what this process has.
                if self.status != "read-write":
                    return
                entries = {**self._entries, **self._unwritten}
                _replace(self.path, snapshot.write(entries), durable=self.durable)
        except (OSError, filelock.Timeout) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._degrade("memory-only", f"{self.path} cannot be written ({why})")
            return
        self._unwritten.clear()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with filelock.FileLock(self.path + ".lock", timeout=_LOCK_SECONDS):
            yield

    def _degrade(self, status: CacheStatus, reason: str) -> None:
        self.status, self.reason = status, reason
        self._say(
            f"the config store is {status}: {reason}; tuned configs are kept for this process only. "
            "Set EJKERNEL_PERSISTENT_CACHE_DIR, or path=, to a folder that can be written"
        )

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, StoreWarning, stacklevel=4)


def version() -> str:
    """This package's version."""
    try:
        return metadata.version("ejkernel-ops")
    # Used from a source tree that was never installed.
    except metadata.PackageNotFoundError:
        return "0+source"


def checksum(raw: Mapping[str, Any]) -> str:
    """What an entry's line must add up to."""
    content = {name: value for name, value in raw.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


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


def _identity(found: os.stat_result) -> tuple[int, ...]:
    # A rename always brings another inode or time; size catches editors that write in place within one tick.
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _strings(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _replace(path: str, text: str, *, durable: bool) -> None:
    """Writes a whole file under a temporary name, then renames it: a reader sees the old or the new one."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    # Exclusive: a link that somebody planted under this name is an error, not followed. The umask sets the mode.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            # Permissions that somebody gave the old file stay.
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if durable:
        _sync_folder(folder)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
