"""Locks between processes, on files that are checked before they are opened. No JAX here."""

from __future__ import annotations

import os

import filelock

from .shared_folder import make_shared

Timeout = filelock.Timeout
FileLock = filelock.FileLock


def lock_at(path: str | os.PathLike[str], *, timeout: float, thread_local: bool = True) -> filelock.FileLock:
    """A lock on a file; an `OSError` where a link, a pipe or a device lies there."""
    where = os.fspath(path)
    os.close(make_shared(where, os.O_RDWR))
    return filelock.FileLock(where, timeout=timeout, thread_local=thread_local)
