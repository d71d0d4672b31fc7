"""The lines of a large snapshot as they lie in the file, found by halving: eight bytes of memory for each beside it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, MutableMapping

# Lines that are decoded at once.
_BLOCK = 256


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
