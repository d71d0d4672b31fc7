"""Blocks of products with weights of 8 or 4 bits on Hopper GPUs: their sizes, and the calls that they serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from .tiles import LINE_BYTES, PROCESSORS, SHARED_BYTES

BITS = {"int8": 8, "int4": 4}
# Words of 16 bits that a warpgroup multiplies at once: the height of a product of tensor cores.
HEIGHT = 64
# Registers of a thread for sums, by warpgroups that multiply; the others hold weights, wide and narrow.
_SUMS = {1: 128, 2: 128, 3: 80, 4: 64}
# All registers of a multiprocessor, over the threads of a warpgroup.
_REGISTERS = 65536 // 128
# Columns, depth of a step and warpgroups, by bits. A block of 256 columns reads as many bytes of 64 rows as of weights
# of 4 bits; the wider it is, the more parts of the depth there are to add up. Others were compiled and left out: their
# warpgroups have too few registers, so that ptxas lets products wait for each other or moves sums to memory.
_SHAPES = {
    8: ((256, 128, 2), (256, 64, 2), (256, 64, 4), (128, 128, 2)),
    4: ((256, 128, 2), (256, 64, 2), (512, 64, 2)),
}
_MOST_STAGES, _MOST_ROWS = 12, 256
# Those of kernels that make weights wide while others are multiplied.
_AHEAD = {8: ((256, 128, 2), (256, 64, 2), (128, 128, 2)), 4: ((256, 128, 2), (256, 64, 2))}


@dataclass(frozen=True)
class Strip:
    """Columns of a block, depth of a step, steps that are held, parts of the depth, and warpgroups that multiply."""

    n: int
    k: int
    stages: int
    parts: int
    workers: int

    def each(self) -> int:
        """The count of numbers in a word of 16 bits that one warpgroup multiplies."""
        return self.n // (self.workers * HEIGHT)

    def rows(self, count: int, *, grouped: bool) -> int:
        """Rows of a block: all of them, or equal parts that the registers hold sums of."""
        most = 2 * _SUMS[self.workers] // (self.each() * (2 if grouped else 1))
        eighths = max(1, -(-count // 8))
        return 8 * -(-eighths // -(-eighths // (most // 8)))

    def bytes(self, bits: int, rows: int) -> int:
        """Shared memory for the steps."""
        return self.stages * self.k * (self.n * bits // 8 + 2 * rows)


def registers(workers: int) -> tuple[int, int] | None:
    """The registers of a thread that copies and of one that multiplies; None where all have as many as there may be.

    A block begins with equal shares, in eights, and can hand on no more than these: a warpgroup that asks for more
    waits for ever.
    """
    if workers == 1:
        return None
    all_of_them = _REGISTERS // (workers + 1) // 8 * 8 * (workers + 1)
    copying = 40 if workers < 4 else 24
    return copying, (all_of_them - copying) // workers // 8 * 8


def refuses(x: Any, weight: Any, scales: Any, *, sizes: tuple[int | None, ...]) -> str:
    """The reason that blocks of these sizes cannot compute this call; empty where they can."""
    if jax.__version_info__ < (0, 11):
        return f"Mosaic GPU of jax {jax.__version__} does not load words of 16 bits transposed; use jax 0.11 or later"
    if any(not size or size < 1 for size in sizes):
        return "block_n, block_k, num_stages, split_k and warpgroups must be given"
    strip = Strip(*(size or 0 for size in sizes))
    if x.dtype.name != "bfloat16" or not 0 < x.shape[0] <= _MOST_ROWS:
        return f"it takes 1 to {_MOST_ROWS} rows of bfloat16, not {x.shape[0]} of {x.dtype.name}"
    bits = BITS[weight.dtype.name]
    words = 16 // bits
    shares = (HEIGHT * words // 2, HEIGHT * words)
    if strip.workers not in _SUMS or strip.n % strip.workers or strip.n // strip.workers not in shares:
        return f"{strip.workers} warpgroups are not served with {strip.n} columns: 1 to 4 of {shares} each"
    if strip.n % (HEIGHT * words) or strip.k not in (64, 128) or strip.stages < 2:
        return f"blocks of {strip.k}x{strip.n} in {strip.stages} stages are not served: depths of 64 or 128, two stages"
    depth, width = weight.shape
    line = LINE_BYTES * 8 // bits
    if depth % 64 or width % line:
        return f"a depth of {depth} and {width} columns must be multiples of 64 and {line}"
    grouped = scales.ndim == 2
    group = depth // scales.shape[0] if grouped else depth
    if grouped and group % strip.k:
        return f"steps of {strip.k} do not divide groups of {group}"
    if strip.parts > -(-depth // strip.k) // (group // strip.k if grouped else 1):
        return f"a depth of {depth} does not have {strip.parts} parts"
    needed = strip.bytes(bits, strip.rows(x.shape[0], grouped=grouped))
    if needed > SHARED_BYTES:
        return f"{strip.stages} stages take {needed} bytes of shared memory, over {SHARED_BYTES}"
    return ""


def strips(x: Any, weight: Any, scales: Any, *, ahead: bool = False) -> Iterator[Strip]:
    """Blocks worth measuring: as many as there are multiprocessors, and as many stages as fit."""
    bits = BITS[weight.dtype.name]
    (depth, width), grouped = weight.shape, scales.ndim == 2
    for n, k, workers in (_AHEAD if ahead else _SHAPES)[bits]:
        bare = Strip(n, k, 2, 1, workers)
        rows = bare.rows(min(x.shape[0], _MOST_ROWS), grouped=grouped)
        stages = min(_MOST_STAGES, SHARED_BYTES // (bare.bytes(bits, rows) // 2))
        blocks = -(-width // n) * -(-x.shape[0] // rows)
        most = scales.shape[0] if grouped else -(-depth // k)
        # One round of blocks, or two or three where these leave fewer multiprocessors idle at the end.
        rounds = [max(1, min(count * PROCESSORS // blocks, most)) for count in (1, 2, 3)]
        later = max(rounds[1:], key=lambda parts: _busy(parts * blocks))
        for parts in dict.fromkeys((rounds[0], later) if workers == 2 and n == 256 and not ahead else rounds[:1]):
            yield Strip(n, k, stages, parts, workers)


def _busy(blocks: int) -> float:
    """The share of multiprocessors that have a block, over all rounds."""
    return blocks / (-(-blocks // PROCESSORS) * PROCESSORS)
