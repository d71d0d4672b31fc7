"""The file operations of stores, each through a descriptor of its folder; no other module of a store uses the disk."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence

from ..core import plain_file
from ..core.folder_walk import folder_of, open_folder, resolved
from ..core.plain_file import MANY, Content, NotPlainError, TooLargeError

__all__ = ["MANY", "Content", "NotPlainError", "TooLargeError", "resolved"]

# Bytes of the largest entry: no real config comes near it, and a hostile file cannot fill the memory.
LARGEST_ENTRY = 1 << 20
# Bytes of the largest snapshot, which has some three million entries, and of a record, a recording or a result.
LARGEST_SNAPSHOT = 1 << 30
LARGEST_RECORD = 64 << 20
_LONGEST_BEGINNING = 4096
# A temporary file that is older was left by a process that died.
_STALE_SECONDS = 3600.0


def read(path: str, limit: int = LARGEST_SNAPSHOT) -> Content | None:
    """A whole plain file, or None where there is none; one over the limit is a `TooLargeError`."""
    return plain_file.read(path, limit)


def parts(path: str, limit: int = LARGEST_SNAPSHOT) -> Iterator[bytes]:
    """The bytes that `read` gives, in pieces: each is used once. A missing file is a `FileNotFoundError`."""
    return plain_file.parts(path, limit)


def same(path: str, pieces: Sequence[bytes | memoryview]) -> tuple[int, ...] | None:
    """The identity of a file that holds these very pieces; None where it does not."""
    return plain_file.same(path, pieces)


def identity(path: str) -> tuple[int, ...] | None:
    """Identity of the file that lies here now; None where there is none."""
    try:
        return plain_file.identity(os.stat(path, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return None


def length(path: str) -> tuple[int, int, int] | None:
    """Device, inode and bytes of a counter; None where there is none."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, found.st_size


def write(
    path: str,
    *pieces: bytes | memoryview,
    durable: bool,
    announce: Callable[[tuple[int, ...]], None] = lambda identity: None,
) -> None:
    """Writes a whole file under a temporary name, then renames it: a reader sees the old or the new one.

    `announce` is told the identity that the file will have, before it has its name.
    """
    with folder_of(path) as (folder, name):
        temporary = f".{name}.{secrets.token_hex(8)}.tmp"
        # Exclusive: a link that was planted under this name is an error, not followed. Neither group nor others may
        # write it, whatever the umask says: else it would count as written by any user.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o644, dir_fd=folder)
        try:
            try:
                _keep_mode(folder, name, descriptor)
                for piece in pieces:
                    view = memoryview(piece)
                    while view:
                        view = view[os.write(descriptor, view) :]
                _stamp(descriptor)
                announce(plain_file.identity(os.fstat(descriptor)))
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
    if durable:
        sync_folder(os.path.dirname(path))


def _keep_mode(folder: int, name: str, descriptor: int) -> None:
    new = os.fstat(descriptor)
    try:
        old = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        plain_file.open_to_owner(descriptor, new)
        return
    # The new file keeps the read permissions of the one that it replaces, if that is a plain file of this user.
    wanted = stat.S_IMODE(old.st_mode) & ~0o022
    if stat.S_ISREG(old.st_mode) and old.st_uid == os.getuid() and wanted != stat.S_IMODE(new.st_mode):
        os.fchmod(descriptor, wanted)


def _stamp(descriptor: int) -> None:
    # The kernel's clock may tick only every few milliseconds, and inodes are used again: a file that was replaced
    # twice within a tick must not look like the first one. Where times cannot be set its own clock has to do.
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(descriptor, ns=(now, now))


def note(path: str, text: str) -> None:
    """Makes a small file that is never changed, unless there is one."""
    descriptor = plain_file.open_plain(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def close_to_group(path: str) -> None:
    """Takes the permission to write from the group of a file of this user, where that works."""
    with contextlib.suppress(OSError):
        descriptor = plain_file.open_plain(path, os.O_RDONLY)
        try:
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & ~0o022)
        finally:
            os.close(descriptor)


def append_byte(path: str) -> tuple[tuple[int, int, int], int]:
    """Makes a counter one byte longer, which needs no lock; returns its device, inode and length, and what was added.

    A new one begins at random: an inode is used again, and a store that was rebuilt must not look like the old one.
    """
    descriptor = plain_file.make_shared(path, os.O_WRONLY | os.O_APPEND)
    try:
        added = 1 if os.fstat(descriptor).st_size else 1 + secrets.randbelow(_LONGEST_BEGINNING)
        os.write(descriptor, b"." * added)
        found = os.fstat(descriptor)
        return (found.st_dev, found.st_ino, found.st_size), added
    finally:
        os.close(descriptor)


def names(folder: str) -> list[str]:
    """Names of the files in a folder; empty where there is no folder."""
    try:
        # Raises where another user's link leads there.
        place = open_folder(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        # The folder that was judged, whatever its path leads to by now.
        listing = os.open(os.curdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
        try:
            return os.listdir(listing)
        finally:
            os.close(listing)
    finally:
        os.close(place)


def remove(path: str) -> None:
    """Removes a file, unless another process was faster."""
    with contextlib.suppress(FileNotFoundError), folder_of(path) as (folder, name):
        os.unlink(name, dir_fd=folder)


def move(path: str, to: str) -> None:
    """Renames a file, unless another process was faster."""
    with folder_of(path) as (folder, name), folder_of(to) as (other, new), contextlib.suppress(FileNotFoundError):
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=other)


def make_folder(path: str, *, durable: bool = False) -> None:
    """Makes a folder and its parents; the group may write it where the folder around it is a group's."""
    # A new folder is a name in its parent.
    plain_file.make_folder(path, lambda new: sync_folder(os.path.dirname(new)) if durable else None)


def sync_folder(path: str) -> None:
    """Syncs a folder, so that the names in it survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(folder: str, start: str) -> None:
    """Removes temporary files with names that begin so, which `write` left in processes that died long ago."""
    for left in names(folder):
        if left.startswith(start) and left.endswith(".tmp"):
            found = identity(os.path.join(folder, left))
            if found and time.time() - found[2] / 1e9 > _STALE_SECONDS:
                remove(os.path.join(folder, left))


def are_of(owner: int, folders: Sequence[str]) -> bool:
    """Are these folders, as far as they are there, one user's or root's, and no other user's to write?"""
    if owner < 0:
        return False
    for folder in folders:
        try:
            found = os.stat(folder)
        except FileNotFoundError:
            continue
        except OSError:
            return False
        if found.st_uid not in (owner, 0) or found.st_mode & 0o022:
            return False
    return True
