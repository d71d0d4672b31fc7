"""Blocks of float8 products with scales on Hopper GPUs: their sizes, and the calls that they serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from .tiles import SHARED_BYTES

# Numbers along the depth that share a scale, and the depth of a step where scales change along it.
DEPTH = 128
# Depths of a step where they do not: tensor cores add up as many without rounding to float32. With 256 the sums of a
# result in bfloat16 are still nearer than its own rounding, and each is added to the others half as often.
_DEPTHS = (DEPTH, 2 * DEPTH)
# Rows and warpgroups that multiply: each has 64 rows, or twice 64 with sums that fill its registers.
_SERVED = ((128, 2), (192, 3), (256, 2))
_COLUMNS = 128


@dataclass(frozen=True)
class Patch:
    """A block of the result, how many steps are held, warpgroups that multiply, and the depth of a step."""

    m: int
    n: int
    stages: int
    workers: int
    k: int = DEPTH

    def bytes(self, itemsize: int) -> int:
        """Shared memory for the steps, and for 64 rows of the result of each warpgroup."""
        return self.stages * self.k * (self.m + self.n) + self.workers * 64 * self.n * itemsize


def change(a_scales: Any, b_scales: Any) -> tuple[bool, bool]:
    """Do the scales of a and of b change along the depth?"""
    return a_scales.shape[1] > 1, b_scales.shape[0] > 1


def refuses(a: Any, b: Any, a_scales: Any, b_scales: Any, *, dtype: str, sizes: tuple[int | None, ...]) -> str:
    """The reason that blocks of these sizes cannot compute this call; empty where they can."""
    if a.dtype != b.dtype and jax.__version_info__ < (0, 11):
        return f"Mosaic GPU of jax {jax.__version__} takes factors of one kind, not {a.dtype.name} and {b.dtype.name}"
    if any(not size or size < 1 for size in sizes):
        return "block_m, block_n, num_stages and warpgroups must be given"
    patch = Patch(*(size or 0 for size in sizes))
    (m, depth), n = a.shape, b.shape[1]
    if (patch.m, patch.workers) not in _SERVED or patch.n != _COLUMNS or patch.stages < 2 or patch.k not in _DEPTHS:
        served = f"rows and warpgroups of {_SERVED}, {_COLUMNS} columns, two stages, depths of {_DEPTHS}"
        return (
            f"blocks of {patch.m}x{patch.n}x{patch.k} for {patch.workers} in {patch.stages} stages are not served: "
            f"{served}"
        )
    refused = _scales_refuse(a.shape, n, a_scales, b_scales)
    if refused:
        return refused
    if any(change(a_scales, b_scales)) and patch.k != DEPTH:
        return f"scales that change along the depth need steps of {DEPTH}, not {patch.k}"
    if m % 8 or n % patch.n or depth % patch.k:
        return f"{m} rows, {n} columns and a depth of {depth} must be multiples of 8, {patch.n} and {patch.k}"
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"results are bfloat16, float16 or float32, not {dtype}"
    if dtype != "bfloat16" and patch.k != DEPTH:
        return f"sums of {patch.k} by tensor cores are too far off for a result in {dtype}"
    needed = patch.bytes(_itemsize(dtype))
    if needed > SHARED_BYTES:
        return f"{patch.stages} stages take {needed} bytes of shared memory, over {SHARED_BYTES}"
    return ""


def patches(a_scales: Any, b_scales: Any, dtype: str) -> list[Patch]:
    """Blocks worth measuring, with as many stages as fit: wider ones read less, narrower ones fill a GPU better."""
    found = []
    deep = dtype == "bfloat16" and not any(change(a_scales, b_scales))
    for k in _DEPTHS if deep else (DEPTH,):
        for m, workers in reversed(_SERVED):
            none = Patch(m, _COLUMNS, 0, workers, k)
            step = replace(none, stages=1).bytes(_itemsize(dtype)) - none.bytes(_itemsize(dtype))
            found.append(replace(none, stages=(SHARED_BYTES - none.bytes(_itemsize(dtype))) // step))
    return [patch for patch in found if patch.stages > 1]


def _scales_refuse(shape: tuple[int, ...], n: int, a_scales: Any, b_scales: Any) -> str:
    m, depth = shape
    by_step = change(a_scales, b_scales)
    if by_step[0] and a_scales.shape != (m, depth / DEPTH):
        return f"scales of a that change along the depth are of 1x{DEPTH}, not {a_scales.shape} for {shape}"
    if by_step[1] and b_scales.shape != (depth / DEPTH, n / DEPTH):
        return f"scales of b that change along the depth are of {DEPTH}x{DEPTH}, not {b_scales.shape} for {(depth, n)}"
    return ""


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2
