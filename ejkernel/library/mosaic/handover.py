"""Results of grouped products from registers to memory: some columns at a time, and the rows of one group alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import plgpu
from .tiles import CHUNK

# Makes the columns of a result from this one on, as many as are handed over at a time.
Chunk = Callable[[int], jax.Array]


@dataclass(frozen=True)
class OwnRows:
    """A warpgroup's rows of a tile: its number, how many it has, the first, and which of them are the group's."""

    group: Any
    size: int
    begin: Any
    low: Any
    high: Any

    @property
    def mine(self) -> Any:
        """The share's place among the rows of the tile."""
        return pl.ds(self.group * self.size, self.size)

    @property
    def is_whole(self) -> Any:
        """Are all the share's rows the group's?"""
        return self.high - self.low == self.size


@dataclass(frozen=True)
class Columns:
    """A tile's columns: the first, how many it has, and how many the result has."""

    first: Any
    count: int
    width: int

    def where(self, at: int) -> Callable[[Callable[[], None]], Any]:
        """Does something unless the columns from `at` on are beyond the last one."""
        if self.width % self.count:
            return pl.when(self.first + at < self.width)
        return lambda do: do()


@dataclass(frozen=True)
class Either:
    """Two results of equal shape, of which a tile has columns of one."""

    is_first: Any
    first: Any
    second: Any


def start_copy(buffer: Any, o_ref: Any, rows: Any, columns: Any) -> None:
    """Starts a copy from shared memory to these rows and columns of a result, or of the one that the tile is of."""
    if not isinstance(o_ref, Either):
        plgpu.copy_smem_to_gmem(buffer, o_ref.at[rows, columns])
        return
    pl.when(o_ref.is_first)(lambda: plgpu.copy_smem_to_gmem(buffer, o_ref.first.at[rows, columns]))
    pl.when(jnp.logical_not(o_ref.is_first))(lambda: plgpu.copy_smem_to_gmem(buffer, o_ref.second.at[rows, columns]))


def share_of(group: Any, size: int, start: Any, first: Any, last: Any) -> OwnRows:
    """The rows of a warpgroup in a tile that starts there, with rows from `first` to before `last` of the group."""
    begin = start + group * size
    return OwnRows(group, size, begin, jnp.clip(first - begin, 0, size), jnp.clip(last - begin, 0, size))


def by_group(
    share: OwnRows, chunk: Chunk, o_ref: Any, columns: Columns, staged: Any, pieces: Any, *, written: bool = True
) -> None:
    """Hands a share of a result over to its reference; rows of other groups are left as they are.

    `staged` is (buffers, rows, columns), `pieces` has another order of elements, in which a row can be anywhere.
    """

    def copy_some(share: OwnRows, o_ref: Any, buffer: Any, there: Any) -> None:
        copy_rows(share, o_ref, pieces, there)

    def handed(copied: Callable[..., None], buffers: Sequence[Any]) -> None:
        by_chunks(chunk, functools.partial(copied, share, o_ref), columns, buffers, written=written)

    mine, is_whole = share.mine, share.is_whole
    pl.when(is_whole)(lambda: handed(copy_whole, [staged.at[number, mine] for number in range(staged.shape[0])]))
    pl.when(jnp.logical_not(is_whole))(lambda: handed(copy_some, [pieces.at[mine]]))


def copy_whole(share: OwnRows, o_ref: Any, buffer: Any, there: Any) -> None:
    """Starts a copy of all the share's rows to these columns of the result."""
    start_copy(buffer, o_ref, pl.ds(share.begin, share.size), there)


def copy_rows(share: OwnRows, o_ref: Any, pieces: Any, there: Any) -> None:
    """Starts copies of the group's rows of a share, from the rows of a tile where they can be anywhere."""
    count, at = share.high - share.low, share.low
    # Copies have a fixed size: one for each binary digit of the number of rows.
    size = share.size // 2
    while size:
        some = jax.lax.bitwise_and(count, size)

        @pl.when(some > 0)
        def _(at: Any = at, size: int = size) -> None:
            part = pieces.at[pl.ds(share.group * share.size + at, size)]
            start_copy(part, o_ref, pl.ds(share.begin + at, size), there)

        at, size = at + some, size // 2


def by_chunks(
    chunk: Chunk, copy: Callable[[Any, Any], None], columns: Columns, buffers: Sequence[Any], *, written: bool = True
) -> None:
    """Hands a warpgroup's share of a result over by `copy(buffer, columns)`, as many chunks at once as buffers.

    All columns at once would take the steps' memory. Those beyond the last one are left out. `written`: all is written
    when it returns.
    """
    places = range(0, columns.count, CHUNK)
    for begin in range(0, len(places), len(buffers)):
        some = list(zip(places[begin:], buffers, strict=False))
        # The chunks before have been read from there by now.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for at, buffer in some:

            def put(at: int = at, buffer: Any = buffer) -> None:
                buffer[...] = chunk(at)

            columns.where(at)(put)
        plgpu.commit_smem()
        for at, buffer in some:
            columns.where(at)(functools.partial(copy, buffer, pl.ds(columns.first + at, CHUNK)))
    if written:
        plgpu.wait_smem_to_gmem(0)
