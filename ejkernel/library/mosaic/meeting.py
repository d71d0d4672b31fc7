"""Barriers of all warpgroups of a block, and of all blocks of a cluster."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from .launch import plgpu

# Untyped, as Pallas is.
mosaic: Any = gpu


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


def released(barrier: Any, *, interpret: bool) -> None:
    """Tells the blocks of a cluster's barrier that this warpgroup is done with what it guards.

    One thread arrives there for all, so that all of them come together before; at a block's own barrier each would
    arrive by itself, which takes as long as 64 products.
    """
    if not interpret:

        @plgpu.inline_mgpu()  # type: ignore[untyped-decorator]
        def instruction(_: Any) -> None:
            mosaic.utils.warpgroup_barrier()

        instruction()
    plgpu.barrier_arrive(barrier)


def gathering(groups: int, axis: str, *, interpret: bool) -> list[Any]:
    """Scratch of a block of so many warpgroups for a barrier of its cluster along this axis; a GPU needs none."""
    return [plgpu.ClusterBarrier(collective_axes=(axis,), num_arrivals=groups)] if interpret else []


def gather(barrier: Any) -> None:
    """Waits until all blocks of the cluster are here: what they wrote to memory before can be read then.

    Every warpgroup of every block calls it, those that only copy as well; None is the hardware's own barrier.
    """
    if barrier is not None:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return

    @plgpu.inline_mgpu()  # type: ignore[untyped-decorator]
    def instruction(_: Any) -> None:
        code = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], code, "~{memory}", has_side_effects=True)

    instruction()
