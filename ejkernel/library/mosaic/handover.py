"""Results of grouped products from registers to memory: some columns at a time, and the rows of one group alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import plgpu
from .tiles import CHUNK


@dataclass(frozen=True)
class Share:
    """A warpgroup's rows of a tile: its number, how many it has, the first, and which of them are the group's."""

    group: Any
    size: int
    begin: Any
    low: Any
    high: Any


def share_of(group: Any, size: int, start: Any, first: Any, last: Any) -> Share:
    """The rows of a warpgroup in a tile that starts there, with rows from `first` to before `last` of the group."""
    begin = start + group * size
    return Share(group, size, begin, jnp.clip(first - begin, 0, size), jnp.clip(last - begin, 0, size))


def by_group(
    share: Share,
    chunk: Callable[[int], jax.Array],
    columns: int,
    o_ref: Any,
    staged: Any,
    pieces: Any,
    *,
    first: Any,
    width: int,
    settled: bool = True,
) -> None:
    """Hands a share's columns over, `chunk(at)` being those from `at` on; rows of other groups are left as they are."""
    mine = pl.ds(share.group * share.size, share.size)

    def copy(there: Any) -> None:
        plgpu.copy_smem_to_gmem(staged.at[mine], o_ref.at[pl.ds(share.begin, share.size), there])

    def copy_some(there: Any) -> None:
        count, at = share.high - share.low, share.low
        # Copies have a fixed size: one for each binary digit of the number of rows.
        size = share.size // 2
        while size:
            some = jax.lax.bitwise_and(count, size)

            @pl.when(some > 0)
            def _(at: Any = at, size: int = size) -> None:
                part = pieces.at[pl.ds(share.group * share.size + at, size)]
                plgpu.copy_smem_to_gmem(part, o_ref.at[pl.ds(share.begin + at, size), there])

            at, size = at + some, size // 2

    how: dict[str, Any] = {"first": first, "width": width, "settled": settled}
    is_whole = share.high - share.low == share.size
    pl.when(is_whole)(lambda: by_chunks(chunk, columns, staged.at[mine], copy, **how))
    pl.when(jnp.logical_not(is_whole))(lambda: by_chunks(chunk, columns, pieces.at[mine], copy_some, **how))


def by_chunks(
    chunk: Callable[[int], jax.Array],
    columns: int,
    buffer: Any,
    copy: Callable[[Any], None],
    *,
    first: Any,
    width: int,
    settled: bool = True,
) -> None:
    """Hands a warpgroup's share of the result over, some columns at a time: all of them would take the steps' memory.

    Columns beyond the last one are left out. `settled`: all is written when it returns.
    """
    for at in range(0, columns, CHUNK):

        def hand_over(at: int = at) -> None:
            # The chunk before has been read from there by now.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer[...] = chunk(at)
            plgpu.commit_smem()
            copy(pl.ds(first + at, CHUNK))

        if width % columns:
            pl.when(first + at < width)(hand_over)
        else:
            hand_over()
    if settled:
        plgpu.wait_smem_to_gmem(0)
