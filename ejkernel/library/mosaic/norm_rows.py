"""Blocks and warpgroups of the gradient of a norm, and the widths that it serves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax

from .spread import LOAD_BYTES, refuses

# Elements of a copy along an axis, at most.
_LONGEST = 256
# A row's elements for each thread: more arrays of them are held than fit into 255 registers otherwise.
_EACH = 32
_WIDEST = 1 << 13
# Registers for each of these elements, counted in what the compiler made: the next row's two arrays, narrow; this
# row's, wide; the weight, and its sum. An array that is added costs one more, and so does the sum of a bias.
_REGISTERS_EACH, _BESIDES, _MOST = 7, 16, 255
_OF_MULTIPROCESSOR = 1 << 16
# Of an H200. Each block writes its sums as a row in float32, so no more of them are wanted than run at once, and few.
_MULTIPROCESSORS, _BLOCKS = 132, 8


@dataclass(frozen=True)
class Course:
    """Elements of a row for each thread at most, rows asked for in advance, and one barrier for all sums of a row."""

    each: int = _EACH
    ahead: int = 3
    together: bool = False


def course_of(width: int, itemsize: int, *, centred: bool, added: bool, kept: bool = False) -> Course:
    """The course of a gradient.

    The sums of a row without a mean are one round of exchanges, which one barrier serves. With a mean they are two
    rounds, and what is left of a step hides them: on an H200 one barrier gained nothing there, and else 131 us became
    101 (8192x7168), 74 became 69 (residual_norm 8192x4096) and 31.5 became 29.8 (4096x4096). Narrow rows have many
    blocks at once, of which the registers for it cost some: 1024 with a mean took 74 us, not 59.
    With a mean and a factor that were kept there is one round as well.
    """
    if (centred and not kept) or width < 128 * _EACH or jax.__version_info__ < (0, 11):
        return Course()
    # Twice as many warpgroups where each has whole loads, and registers are left for two blocks of them.
    halves = not added and not centred and itemsize == 2 and width == 128 * _EACH
    return Course(_EACH // 2 if halves else _EACH, ahead=1, together=True)


def portions(count: int, width: int, extra: int = 0, each: int = _EACH) -> tuple[int, int]:
    """Warpgroups of a block, and blocks; `extra` arrays are held beside x, its gradient, the weight and its sum."""
    groups = min(max(-(-width // (128 * each)), 1), 8)
    held = -(-width // (128 * groups))
    registers = min((_REGISTERS_EACH + extra) * held + _BESIDES, _MOST)
    at_once = min(max(_OF_MULTIPROCESSOR // (128 * groups * registers), 1), _BLOCKS)
    return groups, max(1, min(count, at_once * _MULTIPROCESSORS))


def fits(width: int, itemsize: int) -> bool:
    """Does a row of this width, with all that its gradient needs, fit into the registers of a block?"""
    return width <= _WIDEST and not refuses(width, itemsize, 4 * portions(1, width)[0], None)


def line_of(width: int, itemsize: int) -> int:
    """Elements of a line, such that a copy of few lines is a row; 0 where no copy serves."""
    line = math.gcd(width, _LONGEST)
    return line if line * itemsize % LOAD_BYTES == 0 and width // line <= _LONGEST else 0
