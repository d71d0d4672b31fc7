"""Tiles of matrix products on Hopper GPUs: their sizes, and the calls and GPUs that they serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

# A line of shared memory, as tensor cores read it.
LINE_BYTES = 128
# Warpgroups that multiply; one more copies.
WORKERS = 2
# What a block may have of shared memory, without what Mosaic itself needs.
SHARED_BYTES = 226 * 1024
# Rows of a line: shared memory holds them together, as tensor cores read them.
LINE_ROWS = 8
# Blocks along one axis of a launch, but for the last axis.
_MOST_BLOCKS = 65_535
# Columns of a grouped product's result that are handed over at a time.
CHUNK = 64
# Multiprocessors of an H100 and an H200: each runs one block, and a last round of a few takes as long as a full one.
PROCESSORS = 132
# Tiles of 64 rows for each warpgroup, and as many columns as its registers hold sums of.
_ROWS, _COLUMNS = (128, 256), (64, 128, 256)


@dataclass(frozen=True)
class Tile:
    """A tile of the result, the depth of a step, and how many steps are held.

    Where blocks stay on their multiprocessors, the first warpgroup begins `lead` steps before the second.
    """

    m: int
    n: int
    k: int
    stages: int
    lead: int = 0

    @property
    def share(self) -> int:
        """Rows of a warpgroup that multiplies."""
        return self.m // WORKERS

    def bytes(self, itemsize: int, held: int | None = None) -> int:
        """Shared memory for the steps, and for so many columns of the result; None: for all of them."""
        return ((self.m + self.n) * self.k * self.stages + self.m * (self.n if held is None else held)) * itemsize


# Tiles of the product that hands exponentials over: as rolling products have them. With a warpgroup that is one step
# ahead four calls on an H200, with gradients, took 0.95 to 1.02 of the time of two that begin together.
EXPONENTIALS = Tile(128, 256, 64, 4, lead=1)


def refuses(tile: tuple[int | None, ...], stages: int | None, dtype: Any, *, held: int | None = None) -> str:
    """The reason that tiles of these sizes cannot run; empty where they can."""
    m, n, k = tile
    if m is None or n is None or k is None or stages is None:
        return "block_m, block_n, block_k and num_stages must be given"
    if dtype.name not in ("bfloat16", "float16"):
        return f"Mosaic's products take bfloat16 and float16, not {dtype.name}"
    line = LINE_BYTES // dtype.itemsize
    if m not in _ROWS or n not in _COLUMNS or k % line or k > 2 * line or k < line:
        served = f"rows of {_ROWS}, columns of {_COLUMNS}, depths of {line} or {2 * line}"
        return f"tiles of {m}x{n}x{k} are not served: {served}"
    # Each thread holds its sums, and has 255 registers at most.
    if m // WORKERS * n > 64 * 256:
        return f"sums of {m}x{n} do not fit the registers of two warpgroups"
    needed = Tile(m, n, k, stages).bytes(dtype.itemsize, held)
    if stages < 2 or needed > SHARED_BYTES:
        return (
            f"{stages} stages of {m}x{n}x{k} take {needed} bytes of shared memory, over {SHARED_BYTES}, or are too few"
        )
    return ""


def shapes_refuse(rows: int, depth: int, columns: int, block_k: int | None, dtype: Any) -> str:
    """The reason that matrices of these sizes cannot be copied in lines; empty where they can."""
    line = LINE_BYTES // dtype.itemsize
    if rows % 8 or depth % max(block_k or line, line) or columns % line:
        return f"{rows} rows, a depth of {depth} and {columns} columns must be multiples of 8, {block_k} and {line}"
    return ""


def buffers(tile: Tile, itemsize: int, results: int) -> int:
    """Chunks of results that shared memory has room for beside the steps and the parts of tiles, of so many at most."""
    left = SHARED_BYTES - tile.bytes(itemsize, CHUNK)
    return max(1, min(results // CHUNK, left // (tile.m * CHUNK * itemsize)))


def rolling_refuses(rows: int, sizes: tuple[int, ...], tile: tuple[int | None, ...]) -> str:
    """The reason that blocks which stay on their multiprocessors cannot go through matrices of these sizes.

    Empty where they can. Copies are of whole tiles, and the gradient swaps depth and columns.
    """
    if jax.__version_info__ < (0, 10, 2):
        return "JAX 0.10.0 cannot take a part of what tensor cores read"
    m, n, k = (size or 128 for size in tile)
    if rows < m or rows % k or any(size % block for size in sizes for block in (m, n, k)):
        return f"{rows} rows by matrices of {sizes} are not whole tiles of {m}x{n}x{k}"
    return ""


def visits(rows: int, groups: int, tile: int) -> int:
    """Tiles of rows in groups, at most: each group may begin and end within a tile, and one more has the other rows."""
    return (rows + (groups + 1) * (tile - 1 + LINE_ROWS - 1)) // tile


def grid_refuses(rows: int, groups: int, block_m: int | None) -> str:
    """The reason that so many tiles cannot be launched at once; empty where they can."""
    count = visits(rows, groups, block_m or 128)
    return f"{count} tiles of rows are over the {_MOST_BLOCKS} of a launch" if count > _MOST_BLOCKS else ""


def band(columns: int) -> int:
    """Blocks of columns that blocks of rows share while these are in the cache."""
    return next(size for size in (8, 4, 2, 1) if columns % size == 0)
