"""Products and attention without tuning: the ways that are fast on Hopper GPUs, where that was measured.

Each rule was chosen on one half of the calls of a dataset and judged on the other: `benchmarks/guesses.py`.
"""

from __future__ import annotations

from typing import Any

from ..ops import Invocation
from .extent import examples
from .mosaic.guess import is_measured
from .mosaic.tiles import PROCESSORS

# Rows for which a product takes as long as reading its matrix does: those of decoding.
FEW_ROWS = 16
# A matrix of so few elements and so short a depth is read in less time than XLA's second kernel takes, which adds up
# the parts of a product that it has split: 6 MiB.
_SMALL, _SHORT_DEPTH = 3 << 20, 1536
# Rows from which an H200 multiplies for longer than it reads, and the least of a wave that is worth having.
_MANY_ROWS, _WAVE = 512, (3 * PROCESSORS // 4, PROCESSORS)
# Keys that one wave of blocks may go through, for each element of a head, while cuDNN has not caught up.
_KEYS_EACH, _WIDE_HEAD, _BLOCK_Q = 8, 128, 128


def tile_of_product(inv: Invocation[Any, Any], rows: int, depth: int, columns: int) -> dict[str, Any]:
    """Fields of the cfg of a product that is faster than XLA's; none where XLA's is.

    Few rows: blocks of 64 columns ask for 64 KiB of the matrix ahead, and a multiprocessor runs two of them at once.
    They must be on more than half of the multiprocessors, since their depth is not split, and were measured up to one
    such wave. A small matrix needs no splitting: narrower tiles, at once.
    """
    a, b = inv.args[:2]
    if a.dtype.itemsize != 2 or examples(inv) > 1 or not is_measured(inv, a.size, b.size):
        return {}
    small = depth <= _SHORT_DEPTH and depth * columns < _SMALL
    if rows <= FEW_ROWS and PROCESSORS < 2 * (columns // 64) <= 4 * PROCESSORS:
        return _tritons(16, 64, 128, 2, 4)
    if rows <= FEW_ROWS and small:
        return _tritons(16, 32, 256, 4, 4)
    if inv.kwargs.get("activation") is not None:
        # The gradient of tiles computes the product again.
        return {}
    if 64 < rows <= 128 and small:
        return _tritons(64, 64, 64, 8, 4)
    # All tiles in one wave that is nearly full: nothing waits for a last few, as it does in the two waves of XLA's.
    for high, wide, stages in ((128, 256, 3), (128, 128, 5)):
        if rows >= _MANY_ROWS and _WAVE[0] < -(-rows // high) * -(-columns // wide) <= _WAVE[1]:
            tile = {"block_m": high, "block_n": wide, "block_k": 64, "num_stages": stages}
            return {"implementation": "mosaic", **tile}
    return {}


def _tritons(m: int, n: int, k: int, warps: int, stages: int) -> dict[str, Any]:
    sizes = {"block_m": m, "block_n": n, "block_k": k}
    return {"implementation": "triton", **sizes, "num_warps": warps, "num_stages": stages}


def attends_briefly(inv: Invocation[Any, Any], q: Any, k: Any) -> bool:
    """Is a call so short that cuDNN's own cost of a call, some 2.5 us on an H200, is more than Mosaic's kernel loses?

    How long a call takes is told by its waves of blocks over the multiprocessors, times the keys of each. Narrow heads
    have more exponentials for each product, and there Mosaic's loses more.
    """
    batch, queries, heads, width = q.shape
    blocks = batch * heads * -(-queries // _BLOCK_Q) * examples(inv)
    waves = -(-blocks // PROCESSORS)
    return waves * k.shape[1] <= _KEYS_EACH * min(width, _WIDE_HEAD) and is_measured(inv, q.size, k.size)
