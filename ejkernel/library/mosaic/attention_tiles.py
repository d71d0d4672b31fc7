"""Calls and blocks that attention by Mosaic GPU serves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .attention_order import is_even

# What a block may have of shared memory, without what Mosaic itself needs.
_SHARED_BYTES = 226 * 1024
_LINE = 64
# Registers that a thread has for scores, weights and sums, by the queries of a block: with more of these, two or three
# warpgroups share what there is. One step over it, the compiler was seen to run the products one after the other.
_REGISTERS = {128: 192, 192: 128}


def refuses(
    q: Any,
    k: Any,
    v: Any,
    others: Iterable[Any],
    *,
    block_q: int,
    block_k: int,
    stages: int,
    persistent: bool,
    causal: bool,
) -> str:
    """The reason that this call cannot be computed with these blocks; empty where it can."""
    if any(other is not None for other in others):
        return "Mosaic's attention has no mask, bias, window, lengths, sinks or soft cap"
    (queries, depth), keys, width = (q.shape[1], q.shape[3]), k.shape[1], v.shape[3]
    if q.dtype.name not in ("bfloat16", "float16"):
        return f"Mosaic's attention takes bfloat16 and float16, not {q.dtype.name}"
    if depth % _LINE or width % _LINE or max(depth, width) > 256:
        return f"Mosaic's attention takes heads of 64, 128, 192 and 256, not {depth} and {width}"
    if block_q not in _REGISTERS or block_k % _LINE or not 0 < block_k <= 256 or stages < 2:
        served = "128 or 192 queries, keys by 64 up to 256, two stages or more"
        return f"blocks of {block_q} queries and {block_k} keys in {stages} stages are not served: {served}"
    if queries % _LINE or keys % _LINE:
        return f"{queries} queries and {keys} keys are no multiples of {_LINE}"
    if causal and keys > queries:
        return f"{keys - queries} keys are hidden from all queries, and may hold what is no number"
    if persistent and not is_even(k, v, causal=causal):
        return f"keys of {k.shape[0] * k.shape[2]} heads are not in the cache together: blocks that stay would wait"
    queued = depth * (2 if persistent else 1) + (0 if width == depth else width)
    held = block_q * queued + stages * block_k * (depth + width)
    if held * q.dtype.itemsize > _SHARED_BYTES:
        return f"{stages} stages of {block_k} keys take {held * q.dtype.itemsize} bytes of shared memory"
    # A warpgroup has 64 queries: each of its threads has half a row's scores and sums, and half of that for weights.
    if block_k // 2 + block_k // 4 + width // 2 > _REGISTERS[block_q]:
        return f"scores of {block_k} keys and sums of {width} do not fit the registers"
    return ""
