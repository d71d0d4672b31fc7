"""The one opener: every file that is read is a plain one of bounded size, opened without waiting. No JAX here.

What all users of a group's folder must be able to write, such as a lock, is made so that they can.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import filelock

from .folder_walk import ForeignLinkError, NotPlainError, folder_of, open_folder

__all__ = ["MANY", "Content", "ForeignLinkError", "NotPlainError", "TooLargeError", "author", "open_plain", "read"]

# The author of a file that more users than its owner may write.
MANY = -2
# One read of a large file.
_PART = 1 << 24


class TooLargeError(OSError):
    """A file that is larger than any file of its kind."""


@dataclass(frozen=True)
class Content:
    """Content of a file when it was read, and the file's identity, owner and permissions."""

    data: bytes
    identity: tuple[int, ...]
    owner: int
    mode: int = 0o600

    @property
    def author(self) -> int:
        """The user that wrote this."""
        return author(self.owner, self.mode)

    @property
    def is_left_open(self) -> bool:
        """Is this a file of this user that its group may write, as a umask of 002 leaves it?"""
        return self.owner == os.getuid() and self.mode & 0o022 == 0o020


def author(owner: int, mode: int) -> int:
    """The user that wrote a file: its owner, unless the group or others may write it too."""
    return owner if not mode & 0o022 else MANY


def open_plain(path: str, flags: int, mode: int = 0o644) -> int:
    """A descriptor of a plain file: links, pipes and devices are a `NotPlainError`, and nothing waits.

    To be written, a file must have one name: a hard link would lead the write into another file.
    """
    with folder_of(path) as (folder, name):
        try:
            descriptor = os.open(
                name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, mode, dir_fd=folder
            )
        except OSError as error:
            # ELOOP is how O_NOFOLLOW refuses a link, ENXIO how a socket or a pipe without a reader answers.
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise NotPlainError(error.errno, "it is not a plain file", path) from error
            raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise NotPlainError(errno.EINVAL, "it is not a plain file", path)
        if flags & (os.O_WRONLY | os.O_RDWR) and found.st_nlink > 1:
            raise NotPlainError(errno.EMLINK, "it is a hard link to another file", path)
        if flags & os.O_CREAT:
            open_to_owner(descriptor, found)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_to_owner(descriptor: int, found: os.stat_result) -> None:
    """Gives the owner of a new file its permissions back where the umask took them: else no process could read it."""
    if found.st_mode & 0o600 != 0o600 and found.st_uid == os.getuid():
        os.fchmod(descriptor, stat.S_IMODE(found.st_mode) | 0o600)


def read(path: str, limit: int) -> Content | None:
    """A whole plain file, or None where there is none; over the limit it is a `TooLargeError`."""
    try:
        descriptor = open_plain(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
        parts, left = [], limit + 1
        if found.st_size <= limit:
            # Also a file that grows while it is read ends.
            # In one piece, as a rule: pieces that are joined take twice the memory.
            expected = found.st_size
            while left > 0 and (part := os.read(descriptor, min(left, max(expected, 1 << 16)))):
                parts.append(part)
                left -= len(part)
                expected -= len(part)
        if found.st_size > limit or left <= 0:
            raise _too_large(path, max(found.st_size, limit + 1), limit)
        return Content(b"".join(parts), identity(found), found.st_uid, stat.S_IMODE(found.st_mode))
    finally:
        os.close(descriptor)


def _too_large(path: str, size: int, limit: int) -> TooLargeError:
    return TooLargeError(errno.EFBIG, f"it has {size:,} bytes, and may have {limit:,}; move it away", path)


def parts(path: str, limit: int) -> Iterator[bytes]:
    """A whole plain file in pieces, for what looks at each once; over the limit it is a `TooLargeError`."""
    descriptor = open_plain(path, os.O_RDONLY)
    try:
        left = limit
        while part := os.read(descriptor, _PART):
            left -= len(part)
            if left < 0:
                raise _too_large(path, limit + 1, limit)
            yield part
    finally:
        os.close(descriptor)


def same(path: str, pieces: Sequence[bytes | memoryview]) -> tuple[int, ...] | None:
    """The identity of a file that holds these very pieces; None where it does not. Nothing is copied."""
    try:
        descriptor = open_plain(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        found = identity(os.fstat(descriptor))
        for piece in pieces:
            view = memoryview(piece)
            while view:
                part = os.read(descriptor, min(_PART, len(view)))
                if not part or part != view[: len(part)]:
                    return None
                view = view[len(part) :]
        return None if os.read(descriptor, 1) else found
    finally:
        os.close(descriptor)


def identity(found: os.stat_result) -> tuple[int, ...]:
    """Identity of a file's content: a rename always brings another inode or time, an edit in place another time."""
    # The size catches editors that write in place within one tick of the clock.
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def shared_bits(folder: os.stat_result) -> int:
    """Permissions to write that a folder passes on to what all its users must write; 0 for a folder of one user.

    A folder is a group's where its group may write it and new files get that group (the set-group-ID bit), as
    `chmod 2775` does. One that every user may write passes that on, as far as the umask allows.
    """
    mode = folder.st_mode
    bits = 0o020 if _is_groups(folder) else 0
    return bits | (mode & 0o022 if mode & 0o002 else 0)


def _is_groups(folder: os.stat_result) -> bool:
    return bool(folder.st_mode & stat.S_ISGID and folder.st_mode & 0o020)


def make_shared(path: str, flags: int) -> int:
    """A descriptor of a file that every user of its folder must be able to write, such as a lock; made if missing."""
    try:
        return open_plain(path, flags)
    except FileNotFoundError:
        pass
    with folder_of(path) as (folder, _):
        found = os.fstat(folder)
    try:
        descriptor = open_plain(path, flags | os.O_CREAT | os.O_EXCL, 0o644 | shared_bits(found))
    # Another process was faster.
    except FileExistsError:
        return open_plain(path, flags)
    if _is_groups(found):
        # Whatever the umask: the folder asks for it.
        os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) | 0o020)
    return descriptor


def make_folder(path: str, made: Callable[[str], None] = lambda path: None) -> None:
    """Makes a folder and its parents; the group may write it where the folder around it is a group's.

    `made` is called with each new one.
    """
    above, fresh = path, []
    while above != os.path.dirname(above) and not os.path.isdir(above):
        fresh.append(above)
        above = os.path.dirname(above)
    for new in reversed(fresh):
        _make_one(new)
        made(new)
    # Raises where something else lies there, such as another user's link.
    os.close(open_folder(path))


def _make_one(path: str) -> None:
    with folder_of(path) as (folder, name):
        around = os.fstat(folder)
        try:
            os.mkdir(name, 0o755 | shared_bits(around), dir_fd=folder)
        except FileExistsError:
            return
        mode = stat.S_IMODE(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        # Whatever the umask: its owner must be able to use it, and its group where the folder around it asks for that.
        wanted = mode | 0o700 | (0o020 if _is_groups(around) else 0)
        if mode != wanted:
            os.chmod(name, wanted, dir_fd=folder)


Timeout = filelock.Timeout
FileLock = filelock.FileLock


def lock_at(path: str | os.PathLike[str], *, timeout: float, thread_local: bool = True) -> filelock.FileLock:
    """A lock on a file; an `OSError` where a link, a pipe or a device lies there."""
    where = os.fspath(path)
    os.close(make_shared(where, os.O_RDWR))
    return filelock.FileLock(where, timeout=timeout, thread_local=thread_local)
