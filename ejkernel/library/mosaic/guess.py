"""Launches of rows that are fast without tuning, where that was measured: on Hopper GPUs."""

from __future__ import annotations

from typing import Any

import jax

from ...ops import Invocation
from . import served, shelf, spread

# Rows that keep every multiprocessor busy; with fewer, how long one takes counts, and that was not measured.
_MANY = 1024
_NARROWEST, _WIDEST, _WIDE = 1024, 8192, 1 << 14


def held_rows(inv: Invocation[Any, Any]) -> int | None:
    """Warps that hold a row, or None.

    On an H200 four of them took 0.65 to 1.03 of the time of the Triton kernel for rows of 1024 to 4096, and with the
    gradient 0.72 to 0.91 for rows of 1024 to 7168.
    """
    x = inv.args[0]
    if not _are_many(inv) or not _NARROWEST <= x.shape[-1] <= _WIDEST:
        return None
    first = next(iter(spread.launches(x)), None)
    return first[0] if first == (4, None) else None


def wide_rows(inv: Invocation[Any, Any]) -> tuple[int, int, bool | None] | None:
    """Warps, elements a thread at a time, and whether a wide row of a softmax lies in shared memory; or None.

    On an H200 rows of 32,000 took 0.60 of the Triton kernel's time so, and rows of 50,257 0.55 of XLA's. Where a
    multiprocessor has room for one row alone, reading it twice is faster: 0.77 of XLA's time for rows of 128,256.
    """
    x = inv.args[0]
    if not _are_many(inv, _MANY // 4) or x.shape[-1] <= _WIDE:
        return None
    shared = shelf.launches(x)
    if len(shared) > 1:
        return (*shared[-1], True)
    twice = [(warps, each) for warps, each in spread.launches(x) if each is not None]
    return (*twice[0], None) if twice else None


def is_measured(inv: Invocation[Any, Any], *sizes: int) -> bool:
    """Does a call run where Mosaic kernels were measured: on a Hopper GPU, by JAX 0.11 or later?"""
    return jax.__version_info__ >= (0, 11) and not served.refuses(inv, *sizes, hopper=True)


def _are_many(inv: Invocation[Any, Any], least: int = _MANY) -> bool:
    x = inv.args[0]
    return bool(x.ndim and x.size >= least * x.shape[-1]) and is_measured(inv, x.size)
