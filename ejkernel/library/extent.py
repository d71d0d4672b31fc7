"""Size of a call, with all the examples of the vmaps around it."""

from __future__ import annotations

import math
from typing import Any

from ..ops import Invocation


def examples(inv: Invocation[Any, Any]) -> int:
    """The number of calls that the vmaps around make of this one, as far as the executor has found them."""
    found = inv.batch_axes if isinstance(inv.batch_axes, tuple) else ()
    return math.prod(level[0] for level in found if isinstance(level, tuple) and isinstance(level[0], int))


def are_known(*sizes: Any) -> bool:
    """Are all of these numbers? Sizes of a program that is exported for any batch are symbols, which rarely compare."""
    return all(isinstance(size, int) for size in sizes)


def too_large(inv: Invocation[Any, Any], *sizes: int) -> str:
    """The reason that a Pallas kernel cannot take or make arrays of so many elements; empty where it can."""
    if not are_known(*sizes):
        return "its shapes are symbolic, and Pallas kernels are made for one size"
    most = max(sizes) * examples(inv)
    return "" if most < 1 << 31 else f"Pallas counts in 32 bits on a GPU, which {most:,} elements exceed"
