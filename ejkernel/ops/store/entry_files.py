"""The names of entry files and what one of them holds.

An entry file is named by the hash of its key, the count of the put and its writer; once it was folded it lies in
`folded/`, with the second of that before its name. Beside those lie marks: a snapshot that a fold wrote is known by
inode, time and size, and one that was edited has no mark. No JAX here.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from . import files
from .snapshot import Raw, is_whole, key_hash, parse

# An entry file that was folded stays so long; where so many newer ones are there only for the shorter time, and for
# some times as long as a fold takes.
FOLDED_SECONDS = 300
_FOLDED_COUNT, _LEAST_FOLDED_SECONDS = 256, 3
_FOLD_TIMES = 4

ENTRY_NAME = re.compile(r"([0-9a-f]{24})\.(\d{1,18})\.([0-9a-f]{16})\.json")
FOLDED_NAME = re.compile(r"folded/(\d{1,12})\.(([0-9a-f]{24})\.(\d{1,18})\.([0-9a-f]{16})\.json)")
MARK_NAME = re.compile(r"by\.(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True)
class StoredText:
    """An entry as it lies on disk, and the user that owns its file."""

    raw: Raw
    owner: int


class Removed:
    """An entry file that a fold removed since the last read."""


def sequence_of(file_name: str) -> int:
    """The count of puts in the name of an entry file."""
    return int(file_name.split(".")[-3])


def is_folded(file_name: str) -> bool:
    """Is this the name of an entry file that was folded?"""
    return file_name.startswith("folded/")


def plain_name(file_name: str) -> str:
    """The name that an entry file had before it was folded."""
    return file_name.split(".", 1)[1] if is_folded(file_name) else file_name


def mark_of(identity: tuple[int, ...]) -> str:
    """The name of the mark of a snapshot with this identity."""
    # Without the device, which has other numbers on other machines.
    return ".".join(("by", *map(str, identity[1:])))


def folded_at(file_name: str) -> int:
    """The second in which an entry file was folded."""
    return int(file_name.removeprefix("folded/").split(".")[0])


def marked_at(name: str) -> int:
    """The second of the snapshot that a mark names."""
    return int(name.split(".")[2]) // 10**9


def past(names: list[str], second: Callable[[str], int], took: float) -> Iterator[str]:
    """The names that have been there for long enough; a fold took so many seconds."""
    now, least = int(time.time()), max(_LEAST_FOLDED_SECONDS, _FOLD_TIMES * took)
    for place, name in enumerate(sorted(names, key=second, reverse=True)):
        # Where clocks differ one may be of the future.
        if not -FOLDED_SECONDS <= now - second(name) <= (least if place >= _FOLDED_COUNT else FOLDED_SECONDS):
            yield name


def digest_of(pieces: Iterable[bytes | memoryview]) -> str:
    """The digest of a whole snapshot, in the mark of the fold that wrote it."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def is_as_folded(path: str, identity: tuple[int, ...], pieces: Iterable[bytes]) -> bool:
    """Is this snapshot, byte for byte, one that a fold of this user wrote with every line checked?"""
    try:
        mark = files.read(os.path.join(f"{path}.d", "folded", mark_of(identity)), 1024)
    except OSError:
        return False
    known = mark is not None and mark.data and mark.author in (os.getuid(), 0)
    return bool(known) and mark is not None and mark.data.decode("latin-1") == digest_of(pieces)


def entry_names(path: str) -> list[str]:
    """The entry files beside a snapshot; those that were folded lately too, unless a hand has edited it since."""
    names = files.names(f"{path}.d")
    lately = files.names(os.path.join(f"{path}.d", "folded")) if "folded" in names else []
    there = files.identity(path)
    lately = lately if there is not None and mark_of(there) in lately else []
    return [name for name in names if ENTRY_NAME.fullmatch(name)] + [
        f"folded/{name}" for name in lately if FOLDED_NAME.fullmatch(f"folded/{name}")
    ]


def entry_in(file_name: str, data: bytes) -> tuple[str, Raw] | None:
    """The spelled key and the entry in an entry file; None where it is damaged, or is not what its name says."""
    parsed = parse(data.decode("utf-8", "replace"))
    if parsed is None or not is_whole(*parsed):
        return None
    name, raw = parsed
    code, seq, writer, _ = file_name.split(".")[-4:]
    told = f"{key_hash(name)}.{raw.get('seq')}.{raw.get('writer')}"
    return parsed if told == f"{os.path.basename(code)}.{seq}.{writer}" else None
