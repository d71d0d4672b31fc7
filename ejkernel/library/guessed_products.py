"""Products and attention without tuning: the ways that are fast on Hopper GPUs, where that was measured.

Each rule was chosen on one half of the calls of a dataset and judged on the other: `benchmarks/guesses.py`.
"""

from __future__ import annotations

from typing import Any

from ..ops import Invocation
from .extent import examples
from .mosaic.attention_order import is_even
from .mosaic.measured_calls import is_measured, runs_at_once
from .mosaic.tiles import PROCESSORS

# Rows for which a product takes as long as reading its matrix does: those of decoding.
FEW_ROWS = 16
# A matrix of so few elements and so short a depth is read in less time than XLA's second kernel takes, which adds up
# the parts of a product that it has split: 6 MiB.
_SMALL, _SHORT_DEPTH = 3 << 20, 1536
# Rows from which an H200 multiplies for longer than it reads, and the least of a wave that is worth having.
_MANY_ROWS, _WAVE = 512, (3 * PROCESSORS // 4, PROCESSORS)
# Queries of a block with three warpgroups, and how much more of them than there are may be computed.
_HIGH_BLOCK, _REST = 192, 1.05


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


def tile_of_attention(inv: Invocation[Any, Any], q: Any, k: Any, v: Any, *, causal: bool) -> dict[str, Any]:
    """Fields of the cfg of Mosaic's attention, by the width of heads; none where it was not measured.

    Sums of a head of 64 leave registers for three warpgroups of queries, which read keys once for 192 of them. Those of
    128 leave them for two and blocks of 128 keys, those of 256 for 64 keys. Blocks of threads stay for several blocks
    of queries where there are several for each, and they can be dealt out evenly: 0.80 to 0.98 of the time in six calls
    on an H200.
    """
    if not is_measured(inv, q.size, k.size, v.size):
        return {}
    widest, queries = max(q.shape[3], v.shape[3]), q.shape[1]
    if widest > 128:
        return {"block_q": 128, "block_k": 64, "num_stages": 2}
    if widest <= 64 and -(-queries // _HIGH_BLOCK) * _HIGH_BLOCK <= _REST * queries:
        return {"block_q": _HIGH_BLOCK, "block_k": 128, "num_stages": 2}
    several = q.shape[0] * q.shape[2] * -(-queries // 128) > PROCESSORS
    stays = several and runs_at_once(inv) and is_even(k, v, causal=causal)
    return {"block_q": 128, "block_k": 128, "num_stages": 2, "persistent": stays}
