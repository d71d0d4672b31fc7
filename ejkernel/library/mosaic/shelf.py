"""The layout of a wide row in the shared memory of a block of one warpgroup, and the widths that fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .spread import LANES, LOAD_BYTES

# What a Hopper multiprocessor has, less what a block needs besides its row.
_ROOM = 227 * 1024
_BESIDES = 3 * 1024
# Bytes that a thread has asked for before the first are used: with two blocks 96 KiB of a multiprocessor's.
_AHEAD = 384
# An asynchronous copy has at most so many elements along an axis, and a row is made of a few.
LONGEST = 256
_COPIES = 4
# Narrower rows are held in the registers of one warpgroup.
_WIDE = 1 << 14
_EACH = (32, 16)


@dataclass(frozen=True)
class Shelf:
    """A row in chunks of `each` elements a thread; the last chunk begins early, so as to end with the row.

    Where every row begins at a whole load, it is `lines` of `line` elements, and comes by asynchronous copies. Else
    `line` is 0, and the threads load it: by whole loads from the first one that is in the row, and the few elements
    before and after these apart. Chunks for which there is no room stay in the registers that they were loaded to, if
    they are few; else all but the last are read again.
    """

    width: int
    itemsize: int
    each: int
    # Elements that a thread loads at once.
    vec: int
    line: int

    @property
    def size(self) -> int:
        """Elements of a chunk."""
        return LANES * self.each

    @property
    def count(self) -> int:
        """Chunks of a row."""
        return -(-(self.width // self.vec * self.vec) // self.size)

    @property
    def lines(self) -> int:
        """Lines of a row."""
        return self.width // self.line

    @property
    def copies(self) -> int:
        """Asynchronous copies of a row."""
        return -(-self.lines // LONGEST)

    @property
    def ahead(self) -> int:
        """Chunks that a thread has asked for before the first is used."""
        return max(1, _AHEAD // (self.each * self.itemsize))

    @property
    def kept(self) -> int:
        """Chunks in shared memory."""
        return min(self.count, (_ROOM - _BESIDES) // (self.size * self.itemsize))

    @property
    def again(self) -> int:
        """Chunks that are read twice."""
        return 0 if self.count - self.kept <= self.ahead else self.count - self.kept - 1

    @property
    def bytes(self) -> int:
        """Shared memory of a block."""
        return (self.width if self.line else self.kept * self.size) * self.itemsize


def shelf(width: int, itemsize: int, each: int) -> Shelf:
    """A row in shared memory; by lines where they are few enough to be copied."""
    vec = LOAD_BYTES // itemsize
    # Powers of two, so that chunks are whole lines.
    line = math.gcd(width, LONGEST)
    # Each thread of a warpgroup expects its share of a copy's bytes.
    shared = line % vec == 0 and width * itemsize % LANES == 0
    copied = width // line <= _COPIES * LONGEST and width * itemsize <= _ROOM - _BESIDES
    return Shelf(width, itemsize, each, vec, line if shared and copied else 0)


def refuses(width: int, itemsize: int, num_warps: int | None, each: int | None) -> str:
    """The reason that rows of this width cannot lie in shared memory so; empty where they can."""
    if num_warps != 4:
        return f"num_warps={num_warps}: a row in shared memory is one warpgroup's, of 4"
    vec = LOAD_BYTES // itemsize
    if each is None or each < 1 or each % vec:
        return f"each={each} must be a multiple of the {vec} elements that a thread loads at once"
    lying = shelf(width, itemsize, each)
    if width < lying.size + 2 * vec:
        return f"rows of {width} are too short for {each} elements a thread"
    if not lying.kept:
        return f"{each} elements a thread are too many for shared memory"
    return ""


def launches(x: Any) -> list[tuple[int, int]]:
    """Warps, and elements a thread at a time, for rows that are wide; fewer where a multiprocessor has one row."""
    width, itemsize = x.shape[-1], x.dtype.itemsize
    found = [(4, each) for each in _EACH if width >= _WIDE and not refuses(width, itemsize, 4, each)]
    return found[: 2 if 2 * (shelf(width, itemsize, _EACH[0]).bytes + _BESIDES) <= _ROOM else 1]
