"""A barrier of all warpgroups of a block."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from .launch import plgpu


def meeting(groups: int, *, interpret: bool) -> list[Any]:
    """Scratch of a block of so many warpgroups for one; a GPU needs none."""
    return [plgpu.Barrier(num_arrivals=groups)] if interpret else []


def meet(barrier: Any) -> None:
    """Waits until all warpgroups are here, and have written what they wrote before; None is the block's own barrier.

    At a barrier of Pallas each thread arrives by itself, one after the other. On an H200 that cost some three cycles a
    thread: softmax of 8192x2048 by two warpgroups took 52 us, and 19 by one. The interpreter has no other.
    """
    if barrier is not None:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return

    @plgpu.inline_mgpu()  # type: ignore[untyped-decorator]
    def instruction(_: Any) -> None:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "bar.sync 0;", "~{memory}", has_side_effects=True)

    instruction()
