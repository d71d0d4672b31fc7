"""Sizes of blocks that stay on their multiprocessors while rows stream through them, and what they serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from ...ops import Invocation
from ..extent import examples
from . import measured_calls
from .spread import LANES, LOAD_BYTES
from .tiles import PROCESSORS, SHARED_BYTES

# Elements of a step for each thread, and of a chunk at most; rows up to this width have half as many in a forward pass.
_EACH, _CHUNK, _NARROW = 32, 16, 1024
# Steps that are held, and bytes of a block for barriers, boards and the GPU itself.
_MOST_STAGES, _BESIDES = 6, 4096


@dataclass(frozen=True)
class Stream:
    """Rows of a step, chunks of a row and their elements, steps in shared memory, and blocks of a multiprocessor."""

    tall: int
    chunks: int
    size: int
    stages: int
    blocks: int

    def programs(self, rows: int) -> int:
        """Blocks, as many as run at once or a few less, so that all have as many steps: some would be last alone."""
        steps = rows // self.tall
        return -(-steps // -(-steps // (self.blocks * PROCESSORS)))


def stream_of(rows: int, width: int, itemsize: int, *, arrays: int, blocks: int, each: int = _EACH) -> Stream | None:
    """The stream of so many arrays of rows; None where their rows are no whole steps.

    `each` elements of a step are a thread's. `blocks` are those that the registers have room for: more would run after
    the first ones have ended.
    """
    if jax.__version_info__ < (0, 11) or itemsize != 2 or not 0 < width <= LANES * each:
        return None
    # Whole loads for each thread.
    size = next((LANES * one for one in (_CHUNK, LOAD_BYTES // itemsize) if width % (LANES * one) == 0), 0)
    tall = LANES * each // width
    if not rows or not size or rows % tall:
        return None
    stages = min(_MOST_STAGES, (SHARED_BYTES // blocks - _BESIDES) // (tall * width * itemsize * arrays))
    return Stream(tall, width // size, size, stages, blocks) if stages >= 2 else None


def forward(rows: int, width: int, itemsize: int) -> Stream | None:
    """The stream of a forward pass.

    A thread's 128 registers hold a row of 4096, a weight and a bias, 96 hold two of 2048, and 58 two of 1024. Two rows
    of 1024 to a step, and six blocks, took 35.9 us for 32768 of them on an H200, and four rows 37.7.
    """
    each, blocks = (_EACH, 3 if width > LANES * _CHUNK else 4) if width > _NARROW else (_EACH // 2, 6)
    return stream_of(rows, width, itemsize, arrays=1, blocks=blocks, each=each)


def backward(rows: int, width: int, itemsize: int) -> Stream | None:
    """The stream of a gradient: 248 registers, 235 where a row's mean is not kept, and 180 for rows of 1024."""
    return stream_of(rows, width, itemsize, arrays=2, blocks=2)


def fills(inv: Invocation[Any, Any]) -> bool:
    """Do the blocks run at once, and are they those of one call? Under vmap each example has as many."""
    return measured_calls.runs_at_once(inv) and examples(inv) == 1


def refuses(rows: int, width: int, itemsize: int) -> str:
    """The reason that rows cannot stream through blocks; empty where they can."""
    if jax.__version_info__ < (0, 11):
        return f"Mosaic GPU of jax {jax.__version__} has no instructions of our own; use jax 0.11 or later"
    if forward(rows, width, itemsize) and backward(rows, width, itemsize):
        return ""
    return f"{rows} rows of {width} elements of {itemsize} bytes are no whole steps of {LANES * _EACH}, of 2 bytes each"
