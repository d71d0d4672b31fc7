"""The way to a file: folder by folder with descriptors, over links of this user or root alone. No JAX here."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

# As many as Linux follows.
_MOST_LINKS = 40
# O_PATH needs no permission to list a folder. Where there is none, folders are opened for reading.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC

# Folders that were walked to, by this user and path: their device and inode.
_walked: dict[tuple[int, str], tuple[int, int]] = {}
# A program has a handful of folders; the bound is for one that makes new ones for ever.
_MOST_WALKED = 1024


class NotPlainError(OSError):
    """A link, a folder, a pipe or a device where a plain file should be."""


class ForeignLinkError(NotPlainError):
    """A link that another user made, or one to a file or folder of another user."""


def is_ours(found: os.stat_result) -> bool:
    """Does this belong to the user of this process, or to root?"""
    return found.st_uid in (os.getuid(), 0)


def _foreign(path: str) -> ForeignLinkError:
    return ForeignLinkError(
        errno.ELOOP,
        "a link on the way is another user's, or leads to another user's file; give the path behind it",
        path,
    )


def resolved(path: str) -> str:
    """The path behind links of this user or root, as `os.path.realpath`; any other link is a `ForeignLinkError`."""
    path = os.path.abspath(path)
    seen = 0
    while True:
        parent, name = os.path.split(path)
        if not name:
            return path
        real = _real_folder(parent)
        whole = os.path.join(real, name)
        try:
            found = os.stat(whole, follow_symlinks=False)
        # Missing, or hidden from this user: the first use says so.
        except OSError:
            return whole
        if not stat.S_ISLNK(found.st_mode):
            return whole
        seen += 1
        target = os.path.normpath(os.path.join(real, os.readlink(whole)))
        if not is_ours(found) or not _is_ours_if_there(whole):
            raise _foreign(whole)
        if seen > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        path = target


def _is_ours_if_there(path: str) -> bool:
    try:
        return is_ours(os.stat(path))
    # A link to nothing: what it will lead to is made by this process.
    except OSError:
        return True


def _real_folder(path: str) -> str:
    # Raises where a link on the way is another user's.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        _walk(path)
    return os.path.realpath(path)


def open_folder(path: str) -> int:
    """A descriptor of a folder, for operations inside it; a `ForeignLinkError` where another user's link led there."""
    path = path or "."
    descriptor = os.open(path, _FOLDER)
    try:
        found = os.fstat(descriptor)
        place, known = (found.st_dev, found.st_ino), (os.getuid(), path)
        # Checked once for each folder: while it is the same one it does not matter how the path leads there.
        if _walked.get(known) != place:
            if _walk(os.path.abspath(path)) != place:
                raise NotPlainError(errno.ESTALE, "the folder was replaced while it was opened", path)
            if len(_walked) >= _MOST_WALKED:
                _walked.clear()
            _walked[known] = place
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def folder_of(path: str) -> Iterator[tuple[int, str]]:
    """A descriptor of the folder that a path lies in, and the name in it."""
    parent, name = os.path.split(path)
    descriptor = open_folder(parent)
    try:
        yield descriptor, name
    finally:
        os.close(descriptor)


def _walk(path: str) -> tuple[int, int]:
    """Device and inode of a folder, reached one name after the other."""
    parts = path.split(os.sep)[::-1]
    here = os.open(os.sep, _FOLDER)
    links = 0
    try:
        while parts:
            part = parts.pop()
            if part in ("", os.curdir):
                continue
            found = os.stat(part, dir_fd=here, follow_symlinks=False)
            if not stat.S_ISLNK(found.st_mode):
                here = _step(here, part, os.O_NOFOLLOW)
                continue
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if not is_ours(found):
                raise _foreign(path)
            target = os.readlink(part, dir_fd=here)
            if os.path.isabs(target):
                here = _step(here, os.sep, 0)
            parts += target.split(os.sep)[::-1]
        found = os.fstat(here)
        return found.st_dev, found.st_ino
    finally:
        os.close(here)


def _step(here: int, part: str, flags: int) -> int:
    following = os.open(part, _FOLDER | flags, dir_fd=here)
    os.close(here)
    return following
