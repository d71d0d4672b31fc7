"""Folders of one user or of a group, and what all their users must be able to write. No JAX here."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from .folder_walk import folder_of, open_folder
from .plain_file import open_plain


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
