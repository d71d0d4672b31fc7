"""The layout of a row over the threads of a block: chunks, warpgroups, and the widths that fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LANES = 128
# A thread loads 16 bytes at once at most.
LOAD_BYTES = 16
# Registers of a multiprocessor, of a thread at most, and those that a thread needs besides the row's elements.
_REGISTERS, _MOST, _BESIDES = 1 << 16, 255, 20
_CHUNK, _WASTE = 16, 1.04
# With fewer elements a thread mostly waits, and rows for more than one warpgroup cost a barrier for each number.
_LEAST_EACH, _LEAST_SHARED = 4, 16
# Rows wider than this may be read twice; more warps keep fewer rows in flight, and so in the cache for the second time.
_HELD = 1 << 14
_TWICE, _VERY_WIDE = ((4, 16), (16, 8)), 1 << 16
# Rows of a token at most: those of a chunk are all on their way at once, and each takes registers.
_MOST_ROWS = 16


@dataclass(frozen=True)
class Spread:
    """Each of `groups` warpgroups has `count` chunks of the row, one after the other; the last ones may overlap."""

    width: int
    groups: int
    count: int
    # Elements of a chunk for each thread, and how many of them it loads at once.
    each: int
    vec: int

    @property
    def size(self) -> int:
        """Elements of a chunk."""
        return LANES * self.each

    def may_overlap(self, number: int) -> bool:
        """Does the last warpgroup's chunk of this number begin early, so as to end with the row?"""
        return ((self.groups - 1) * self.count + number + 1) * self.size > self.width

    @property
    def unmasked(self) -> int:
        """The number of first chunks that overlap in no warpgroup."""
        return next((number for number in range(self.count) if self.may_overlap(number)), self.count)


def spread(width: int, itemsize: int, groups: int, each: int | None) -> Spread:
    """A row over so many warpgroups; without `each`, in large chunks that leave little over."""
    vec = LOAD_BYTES // itemsize
    while vec > 1 and (width % vec or vec * LANES > width):
        vec //= 2
    if each is not None:
        vec = min(vec, each & -each)
        return Spread(width, groups, -(-width // (groups * LANES * each)), each, vec)
    options = [spread(width, itemsize, groups, size) for size in range(vec, max(_CHUNK, vec) + 1, vec)]
    options = [one for one in options if not _uncovered(one)] or options
    least = min(one.count * one.each for one in options)
    # Few large chunks: each is a part of the kernel's text, and many take seconds to compile.
    return max((one for one in options if one.count * one.each <= least * _WASTE), key=lambda one: one.each)


def block_spread(width: int, itemsize: int, block: int, num_warps: int) -> Spread:
    """A row read in blocks of so many elements; smaller ones, and fewer warps, where the row is short."""
    groups, each = max(1, num_warps // 4), max(1, block // (32 * num_warps))
    while _uncovered(lying := spread(width, itemsize, groups, each)) and (groups, each) != (1, 1):
        groups, each = (groups, each // 2) if each > 1 else (groups - 1, each)
    return lying


def refuses(width: int, itemsize: int, num_warps: int | None, each: int | None) -> str:
    """The reason that rows of this width cannot be computed so; empty where they can."""
    if num_warps is None or num_warps < 4 or num_warps % 4 or num_warps > 32:
        return f"num_warps={num_warps} must be whole warpgroups of four warps, 32 at most"
    if each is not None and each < 1:
        return f"each={each} must be at least 1"
    if width < LANES:
        return f"rows of {width} are shorter than the {LANES} threads of a warpgroup"
    lying = spread(width, itemsize, num_warps // 4, each)
    if _uncovered(lying):
        return f"rows of {width} are too short for {num_warps} warps with {lying.each} elements a thread"
    room = min(_MOST, _REGISTERS // (32 * num_warps)) - _BESIDES
    if each is None and lying.count * lying.each > room:
        return f"rows of {width} are too wide for the registers of {num_warps} warps"
    return ""


def _uncovered(lying: Spread) -> bool:
    """Would the last warpgroup's first chunk begin before its own part of the row?"""
    return (lying.groups - 1) * lying.count * lying.size + lying.size > lying.width


def launches(x: Any) -> Iterable[tuple[int, int | None]]:
    """Warps, and elements a thread at a time, that suit the rows of an array: held, and read twice where wide."""
    width, itemsize = x.shape[-1], x.dtype.itemsize
    held = [(warps, None) for warps in range(8, 33, 4) if width // (32 * warps) >= _LEAST_SHARED]
    held = [*([(4, None)] if width // LANES >= _LEAST_EACH else []), *held]
    # The fewest warps that hold the row, and the next.
    kept = [one for one in held if not refuses(width, itemsize, *one)][:2]
    ways = _TWICE[: 0 if width <= _HELD else 1 if width < _VERY_WIDE else 2]
    return [*kept, *((warps, each) for warps, each in ways if not refuses(width, itemsize, warps, each))]


def token_groups(width: int) -> int:
    """Warpgroups for a token's rows: each thread has two loads of 16 bytes of narrow elements."""
    return min(max(1, width // (LANES * _CHUNK)), 8)


def tokens_refuse(width: int, dtype: Any, k: int) -> str:
    """The reason that k rows of this width are not moved for each token; empty where they are."""
    if dtype.name not in ("float32", "bfloat16", "float16"):
        return f"Mosaic's rows are of float32, bfloat16 and float16, not {dtype.name}"
    if k > _MOST_ROWS:
        return f"{k} rows of a token are over {_MOST_ROWS}"
    return refuses(width, dtype.itemsize, 4 * token_groups(width), None)
