"""Blocks and warpgroups of the gradient of a norm, and the widths that it serves."""

from __future__ import annotations

from .spread import refuses, several

# A row's elements for each thread: some six arrays of them are held, in at most 128 registers.
_EACH = 16
_WIDEST = 1 << 13
# Each block writes its sums as a row in float32, so few are wanted, and no more than run at once: a thread needs about
# a hundred registers, which leaves 16 warps for each of an H200's 132 multiprocessors.
_WARPS_OF_ALL = 1 << 11


def portions(count: int, width: int) -> tuple[int, int]:
    """Warpgroups of a block, and blocks."""
    groups = min(max(-(-width // (128 * _EACH)), 1), 8)
    return groups, max(1, min(count, _WARPS_OF_ALL // (4 * groups)))


def fits(width: int, itemsize: int) -> bool:
    """Does a row of this width, with all that its gradient needs, fit into the registers of one warpgroup?"""
    warps = 4 * portions(1, width)[0]
    return width <= _WIDEST and not several(warps) and not refuses(width, itemsize, warps, None)
