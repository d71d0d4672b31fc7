"""Listings of a remote, shared by the processes of one machine: one of them asks, the others read its answer."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

from ...core import codec
from ...core.plain_file import Timeout, lock_at
from .. import files
from ..snapshot import key_hash

# So old may another process's listing be: processes of one job start within it.
SHARED_SECONDS = 60.0
# A listing of a million names; a larger file is not ours.
_LARGEST = 128 << 20


@final
class SharedListings:
    """The latest listing of each folder of a remote, in files of the user's cache folder."""

    def __init__(self, folder: Path, url: str, *, fresh: float = SHARED_SECONDS) -> None:
        self.folder = folder / key_hash(url)
        # Processes that started together do not list together again later.
        self.fresh = fresh * random.uniform(0.75, 1.25)

    def get(self, name: str, ask: Callable[[], list[str]], *, wait: float, after: float = 0.0) -> list[str]:
        """The names in a folder: another process's listing where that is fresh, else asked and left for the others.

        A listing that was made before `after` is known to be out of date.
        """
        path = str(self.folder / f"{key_hash(name)}.json")
        found = self._kept(path, after)
        if found is not None:
            return found
        try:
            files.make_folder(str(self.folder))
            file_lock = lock_at(f"{path}.lock", timeout=wait)
            # Jitter: waiting processes do not all look at the same moment.
            file_lock.acquire(poll_interval=random.uniform(0.02, 0.06))
        # Another process takes too long, or this folder cannot be written: each process asks by itself.
        except (Timeout, OSError, NotImplementedError):
            return ask()
        try:
            found = self._kept(path, after)
            if found is None:
                found = ask()
                self._keep(path, found)
            return found
        finally:
            file_lock.release()

    def drop(self, name: str) -> None:
        """Forgets a listing that this process has just made out of date."""
        # The listing is old in a minute in any case.
        with contextlib.suppress(OSError):
            files.remove(str(self.folder / f"{key_hash(name)}.json"))

    def _kept(self, path: str, after: float) -> list[str] | None:
        try:
            content = files.read(path, _LARGEST)
            data = codec.loads(content.data) if content is not None and content.author == os.getuid() else None
        # Half a file or none that can be read: as if there were none.
        except (OSError, ValueError):
            return None
        if not isinstance(data, dict) or not isinstance(data.get("names"), list):
            return None
        listed = data.get("listed")
        # A clock that was set back must not keep a listing for ever.
        if not isinstance(listed, (int, float)) or not (0 <= time.time() - listed <= self.fresh and listed > after):
            return None
        return [str(name) for name in data["names"]]

    def _keep(self, path: str, names: list[str]) -> None:
        # A full disk costs the others their own listing.
        with contextlib.suppress(OSError):
            files.write(path, json.dumps({"listed": time.time(), "names": names}).encode(), durable=False)
