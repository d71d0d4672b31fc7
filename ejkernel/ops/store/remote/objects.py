"""The few verbs that a remote place needs, and the same over any URL that fsspec opens. No JAX here."""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, final
from urllib.parse import urlsplit

from ...core.errors import MissingExtraError, OpsError, SettingError, StoreError
from .patience import said, within

T = TypeVar("T")

# A process may be killed while it writes here, and a reader would find half a file: written aside, then renamed.
_WITH_RENAME = frozenset({"file", "local", "sftp", "ssh"})
_READ_ONLY = frozenset({"http", "https"})
# Drivers of fsspec with a bucket in front of the path.
_WITH_BUCKET = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss"})


class Objects(Protocol):
    """Whole objects by path: written once, listed by folder, removed. Paths are relative and made by this package."""

    def load(self) -> None:
        """Imports what the requests need; asks nothing of the place."""

    def names(self, folder: str) -> list[str]:
        """Names of the objects and folders in a folder; empty where there is none."""

    def read(self, path: str, limit: int) -> bytes | None:
        """A whole object, or None where there is none; of a larger one the first `limit` bytes and one more."""

    def write(self, path: str, data: bytes) -> None:
        """Writes an object under a name that no other writer uses."""

    def remove(self, path: str) -> None:
        """Removes an object, unless another process was faster."""

    def why_unusable(self) -> str:
        """Reason why nothing can be found here, such as a bucket that does not exist; else empty."""


def is_url(text: object) -> bool:
    """Is this a URL, and no path?"""
    return isinstance(text, str) and len(scheme_of(text)) > 1


def scheme_of(url: str) -> str:
    """`s3` of `s3://bucket/folder`; empty for a path."""
    scheme, found, _ = url.partition("://")
    return scheme.lower() if found and scheme.replace("+", "").replace("-", "").isalnum() else ""


def shown(url: str) -> str:
    """A URL without the password and the query that may be in it, for messages."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")
    user = host[0].partition(":")[0]
    return f"{parts.scheme}://{user + '@' if user else ''}{host[2]}{parts.path}"


@final
class FsspecObjects:
    """Objects below a URL, through fsspec; connections are made when they are first needed."""

    def __init__(self, url: str) -> None:
        scheme = scheme_of(url)
        if len(scheme) < 2:
            raise SettingError(
                f"{url!r} is no URL; give one such as s3://bucket/folder, sftp://host/path or file:///path"
            )
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self.scheme = scheme
        self.is_read_only = scheme in _READ_ONLY
        self._opened: tuple[int, Any, str] | None = None
        self._opening = threading.Lock()
        # Drivers without an event loop of their own, such as paramiko's, take one request at a time.
        self._turn: threading.Lock | None = None

    def load(self) -> None:
        """Imports the driver."""
        _driver(self.url)

    def names(self, folder: str) -> list[str]:
        """Names of the objects and folders in a folder; empty where there is none."""
        fs, root = self._fs()
        with self._in_turn():
            fs.invalidate_cache()
            place = _joined(root, folder)
            try:
                # Sizes and times are not needed, and a local disk would be asked for each of them.
                found = [str(path) for path in fs.ls(place, detail=False)]
            except (FileNotFoundError, NotADirectoryError):
                return []
        # A driver lists the object itself in place of a folder, and some list the folder as well.
        inside = [path for path in found if path.rstrip("/") != place.rstrip("/")]
        return sorted({path.partition("?")[0].rstrip("/").rpartition("/")[2] for path in inside} - {""})

    def read(self, path: str, limit: int) -> bytes | None:
        """A whole object, or None where there is none."""
        fs, root = self._fs()
        with self._in_turn():
            try:
                # No more than the limit: a hostile object must not fill the memory.
                data = fs.cat_file(_joined(root, path), start=0, end=limit + 1)
            except (FileNotFoundError, IsADirectoryError):
                return None
        return bytes(data[: limit + 1])

    def write(self, path: str, data: bytes) -> None:
        """Writes a whole object."""
        if self.is_read_only:
            raise PermissionError(f"{shown(self.url)} can be read and not written; push over s3://, sftp:// or file://")
        fs, root = self._fs()
        target = _joined(root, path)
        with self._in_turn():
            if self.scheme not in _WITH_RENAME:
                fs.pipe_file(target, data)
                return
            folder, name = os.path.split(target)
            aside = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
            fs.makedirs(folder, exist_ok=True)
            try:
                fs.pipe_file(aside, data)
                fs.mv(aside, target)
            except BaseException:
                _try_to_remove(fs, aside)
                raise

    def remove(self, path: str) -> None:
        """Removes an object, unless another process was faster."""
        fs, root = self._fs()
        with self._in_turn():
            try:
                fs.rm_file(_joined(root, path))
            except FileNotFoundError:
                return

    def why_unusable(self) -> str:
        """Reason why nothing can be found here; else empty."""
        fs, root = self._fs()
        with self._in_turn():
            fs.invalidate_cache()
            if fs.exists(root):
                return ""
            if self.scheme in _WITH_BUCKET:
                bucket = root.partition("/")[0]
                # A folder of a bucket is there once something was written to it.
                return "" if fs.exists(bucket) else f"there is no bucket {bucket}"
            return "" if self.scheme == "memory" else "it does not exist"

    def _in_turn(self) -> Any:
        return self._turn or _Free()

    def _fs(self) -> tuple[Any, str]:
        with self._opening:
            # Event loops and connections do not survive a fork.
            if self._opened is None or self._opened[0] != os.getpid():
                fs, root = _filesystem(self.url)
                self._turn = None if getattr(fs, "async_impl", False) else threading.Lock()
                self._opened = os.getpid(), fs, root
            return self._opened[1], self._opened[2]


# So long may one request of a command, or of a thread in the background, take.
_REQUEST_SECONDS = 30.0
# The import of a driver is work of this machine, which may be busy with a whole fleet of processes.
_LOAD_SECONDS = 120.0


@final
class BoundedObjects:
    """The objects below a URL, with a bound for every request and one kind of error for whatever a driver raises."""

    def __init__(self, inner: FsspecObjects, seconds: float = _REQUEST_SECONDS) -> None:
        self._inner = inner
        self._seconds = seconds
        self._loaded = False

    def load(self) -> None:
        """Imports the driver, once."""
        if not self._loaded:
            self._within(_LOAD_SECONDS, self._inner.load)
            self._loaded = True

    def names(self, folder: str) -> list[str]:
        """Names of the objects and folders in a folder; empty where there is none."""
        return self._bounded(lambda: self._inner.names(folder))

    def read(self, path: str, limit: int) -> bytes | None:
        """A whole object, or None where there is none."""
        return self._bounded(lambda: self._inner.read(path, limit))

    def write(self, path: str, data: bytes) -> None:
        """Writes a whole object."""
        return self._bounded(lambda: self._inner.write(path, data))

    def remove(self, path: str) -> None:
        """Removes an object, unless another process was faster."""
        return self._bounded(lambda: self._inner.remove(path))

    def why_unusable(self) -> str:
        """Reason why nothing can be found here; else empty."""
        return self._bounded(self._inner.why_unusable)

    def _bounded(self, request: Callable[[], T]) -> T:
        self.load()
        return self._within(self._seconds, request)

    def _within(self, seconds: float, request: Callable[[], T]) -> T:
        try:
            return within(seconds, request)
        except OpsError:
            raise
        # Drivers raise errors of their own libraries; all of them mean that the place did not do what was asked.
        except Exception as error:
            raise StoreError(f"{shown(self._inner.url)}: {said(error)}") from error


class _Free:
    """A stand-in for a lock that is not needed."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def require_driver(url: str) -> None:
    """Raises where fsspec, or its driver for this URL, is not installed; nothing is imported or connected."""
    _require("fsspec", "ejkernel-ops[remote]", "remote stores need fsspec")
    scheme = scheme_of(url)
    module, package = _DRIVERS.get(scheme, ("fsspec", ""))
    _require(module, package, f"{shown(url)} needs a driver")


