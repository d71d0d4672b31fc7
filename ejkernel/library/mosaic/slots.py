"""Barriers of slots that are free again, at which one thread of each warp arrives.

At a barrier of Pallas all 128 threads of a warpgroup arrive one after the other, some three cycles each on an H200; a
step of a product with few bits has as many cycles as four warpgroups take to arrive. A warp's products have read what
they read before it arrives, so that its threads need not arrive each for itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import llvm

from .launch import plgpu
from .meeting import meet

# Untyped, as Pallas is.
mosaic: Any = gpu
arith: Any = typed_arith
_WARPS = 4


def slots(count: int) -> Any:
    """Scratch for the barriers of so many slots: 64 bits each."""
    return plgpu.SMEM((2 * count,), jnp.int32)


def open_slots(held: Any, count: int, workers: int) -> None:
    """Makes the barriers ready for so many warpgroups; all warpgroups of the block call it first."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))  # type: ignore[untyped-decorator]
    def instructions(_: Any, memory: Any) -> None:
        base, whole = mosaic.utils.memref_ptr(memory), ir.IntegerType.get_signless(32)
        with mosaic.utils.single_thread(scope=mosaic.utils.ThreadSubset.BLOCK):
            for slot in range(count):
                place = mosaic.utils.getelementptr(base, [slot], ir.IntegerType.get_signless(64))
                number = arith.constant(whole, _WARPS * workers)
                _run("mbarrier.init.shared::cta.b64 [$0], $1;", [place, number])

    instructions(held)
    meet(None)


def free_slot(held: Any, slot: Any) -> None:
    """Says that this warpgroup is done with what the slot holds."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))  # type: ignore[untyped-decorator]
    def instructions(_: Any, memory: Any) -> None:
        code = (
            "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; bar.warp.sync 0xffffffff;"
            " @p mbarrier.arrive.release.cta.shared::cta.b64 _, [$0]; }"
        )
        _run(code, [mosaic.utils.memref_ptr(memory)])

    instructions(held.at[pl.ds(2 * slot, 2)])


def await_slot(held: Any, slot: Any, turn: Any) -> None:
    """Waits until all are done with what the slot held at this turn, counted from 0."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))  # type: ignore[untyped-decorator]
    def instructions(_: Any, memory: Any, phase: Any) -> None:
        code = (
            "{ .reg .pred p; WAITING: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [$0], $1;"
            " @!p bra WAITING; }"
        )
        _run(code, [mosaic.utils.memref_ptr(memory), phase.registers.item()])

    instructions(held.at[pl.ds(2 * slot, 2)], jax.lax.rem(turn, jnp.int32(2)))


def _run(code: str, operands: list[Any]) -> None:
    places = ",".join(["r"] * len(operands))
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, code, f"{places},~{{memory}}", has_side_effects=True)
