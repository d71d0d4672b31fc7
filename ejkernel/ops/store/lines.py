"""The lines of a snapshot, one entry each: held against their checksums, and found where they lie in a large file.

Many lines are checked at once, which takes a third of the time that they take alone. Lines that are sorted are found by
halving, with eight bytes of memory for each beside the file. No JAX here.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

from .files import LARGEST_ENTRY

Raw = Mapping[str, Any]

# Counts of puts stay far below: an entry of ours that claims more is damaged, and one written by hand counts as 0. A
# writer that sees one as large as this sets it aside, since nothing could be counted after it.
LARGEST_SEQ = 10**12
# Deeper than any entry that we write, since a cfg has at most 64 levels; far below Python's own limit.
DEEPEST = 80

# As json.dumps makes one for every call; what was parsed or encoded before does not contain itself.
_SORTED = json.JSONEncoder(sort_keys=True, check_circular=False)
# So many lines are parsed at once, unless they are long: more make it no quicker, and hold memory.
_LINES, _LETTERS = 256, 1 << 18
# Stands between lines that are parsed at once. No author of a file can know it, so no line can pretend to hold two.
_BETWEEN = secrets.token_hex(8)
_KEYS = [f"{_BETWEEN}{number}" for number in range(_LINES)]
_GAPS = [f'"{key}":0,' for key in _KEYS]
# Sorted lines that are decoded at once.
_BLOCK = 256


def has_count(raw: Raw) -> bool:
    """Is the number of an entry a count of puts? One without a number was written by hand."""
    seq = raw.get("seq", 0)
    return isinstance(seq, int) and not isinstance(seq, bool) and 0 <= seq <= LARGEST_SEQ


def seal(name: str, raw: Raw) -> dict[str, Any]:
    """The entry with the checksum of its key and content."""
    return {**raw, "sha256": hashed(spelled(name, raw))}


def is_whole(name: str, raw: Raw) -> bool:
    """Is this what was written? An entry without a checksum was written by hand, and is taken as it is."""
    return "sha256" not in raw or (has_count(raw) and raw["sha256"] == hashed(spelled(name, raw)))


def spelled(name: str, raw: Raw) -> str:
    """The text that a checksum is made of: the key and the content without the checksum, in one order."""
    return _SORTED.encode([name, {field: value for field, value in raw.items() if field != "sha256"}])


def hashed(text: str) -> str:
    """The checksum of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def whole_entries(
    pairs: Iterable[tuple[str, str]], alone: Callable[[str, str], Raw | None], *, are_checked: bool = False
) -> Iterator[tuple[str, Raw]]:
    """The entries of lines, by their keys, that fit their checksums; `alone` judges a line that needs more care.

    Lines that `are_checked` are known to fit, and are parsed alone.
    """
    for names, lines in _blocks(pairs):
        raws = _parsed(names, lines)
        found = raws if are_checked else _fitting(names, raws)
        for name, text, raw in zip(names, lines, found, strict=True):
            entry = alone(name, text) if raw is None else raw
            if entry is not None:
                yield name, entry


