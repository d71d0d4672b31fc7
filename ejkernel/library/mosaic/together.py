"""Sums of several vectors over all threads of a block, with one barrier for all of them.

Pallas reduces one vector at a time, and warpgroups that share a row show each other whole vectors before. Here a thread
adds up its own elements, a warp its threads', and each warp shows one number for each vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import llvm

from .launch import LANES, plgpu

# Untyped, as Pallas is.
mosaic: Any = gpu
arith: Any = typed_arith
# Numbers of a board: those of each warp of eight warpgroups, for three vectors.
_SIZE = 128


def boards(size: int = _SIZE) -> Any:
    """Shared memory for sums: two boards, of which one call has the one and the next call the other."""
    return plgpu.SMEM((2, size), jnp.float32)


def sums(board: Any, vectors: Sequence[jax.Array], *, layout: Any, groups: int) -> tuple[jax.Array, ...]:
    """The sum of each vector's elements, over all warpgroups of the block; all of these call it."""
    warps = groups * LANES // 32

    def show(base: Any, arrays: Sequence[Any]) -> None:
        whole, real = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = mosaic.utils.thread_idx()
        warp = arith.shrui(thread, arith.constant(whole, 5))
        lane = arith.andi(thread, arith.constant(whole, 31))
        first = arith.cmpi(arith.CmpIPredicate.eq, lane, arith.constant(whole, 0))
        mine = [_of_warp(array) for array in arrays]
        with mosaic.utils.when(first):
            for at, value in enumerate(mine):
                place = arith.addi(warp, arith.constant(whole, at * warps))
                llvm.store(value, mosaic.utils.getelementptr(base, [place], real))

    def read(base: Any, at: int) -> list[Any]:
        real = ir.F32Type.get()
        places = [mosaic.utils.getelementptr(base, [at * warps + one], real) for one in range(warps)]
        return [llvm.load(real, place) for place in places]

    return by_board(board, vectors, show, read, layout=layout)


def by_board(
    board: Any,
    vectors: Sequence[jax.Array],
    show: Callable[[Any, Sequence[Any]], None],
    read: Callable[[Any, int], list[Any]],
    *,
    layout: Any,
) -> tuple[jax.Array, ...]:
    """The sum of each vector's elements: warps `show` theirs on the board, all threads meet, and each `read`s them.

    A board is written again only after another call's barrier: by then all have read it.
    """
    number = plgpu.ShapeDtypeStruct((), jnp.float32, layout=layout)

    def instructions(_: Any, memory: Any, *arrays: Any) -> list[Any]:
        base = mosaic.utils.memref_ptr(memory)
        show(base, arrays)
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "bar.sync 0;", "~{memory}", has_side_effects=True)
        totals = [added(read(base, at)) for at in range(len(arrays))]
        return [mosaic.FragmentedArray.splat(total, (), is_signed=None) for total in totals]

    kinds = (plgpu.RefType(), *[layout] * len(vectors))
    made = plgpu.inline_mgpu(arg_types=kinds, return_type=[number] * len(vectors))(instructions)(board, *vectors)
    return tuple(made)


def own(array: Any) -> Any:
    """The sum of the elements that a thread has."""
    whole = ir.IntegerType.get_signless(32)
    found = []
    for register in np.asarray(array.registers).flat:
        (held,) = ir.VectorType(register.type).shape
        found += [llvm.extractelement(register, arith.constant(whole, at)) for at in range(held)]
    return added(found)


def _of_warp(array: Any) -> Any:
    """The sum over a warp's elements, in each of its threads."""
    value = own(array)
    for distance in (16, 8, 4, 2, 1):
        value = arith.addf(value, mosaic.utils.shfl_bfly(value, distance))
    return value


def added(values: list[Any]) -> Any:
    """The sum of the values, of pairs first: a chain would wait for each, and be off by more."""
    while len(values) > 1:
        pairs = [arith.addf(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + ([values[-1]] if len(values) % 2 else [])
    return values[0]
