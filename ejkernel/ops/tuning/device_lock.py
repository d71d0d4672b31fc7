"""One tuning at a time on a device, over the threads of this process and over processes."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from ..core import plain_file
from ..core.device import device_fingerprint, get_device_platform
from ..core.plain_file import FileLock, Timeout, lock_at, make_folder, make_shared
from ..core.stable import short_hash
from ..settings import hardware_number, own_folder
from .stopped import STOPPED_SECONDS, is_stopped

# Long enough for any sane tuning of another process; after that two noisy measurements beat none.
_WAIT_SECONDS = 600.0

# How often the holder is looked at, and the most that a lock file says of it.
_POLL_SECONDS = 1.0
_LONGEST_NUMBER = 16

_said: set[str] = set()


class DeviceLockWarning(UserWarning):
    """A tuning that does not wait for its turn on a device."""


_mutexes: dict[str, threading.RLock] = {}
# Turns that the thread that holds a device's lock is in: a tuning inside a tuning already has its turn.
_depths: dict[str, int] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def device_lock(device: str, folder: Path | None, wait: float = math.inf) -> Iterator[None]:
    """Waits until no other thread or process times anything on this device; without a folder, no other thread.

    After the wait the caller goes on without its turn: a config is wanted now, and a deadline is a deadline.
    """
    with _lock:
        mine = _mutexes.setdefault(device, threading.RLock())
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


def turn_name(device: jax.Device) -> str:
    """The device that tunings take turns on: its kind, and on a machine with several of them, which one."""
    kind, platform = device_fingerprint(device), get_device_platform(device)
    if platform == "cpu":
        return kind
    number = getattr(device, "local_hardware_id", None)
    return f"{kind}#{hardware_number(platform, device.id if number is None else number)}"


def lock_path(folder: Path, device: str) -> Path:
    """The file that a process of this machine locks while it times something on such a device.

    The folder may be shared by many machines, which have devices of one kind and must not wait for each other.
    """
    return folder / f"{short_hash(f'{platform.node()}|{device}')}.lock"


@contextlib.contextmanager
def _between_processes(device: str, folder: Path | None, end: float) -> Iterator[None]:
    taken: list[str] = []
    with contextlib.ExitStack() as held:
        # This user's own folder first, whatever the stores' folder is: processes of one user wait for each other with
        # two cache folders too. The order is the same everywhere, so no two processes wait for each other's lock.
        for place in () if folder is None else (own_folder() / "locks", folder):
            # No place for a lock: then no other process can be waited for.
            with contextlib.suppress(OSError):
                make_folder(str(place))
                path = str(lock_path(place, device))
                # One folder by two names: this process must not wait for itself.
                if any(map(_same_file(path), taken)):
                    continue
                file_lock = _turn(path, end)
                taken.append(path)
                if file_lock is not None:
                    held.callback(file_lock.release)
                else:
                    # It goes on without its turn: a lock that is free still tells others that it is at work.
                    end = time.perf_counter()
        yield


def _same_file(path: str) -> Callable[[str], bool]:
    os.close(make_shared(path, os.O_RDWR))
    return lambda other: os.path.samefile(path, other)


def _turn(path: str, end: float) -> FileLock | None:
    """The lock once it is free; None where its holder does not end in time, or is stopped."""
    file_lock = lock_at(path, timeout=0)
    stopped_since = None
    while True:
        now = time.perf_counter()
        try:
            file_lock.acquire(timeout=min(_POLL_SECONDS, max(0.0, end - now)))
        except Timeout:
            holder = _holder(path)
            stopped_since = (stopped_since or now) if holder is not None and is_stopped(holder) else None
            if stopped_since is not None and now - stopped_since > STOPPED_SECONDS:
                _say(
                    f"process {holder} holds {path} and is stopped, so this tuning does not wait for its turn; "
                    f"continue it with `kill -CONT {holder}`, or end it"
                )
                return None
            if now >= end:
                return None
        else:
            _sign(path)
            return file_lock


def _holder(path: str) -> int | None:
    """The process that holds a lock, as far as it says: any user of the folder may have written that."""
    try:
        content = plain_file.read(path, _LONGEST_NUMBER)
    except OSError:
        return None
    text = b"" if content is None else content.data.strip()
    return int(text) if text.isdigit() else None


def _sign(path: str) -> None:
    # For those that wait. Without it they wait for as long as they would for any other holder.
    with contextlib.suppress(OSError):
        descriptor = plain_file.open_plain(path, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(descriptor, str(os.getpid()).encode())
        finally:
            os.close(descriptor)


def _say(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(message, DeviceLockWarning, stacklevel=2)
