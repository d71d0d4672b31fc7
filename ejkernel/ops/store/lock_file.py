"""Lock files: a program's decisions in one reviewed file, and the message on a call outside it. No JAX here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from ..core.description import KnownCall, nearest, one_line
from ..core.errors import RecordFormatError
from ..core.key import Key
from . import bundle
from .remote.url_files import located
from .store import StoredEntry


@final
@dataclass(frozen=True, eq=False, repr=False)
class LockFile(Mapping[Key, Any]):
    """The cfgs of a lock file by key, as JSON gives them; where one is in force, nothing else answers."""

    path: str
    entries: Mapping[Key, StoredEntry]
    digest: str

    def __getitem__(self, key: Key) -> Any:
        """The cfg of a key."""
        return self.entries[key].cfg

    def __iter__(self) -> Iterator[Key]:
        """Every key."""
        return iter(self.entries)

    def __len__(self) -> int:
        """Number of calls."""
        return len(self.entries)

    def __repr__(self) -> str:
        """Path and number of calls."""
        return f"<lock {self.path}: {len(self)} calls>"

    def known(self) -> list[KnownCall]:
        """The calls, for the search of the nearest one."""
        return [KnownCall(key, entry.call, self.path) for key, entry in self.entries.items()]

    def why_not(self, key: Key, call: Mapping[str, str]) -> str:
        """Reason why a call has no answer here: another device, another program, or the nearest entry."""
        devices = {other.device for other in self.entries}
        if self.entries and key.device not in devices:
            return f"{self.path} is for {_listed(devices)}, and this call is for {key.device}"
        near = nearest(key, call, self.known(), most=1)
        if not near:
            held = _listed({other.op_id for other in self.entries}) or "nothing"
            return f"{self.path} has no entry of {key.op_id}, so it may be another program's: it holds {held}"
        other, held = near[0], one_line(near[0].key.op_id, self.entries[near[0].key].call)
        asked = one_line(key.op_id, call)
        return f"no entry in {self.path} for {asked}; nearest is {held}, call {other.key.call_key}: {other.differing}"


def read_lock(path: str | os.PathLike[str]) -> LockFile:
    """Reads a lock file; a line that does not fit its checksum is an error, one without a checksum was edited."""
    where = located(path)
    try:
        found = bundle.read("lock", where)
    except RecordFormatError as error:
        raise RecordFormatError(f"{error}; freeze(path, ...) writes a lock file") from error
    return LockFile(where, found.entries, found.digest)


def write_lock(path: str | os.PathLike[str], entries: Mapping[Key, StoredEntry]) -> LockFile:
    """Writes a lock file, over the one that is there: the repository keeps its history."""
    return read_lock(bundle.save("lock", path, entries, {}))


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:4]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
