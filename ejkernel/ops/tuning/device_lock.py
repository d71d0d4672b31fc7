"""One tuning at a time on a device, over the threads of this process and over processes."""

from __future__ import annotations

import contextlib
import math
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..core.file_lock import Timeout, lock_at
from ..core.shared_folder import make_folder
from ..core.stable import short_hash

# Long enough for any sane tuning of another process; after that two noisy measurements beat none.
_WAIT_SECONDS = 600.0

_locks: dict[str, threading.RLock] = {}
# Turns that the thread that holds a device's lock is in: a tuning inside a tuning already has its turn.
_depths: dict[str, int] = {}
_locks_lock = threading.Lock()


@contextlib.contextmanager
def device_lock(device: str, folder: Path | None, wait: float = math.inf) -> Iterator[None]:
    """Waits until no other thread or process times anything on this device; without a folder, no other thread.

    After the wait the caller goes on without its turn: a config is wanted now, and a deadline is a deadline.
    """
    with _locks_lock:
        mine = _locks.setdefault(device, threading.RLock())
    end = time.perf_counter() + max(0.0, min(wait, _WAIT_SECONDS))
    held = mine.acquire(timeout=max(0.0, end - time.perf_counter()))
    depth = _depths.get(device, 0) if held else 0
    try:
        if held:
            _depths[device] = depth + 1
        with _between_processes(device, folder, end) if held and depth == 0 else contextlib.nullcontext():
            yield
    finally:
        if held:
            _depths[device] = depth
            mine.release()


def lock_path(folder: Path, device: str) -> Path:
    """The file that a process of this machine locks while it times something on such a device.

    The folder may be shared by many machines, which have devices of one kind and must not wait for each other.
    """
    return folder / f"{short_hash(f'{platform.node()}|{device}')}.lock"


@contextlib.contextmanager
def _between_processes(device: str, folder: Path | None, end: float) -> Iterator[None]:
    lock = None
    if folder is not None:
        try:
            make_folder(str(folder))
            left = max(0.0, end - time.perf_counter())
            lock = lock_at(lock_path(folder, device), timeout=left)
            lock.acquire()
        # No place for a lock, or a holder that does not end in time.
        except (OSError, Timeout):
            lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
