"""Norms and softmax without tuning: the ways that are fast on Hopper GPUs, where that was measured.

Each rule was chosen on one half of the calls of a dataset and judged on the other: `benchmarks/guesses.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..ops import Invocation
from .extent import examples
from .mosaic import shelf, spread
from .mosaic.measured_calls import is_measured
from .mosaic.tiles import PROCESSORS
from .triton import rows as triton_rows

# Rows that keep every multiprocessor busy, several blocks to each.
_MANY = 1024
_NARROWEST, _WIDEST, _WIDE = 768, 8192, 1 << 14
# Elements of a row for each thread of a block of several rows, and of one row.
_EACH, _EACH_ALONE, _MOST_WARPS = 32, 16, 8
# A load of 16 bytes for each of the 1024 threads that XLA gives to a wide row.
_LOAD_OF_XLA = 1 << 14
# Widths of which each thread of four warps has one or two loads of 16 bytes, in a dtype of two bytes.
_LOADS = (1024, 2048)
# The cache of an H100 and an H200.
_CACHE_BYTES = 50 << 20


def norm_ways(inv: Invocation[Any, Any]) -> Iterable[dict[str, Any]]:
    """Fields of the cfgs of a norm, the fastest first; a kernel takes the first one that may run."""
    mosaic = {"implementation": "mosaic", "num_warps": 4}
    is_held = _is_held(inv)
    if is_held and _rows(inv) >= _MANY and from_memory(inv):
        yield mosaic
    if _is_measured_row(inv):
        if _rows(inv) <= PROCESSORS and inv.args[0].shape[-1] * inv.args[0].dtype.itemsize == _LOAD_OF_XLA:
            # A row alone on its multiprocessor, in one load for each thread: XLA has twice the threads of Triton's.
            yield {"implementation": "xla"}
        rows, warps = _norm_block(inv)
        yield {"implementation": "triton", "rows": rows, "num_warps": warps}
    block = triton_rows.guess(inv)
    if block:
        yield {"implementation": "triton", "rows": block[0], "num_warps": block[1]}
    # Without Triton: where four blocks or more share a multiprocessor, or a thread needs one or two whole loads.
    if is_held and (_rows(inv) >= _MANY // 2 or inv.args[0].shape[-1] in _LOADS):
        yield mosaic


def _norm_block(inv: Invocation[Any, Any]) -> tuple[int, int]:
    """Rows and warps of a block of Triton's.

    Two rows where there are more than run at once: a thread then has both rows' loads under way, and the weight is read
    once for both. One row is divided among more threads, since how long it takes is all that counts.
    """
    width = inv.args[0].shape[-1]
    if _rows(inv) >= _MANY:
        # Real elements, not those of the padded block; a power of two that leaves each thread as many or more.
        return 2, min(1 << (max(2 * width // (32 * _EACH), 1).bit_length() - 1), 16)
    return 1, min(triton_rows.warps_for(width, _EACH_ALONE), _MOST_WARPS)


def from_memory(inv: Invocation[Any, Any]) -> bool:
    """Do rows and result exceed the cache?

    From memory the rows that Mosaic's blocks hold whole arrive faster than by Triton (0.83 of its time for 8192x5120);
    from the cache the cost of a block counts, and Mosaic's took 1.07 to 1.21 times as long.
    """
    x = inv.args[0]
    return bool(2 * x.size * x.dtype.itemsize * examples(inv) > _CACHE_BYTES)


def softmax_ways(inv: Invocation[Any, Any]) -> Iterable[dict[str, Any]]:
    """Fields of the cfgs of a softmax, the fastest first.

    A row that four warps hold is Mosaic's, however many rows there are: no weight is read that rows could share.
    """
    x = inv.args[0]
    is_wide = x.ndim and x.size and x.shape[-1] > _WIDEST and is_measured(inv, x.size)
    if is_wide and x.shape[-1] > _WIDE:
        yield from _wide_ways(inv)
    if _is_held(inv):
        yield {"implementation": "mosaic", "num_warps": 4}
    block = triton_rows.guess(inv)
    if block:
        yield {"implementation": "triton", "rows": block[0], "num_warps": block[1]}
    if is_wide:
        # Without Triton.
        yield from _wide_ways(inv)


def _wide_ways(inv: Invocation[Any, Any]) -> Iterable[dict[str, Any]]:
    """The ways for rows too wide for four warps, by how many multiprocessors a block for each row keeps busy.

    An eighth at most: XLA's reduction divides a row among them. A row to each at most: registers hold it, as fast as
    one row can be had. More: in shared memory, where a second row arrives while the first is written; on an H200 rows
    of 50,257 took 0.55 of XLA's time so. Where a multiprocessor has room for one row alone, reading it twice is faster.
    """
    x, rows = inv.args[0], _rows(inv)
    if rows <= PROCESSORS // 8:
        yield {"implementation": "online"}
    if rows <= PROCESSORS:
        held = [warps for warps, each in spread.launches(x) if each is None]
        yield from ({"implementation": "mosaic", "num_warps": warps} for warps in held[:1])
        return
    shared = shelf.launches(x)
    if len(shared) > 1:
        warps, each = shared[-1]
        yield {"implementation": "mosaic", "num_warps": warps, "each": each, "shared": True}
    elif rows >= _MANY // 4:
        twice = [(warps, each) for warps, each in spread.launches(x) if each is not None]
        yield from ({"implementation": "mosaic", "num_warps": warps, "each": each} for warps, each in twice[:1])


def _is_held(inv: Invocation[Any, Any]) -> bool:
    """Do the registers of four warps, which were measured, hold a row?"""
    return _is_measured_row(inv) and next(iter(spread.launches(inv.args[0])), None) == (4, None)


def _is_measured_row(inv: Invocation[Any, Any]) -> bool:
    x = inv.args[0]
    return bool(x.ndim and x.size and _NARROWEST <= x.shape[-1] <= _WIDEST) and is_measured(inv, x.size)


def _rows(inv: Invocation[Any, Any]) -> int:
    x = inv.args[0]
    return int(x.size // x.shape[-1] * examples(inv))
