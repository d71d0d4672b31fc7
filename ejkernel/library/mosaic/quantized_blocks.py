"""A block of a product with weights of 8 or 4 bits: its shared memory, the warpgroup that copies, the others' tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import loop, plgpu
from .quantized_tiles import BITS, HEIGHT, Strip, registers
from .tiles import LINE_BYTES


def scratch(x: jax.Array, weight: jax.Array, strip: Strip, rows: int, *, interpret: bool) -> list[Any]:
    """Weights, rows and their barriers, for as many steps as are held."""
    bits = BITS[weight.dtype.name]
    weights = plgpu.SMEM((strip.stages, strip.k, strip.n), weight.dtype, transforms=_lines(bits, interpret))
    words = (strip.stages, strip.k, strip.n * bits // 16)
    as_words = plgpu.SMEM(words, jnp.int16, transforms=_lines(16, interpret))
    return [
        # Both have the same lines of 128 bytes: what is copied as weights is read as words.
        weights if interpret else plgpu.RefUnion(weights, as_words),
        plgpu.SMEM((strip.stages, rows, strip.k), x.dtype, transforms=_lines(16, interpret)),
        plgpu.Barrier(num_arrivals=2, num_barriers=strip.stages),
        plgpu.Barrier(num_arrivals=strip.workers, num_barriers=strip.stages),
        # The interpreter takes a factor from shared memory alone.
        *([plgpu.SMEM((strip.workers, HEIGHT, 64), x.dtype)] if interpret else []),
    ]


def _lines(bits: int, interpret: bool) -> tuple[Any, ...]:
    return () if interpret else (plgpu.TilingTransform((8, LINE_BYTES * 8 // bits)), plgpu.SwizzleTransform(LINE_BYTES))


def copy(
    x_ref: Any,
    w_ref: Any,
    held: Sequence[Any],
    strip: Strip,
    *,
    rows: int,
    worker: Any,
    at_row: Any,
    at_column: Any,
    first: Any,
    mine: Any,
    interpret: bool,
) -> None:
    """Brings the steps of a part into shared memory, each once its slot is free; for the last warpgroup.

    `held` is for weights, rows, and the barriers of full and of empty slots.
    """
    narrow, x_held, full, empty = held

    @pl.when(worker == strip.workers)
    def _() -> None:
        each = registers(strip.workers)
        if each and not interpret:
            plgpu.set_max_registers(each[0], action="decrease")

        def copied(at: Any, state: Any) -> Any:
            slot = jax.lax.rem(at, jnp.int32(strip.stages))
            pl.when(at >= strip.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            here = pl.ds((first + at) * strip.k, strip.k)
            columns = pl.ds(at_column * strip.n, strip.n)
            plgpu.copy_gmem_to_smem(w_ref.at[here, columns], narrow.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(at_row * rows, rows), here], x_held.at[slot], full.at[slot])
            return state

        loop(mine, copied, (), interpret=interpret)
        # Every phase of a barrier is waited for, also the last ones.
        last = jnp.minimum(mine, strip.stages)

        def drained(at: Any, state: Any) -> Any:
            plgpu.barrier_wait(empty.at[jax.lax.rem(mine - last + at, jnp.int32(strip.stages))])
            return state

        loop(last, drained, (), interpret=interpret)


def share_out(work: Callable[[range, Any], None], strip: Strip, words: int, *, worker: Any, interpret: bool) -> None:
    """Has each of the other warpgroups work on the numbers of the words of its tile."""

    @pl.when(worker < strip.workers)
    def _() -> None:
        each = registers(strip.workers)
        if each and not interpret:
            plgpu.set_max_registers(each[1], action="increase")
        if strip.each() == words:
            work(range(words), worker)
            return
        # Two warpgroups share a tile, and each has one byte of its words.
        for byte in range(2):

            @pl.when(jax.lax.rem(worker, jnp.int32(2)) == byte)
            def _(byte: int = byte) -> None:
                work(range(byte * words // 2, (byte + 1) * words // 2), jax.lax.div(worker, jnp.int32(2)))
