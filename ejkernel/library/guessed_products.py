"""Products and attention without tuning: the ways that are fast on Hopper GPUs, where that was measured.

Each rule was chosen on one half of the calls of a dataset and judged on the other: `benchmarks/guesses.py`.
"""

from __future__ import annotations

from typing import Any

from ..ops import Invocation
from .extent import examples
from .mosaic.guess import is_measured
from .mosaic.tiles import PROCESSORS

# Rows, columns, depth, warps and stages of Triton's tiles.
Tile = tuple[int, int, int, int, int]
# Steps of the depth that take less than XLA's second kernel, which adds up parts of a product that it has split.
_SHORT_DEPTH = 1024
# Keys that one wave of blocks may go through, for each element of a head, while cuDNN has not caught up.
_KEYS_EACH, _WIDE_HEAD, _BLOCK_Q = 8, 128, 128


def tile_of_few_rows(inv: Invocation[Any, Any], rows: int, depth: int, columns: int) -> Tile | None:
    """Tiles for a product of so few rows that it takes as long as reading the matrix does; None where XLA is faster.

    Blocks of 64 columns ask for 64 KiB of the matrix ahead, and a multiprocessor runs two of them at once. They must be
    on more than half of the multiprocessors, since their depth is not split, and were measured up to one such wave.
    Where the whole depth is a few steps, one pass is faster than XLA's two kernels, if its tiles run at once.
    """
    a, b = inv.args[:2]
    if a.dtype.itemsize != 2 or examples(inv) > 1 or not is_measured(inv, a.size, b.size):
        return None
    if rows <= 16 and PROCESSORS < 2 * (columns // 64) <= 4 * PROCESSORS:
        return 16, 64, 128, 2, 4
    if rows <= 16 and depth <= _SHORT_DEPTH and -(-columns // 32) <= PROCESSORS:
        return 16, 32, 256, 4, 4
    if 64 < rows <= 128 and depth <= _SHORT_DEPTH and 2 * -(-columns // 64) <= PROCESSORS:
        return 64, 64, 64, 8, 4
    return None


def attends_briefly(inv: Invocation[Any, Any], q: Any, k: Any) -> bool:
    """Is a call so short that cuDNN's own cost of a call, some 2.5 us on an H200, is more than Mosaic's kernel loses?

    How long a call takes is told by its waves of blocks over the multiprocessors, times the keys that each goes through.
    Narrow heads have more exponentials for each product, and there Mosaic's loses more.
    """
    batch, queries, heads, width = q.shape
    blocks = batch * heads * -(-queries // _BLOCK_Q) * examples(inv)
    waves = -(-blocks // PROCESSORS)
    return waves * k.shape[1] <= _KEYS_EACH * min(width, _WIDE_HEAD) and is_measured(inv, q.size, k.size)
