"""The few file operations that a store needs; the only file of this room that touches the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from dataclasses import dataclass

# One entry: no config comes near it, and a hostile file cannot fill the memory.
LARGEST_ENTRY = 1 << 20


class NotPlainError(OSError):
    """A link, a folder or a device where a plain file should be."""


@dataclass(frozen=True)
class Content:
    """Content of a file when it was read, and the file's identity and owner."""

    data: bytes
    identity: tuple[int, ...]
    owner: int


def read(path: str, limit: int | None = None) -> Content | None:
    """A whole plain file, or None where there is none; links are not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        # ELOOP is how O_NOFOLLOW refuses a link, ENXIO how a socket answers.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotPlainError(error.errno, "it is not a plain file", path) from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise NotPlainError(errno.EINVAL, "it is not a plain file", path)
        if limit is not None and found.st_size > limit:
            return Content(b"", _identity(found), found.st_uid)
        parts = []
        while part := os.read(descriptor, max(found.st_size, 1 << 16)):
            parts.append(part)
        return Content(b"".join(parts), _identity(found), found.st_uid)
    finally:
        os.close(descriptor)


def identity(path: str) -> tuple[int, ...] | None:
    """Identity of the file that lies here now; None where there is none."""
    try:
        return _identity(os.stat(path, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _identity(found: os.stat_result) -> tuple[int, ...]:
    # A rename always brings another inode or time; size catches editors that write in place within one tick.
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def size(path: str) -> int:
    """Bytes of a file, -1 where there is none."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return -1


def write(path: str, data: bytes, *, durable: bool) -> None:
    """Writes a whole file under a temporary name, then renames it: a reader sees the old or the new one."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    # Exclusive: a link that was planted under this name is an error, not followed. The umask sets the mode.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            _keep_mode(path, descriptor)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            _stamp(descriptor)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_folder(folder)


def _keep_mode(path: str, descriptor: int) -> None:
    try:
        old = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return
    # Permissions that a user gave the old file stay; those of a link's target are not taken over.
    if stat.S_ISREG(old.st_mode) and old.st_mode != os.fstat(descriptor).st_mode:
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def _stamp(descriptor: int) -> None:
    # The kernel's clock may tick only every few milliseconds, and inodes are used again: a file that was replaced
    # twice within a tick must not look like the first one. Where times cannot be set its own clock has to do.
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(descriptor, ns=(now, now))


def append_byte(path: str) -> int:
    """Makes a file one byte longer, a counter that needs no lock; returns its length."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.write(descriptor, b".")
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def names(folder: str) -> list[str]:
    """Names of the files in a folder; empty where there is no folder."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove(path: str) -> None:
    """Removes a file, unless another process was faster."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def move(path: str, to: str) -> None:
    """Renames a file, unless another process was faster."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, to)


def make_folder(path: str, *, durable: bool = False) -> None:
    """Makes a folder and its parents, with the permissions of the umask."""
    above, fresh = path, []
    while durable and above != os.path.dirname(above) and not os.path.isdir(above):
        above = os.path.dirname(above)
        fresh.append(above)
    os.makedirs(path, exist_ok=True)
    # A new folder is a name in its parent.
    for parent in fresh:
        sync_folder(parent)


def sync_folder(path: str) -> None:
    """Syncs a folder, so that the names in it survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
