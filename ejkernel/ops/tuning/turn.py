"""One tuning at a time on a device, over the threads of this process and over processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import filelock

from ..core.stable import short_hash

# Long enough for any sane tuning of another process; after that two noisy measurements beat none.
_WAIT_SECONDS = 600.0

_locks: dict[str, threading.RLock] = {}
# Turns that the thread that holds a device's lock is in: a tuning inside a tuning already has its turn.
_depths: dict[str, int] = {}
_locks_lock = threading.Lock()


@contextlib.contextmanager
def turn(device: str, folder: Path | None) -> Iterator[None]:
    """Waits until nobody else times anything on this device; without a folder, nobody else in this process."""
    with _locks_lock:
        mine = _locks.setdefault(device, threading.RLock())
    with mine:
        depth = _depths.get(device, 0)
        _depths[device] = depth + 1
        try:
            with _between_processes(device, folder) if depth == 0 else contextlib.nullcontext():
                yield
        finally:
            _depths[device] = depth


@contextlib.contextmanager
def _between_processes(device: str, folder: Path | None) -> Iterator[None]:
    lock = None
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(folder / f"{short_hash(device)}.lock", timeout=_WAIT_SECONDS)
            lock.acquire()
        # No place for a lock, or a holder that hangs: measure without it, since a config is wanted now.
        except (OSError, filelock.Timeout):
            lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