def _blocks(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    names: list[str] = []
    lines: list[str] = []
    letters = 0
    for name, text in pairs:
        names.append(name)
        lines.append(text)
        letters += len(text)
        if len(lines) == _LINES or letters > _LETTERS:
            yield names, lines
            names, lines, letters = [], [], 0
    if lines:
        yield names, lines


def _parsed(names: list[str], lines: list[str]) -> list[dict[str, Any] | None]:
    """The entry of each line that looks like one of ours; None where it has to be looked at alone."""
    if max(map(len, lines)) > LARGEST_ENTRY:
        return [None] * len(lines)
    try:
        data = json.loads("{" + "".join(chain.from_iterable(zip(lines, _GAPS, strict=False)))[:-1] + "}")
    except (ValueError, RecursionError):
        return [None] * len(lines)
    # Each line is one key and its entry, and ends where its text ends.
    if list(data) != list(chain.from_iterable(zip(names, _KEYS, strict=False))):
        return [None] * len(lines)
    return [_if_ours(data[name], text) for name, text in zip(names, lines, strict=True)]


def _if_ours(raw: Any, text: str) -> dict[str, Any] | None:
    few = text.count("{") + text.count("[") <= DEEPEST
    is_ours = few and isinstance(raw, dict) and "cfg" in raw and raw.get("sha256") is not None and has_count(raw)
    return raw if is_ours else None


def _fitting(names: list[str], raws: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """The entries that fit their checksums; None for the others."""
    told = [None if raw is None else raw.pop("sha256") for raw in raws]
    shown = [0 if raw is None else [name, raw] for name, raw in zip(names, raws, strict=True)]
    text = _SORTED.encode(list(chain.from_iterable((each, _BETWEEN) for each in shown)))
    # As Python spells numbers that JSON does not have.
    if "Infinity" in text or "NaN" in text:
        return [None] * len(raws)
    found = []
    for raw, sha, spelling in zip(raws, told, text[1:].split(f', "{_BETWEEN}"')[:-1], strict=True):
        fits = raw is not None and sha == hashed(spelling.removeprefix(", "))
        found.append({**raw, "sha256": sha} if raw is not None and fits else None)
    return found


class SortedLines(MutableMapping[str, str]):
    """Lines by their spelled keys: those of a sorted file, and changes to them that are kept apart."""

    def __init__(self, data: bytes, starts: array[int], changes: dict[str, str | None] | None = None) -> None:
        self._data = data
        self._starts = starts
        # None: the line is gone.
        self._changes: dict[str, str | None] = {} if changes is None else changes

    @staticmethod
    def of(data: bytes, begin: int, end: int, *, after: bytes = b"") -> SortedLines | None:
        """The lines between two places of a file; None where one is not as we write it, or they are not sorted.

        `after` is the key of the line before them.
        """
        starts = array("Q")
        find, last, place = data.find, after, begin
        while place < end:
            stop = find(b"\n", place, end)
            # A name with an escape, and a line without a checksum, which was written by hand, need more care.
            quote = find(b'"', place + 1, stop)
            name = data[place + 1 : quote]
            if (
                stop < 0
                or name <= last
                or data[place] != 0x22
                or b"\\" in name
                or name.count(b"|") < 2
                or data[quote : quote + 4] != b'": {'
                or data[stop - 2 : stop] != b"},"
                or find(b'"sha256": ', quote, stop) < 0
            ):
                return None
            starts.append(place)
            last, place = name, stop + 1
        return SortedLines(data, starts)

    @property
    def first(self) -> bytes:
        """The key of the first line, as it lies in the file."""
        return self._key(self._starts[0]) if self._starts else b""

    @property
    def last(self) -> bytes:
        """The key of the last line, as it lies in the file."""
        return self._key(self._starts[-1]) if self._starts else b""

    def _key(self, start: int) -> bytes:
        return self._data[start + 1 : self._data.index(b'"', start + 1)]

    def copy(self) -> SortedLines:
        """A copy of its own, which may be changed."""
        return SortedLines(self._data, self._starts, dict(self._changes))

    def _name(self, place: int) -> str:
        return self._key(self._starts[place]).decode("utf-8", "replace")

    def _line(self, place: int) -> str:
        start = self._starts[place]
        return self._data[start : self._data.index(b"\n", start)].decode("utf-8", "replace")

    def _place(self, name: str) -> int | None:
        place = self._first_not_below(name)
        return place if place < len(self._starts) and self._name(place) == name else None

    def _first_not_below(self, name: str) -> int:
        return bisect_left(range(len(self._starts)), name, key=self._name)

    def __getitem__(self, name: str) -> str:
        if name in self._changes:
            changed = self._changes[name]
            if changed is None:
                raise KeyError(name)
            return changed
        place = self._place(name)
        if place is None:
            raise KeyError(name)
        return self._line(place)

    def __contains__(self, name: object) -> bool:
        if name in self._changes:
            return self._changes[name] is not None
        return isinstance(name, str) and self._place(name) is not None

    def __setitem__(self, name: str, line: str) -> None:
        self._changes[name] = line

    def __delitem__(self, name: str) -> None:
        self[name]
        self._changes[name] = None

    def __iter__(self) -> Iterator[str]:
        changes = dict(self._changes)
        for place in range(len(self._starts)):
            name = self._name(place)
            if name not in changes:
                yield name
        yield from (name for name, line in changes.items() if line is not None)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Every key with its line: as `items`, without looking for each one."""
        changes = dict(self._changes)
        for first in range(0, len(self._starts), _BLOCK):
            block = self._data[self._starts[first] : self._start(min(first + _BLOCK, len(self._starts)))]
            for line in block[:-1].decode("utf-8", "replace").split("\n"):
                name = line[1 : line.index('"', 1)]
                if name not in changes:
                    yield name, line
        yield from ((name, line) for name, line in changes.items() if line is not None)

    def __len__(self) -> int:
        added = sum(line is not None and self._place(name) is None for name, line in self._changes.items())
        removed = sum(line is None for line in self._changes.values())
        return len(self._starts) + added - removed

    def parts(self) -> Iterator[bytes | memoryview]:
        """All lines in order with their line breaks, as few pieces of the file and the changes between them."""
        view = memoryview(self._data)
        done = self._starts[0] if self._starts else 0
        for name in sorted(self._changes):
            place = self._first_not_below(name)
            here = self._start(place)
            yield view[done:here]
            line = self._changes[name]
            if line is not None:
                yield line.encode() + b"\n"
            is_there = place < len(self._starts) and self._name(place) == name
            done = self._start(place + 1) if is_there else here
        yield view[done : self._start(len(self._starts))]

    def _start(self, place: int) -> int:
        if place < len(self._starts):
            return self._starts[place]
        return self._data.index(b"\n", self._starts[-1]) + 1 if self._starts else 0
