"""Blocks of float8 products with scales on Hopper GPUs: their sizes, and the calls that they serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from .tiles import SHARED_BYTES

# Numbers along the depth that share a scale, and the depth of a step.
DEPTH = 128
# Rows and warpgroups that multiply: each has 64 rows, or twice 64 with sums that fill its registers.
_SERVED = ((128, 2), (192, 3), (256, 2))
_COLUMNS = 128


@dataclass(frozen=True)
class Patch:
    """A block of the result, how many steps are held, and warpgroups that multiply."""

    m: int
    n: int
    stages: int
    workers: int

    def bytes(self, itemsize: int) -> int:
        """Shared memory for the steps, and for 64 rows of the result of each warpgroup."""
        return self.stages * DEPTH * (self.m + self.n) + self.workers * 64 * self.n * itemsize


def refuses(a: Any, b: Any, a_scales: Any, b_scales: Any, *, dtype: str, sizes: tuple[int | None, ...]) -> str:
    """The reason that blocks of these sizes cannot compute this call; empty where they can."""
    if a.dtype != b.dtype and jax.__version_info__ < (0, 11):
        return f"Mosaic GPU of jax {jax.__version__} takes factors of one kind, not {a.dtype.name} and {b.dtype.name}"
    if any(not size or size < 1 for size in sizes):
        return "block_m, block_n, num_stages and warpgroups must be given"
    patch = Patch(*(size or 0 for size in sizes))
    (m, depth), n = a.shape, b.shape[1]
    if (patch.m, patch.workers) not in _SERVED or patch.n != _COLUMNS or patch.stages < 2:
        served = f"rows and warpgroups of {_SERVED}, {_COLUMNS} columns, two stages"
        return f"blocks of {patch.m}x{patch.n} for {patch.workers} in {patch.stages} stages are not served: {served}"
    if a_scales.shape != (m, depth / DEPTH) or b_scales.shape != (depth / DEPTH, n / DEPTH):
        return (
            f"it takes scales of 1x{DEPTH} for a and {DEPTH}x{DEPTH} for b, not {a_scales.shape} and {b_scales.shape}"
        )
    if m % 8 or n % patch.n:
        return f"{m} rows and {n} columns must be multiples of 8 and {patch.n}"
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"results are bfloat16, float16 or float32, not {dtype}"
    needed = patch.bytes(_itemsize(dtype))
    if needed > SHARED_BYTES:
        return f"{patch.stages} stages take {needed} bytes of shared memory, over {SHARED_BYTES}"
    return ""


def patches(dtype: str) -> list[Patch]:
    """Blocks worth measuring, with as many stages as fit: wider ones read less, narrower ones fill a GPU better."""
    found = []
    for m, workers in reversed(_SERVED):
        none = Patch(m, _COLUMNS, 0, workers)
        step = replace(none, stages=1).bytes(_itemsize(dtype)) - none.bytes(_itemsize(dtype))
        found.append(replace(none, stages=(SHARED_BYTES - none.bytes(_itemsize(dtype))) // step))
    return found


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2