# Module and package of each driver that is not part of fsspec; those of other URLs are known when they are first used.
_DRIVERS = {
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3fs")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gcsfs")),
    **dict.fromkeys(("http", "https"), ("aiohttp", "aiohttp")),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), ("adlfs", "adlfs")),
    **dict.fromkeys(("sftp", "ssh"), ("paramiko", "paramiko")),
    "sshfs": ("sshfs", "sshfs"),
    "oci": ("ocifs", "ocifs"),
    "oss": ("ossfs", "ossfs"),
    "hf": ("huggingface_hub", "huggingface_hub"),
    "webdav": ("webdav4", "webdav4[fsspec]"),
}


def _require(module: str, package: str, what: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(f"{what}, and the module {module} is not installed: pip install '{package}'")


def _filesystem(url: str) -> tuple[Any, str]:
    _driver(url)
    core: Any = importlib.import_module("fsspec.core")
    # The program's own uses of fsspec keep their instances and their listings.
    fs, root = core.url_to_fs(url, skip_instance_cache=True)
    return fs, root


def _driver(url: str) -> None:
    require_driver(url)
    registry: Any = importlib.import_module("fsspec.registry")
    try:
        registry.get_filesystem_class(scheme_of(url))
    except ValueError as error:
        raise SettingError(
            f"{shown(url)}: fsspec knows no driver for {scheme_of(url)}:// ({error}); "
            "use s3://, gs://, sftp://, https:// or file://"
        ) from error
    except ImportError as error:
        raise MissingExtraError(f"{shown(url)} needs a driver that is not installed: {error}") from error


def _joined(root: str, path: str) -> str:
    return f"{root.rstrip('/')}/{path}" if path else root


def _try_to_remove(fs: Any, path: str) -> None:
    try:
        fs.rm_file(path)
    # The write has failed already, and says why.
    except (OSError, ValueError):
        return
