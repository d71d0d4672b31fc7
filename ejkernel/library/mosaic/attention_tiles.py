"""Calls and blocks that attention by Mosaic GPU serves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .tiles import WORKERS

# What a block may have of shared memory, without what Mosaic itself needs.
_SHARED_BYTES = 226 * 1024
_LINE = 64


def refuses(q: Any, k: Any, v: Any, others: Iterable[Any], blocks: tuple[int, int], stages: int) -> str:
    """The reason that this call cannot be computed with these blocks; empty where it can."""
    if any(other is not None for other in others):
        return "Mosaic's attention has no mask, bias, window, lengths, sinks or soft cap"
    (queries, depth), keys, width = (q.shape[1], q.shape[3]), k.shape[1], v.shape[3]
    block_q, block_k = blocks
    if q.dtype.name not in ("bfloat16", "float16"):
        return f"Mosaic's attention takes bfloat16 and float16, not {q.dtype.name}"
    if depth % _LINE or width % _LINE or max(depth, width) > 256:
        return f"Mosaic's attention takes heads of 64, 128, 192 and 256, not {depth} and {width}"
    if block_q != 64 * WORKERS or block_k % _LINE or not 0 < block_k <= 256 or stages < 2:
        return (
            f"blocks of {block_q} queries and {block_k} keys in {stages} stages are not served: 128 queries, two stages"
        )
    if queries % block_q or keys % _LINE:
        return f"{queries} queries and {keys} keys are no multiples of {block_q} and {_LINE}"
    held = block_q * (depth + (0 if width == depth else width)) + stages * block_k * (depth + width)
    if held * q.dtype.itemsize > _SHARED_BYTES:
        return f"{stages} stages of {block_k} keys take {held * q.dtype.itemsize} bytes of shared memory"
    # Scores, weights and sums of a warpgroup's 64 queries are in its registers.
    if block_k + block_k // 2 + width > 2 * 216:
        return f"scores of {block_k} keys and sums of {width} do not fit the registers"
    return ""
