"""Bulk copies of rows to shared memory, which one thread starts, and sums that all threads have a part in.

Pallas's own copies have each thread of a warpgroup arrive at a barrier, one after the other, which costs more than a
narrow row takes to compute. Blocks are of one warpgroup here; the interpreter has none of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import llvm

from . import together
from .launch import LANES, plgpu

# Untyped, as Pallas is.
mosaic: Any = gpu
arith: Any = typed_arith
_WARPS, _LANES = LANES // 32, 32
# Numbers of a board.
_BOARD = 256


def barriers(count: int) -> Any:
    """Shared memory for so many barriers."""
    return plgpu.SMEM((count, 2), jnp.int32)


def boards() -> Any:
    """Shared memory for `sums`."""
    return together.boards(_BOARD)


def begin(held: Any, count: int, *, arrivals: int = 1) -> None:
    """Makes the barriers, of so many arrivals; all threads of a block call it, before the first copy."""

    def instructions(_: Any, memory: Any) -> None:
        place = in_shared(memory)
        code = "".join(f"@p mbarrier.init.shared::cta.b64 [$1 + {8 * at}], {arrivals}; " for at in range(count))
        asm(_by_one(code) + " fence.mbarrier_init.release.cluster; bar.sync 0;", _thread(), place)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(instructions)(held)


def bring(barrier: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Starts copies to shared memory, of arrays that each lie in one piece; all have arrived once the barrier says so.

    Before it all threads have met since they read what is overwritten.
    """

    def instructions(_: Any, memory: Any, *refs: Any) -> None:
        code, places = "", [_thread(), in_shared(memory)]
        sizes = [_bytes(ref) for ref in refs[1::2]]
        code += f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {sum(sizes)}; "
        for size, source, target in zip(sizes, refs[::2], refs[1::2], strict=True):
            at = len(places)
            code += "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            code += f"[${at + 1}], [${at}], {size}, [$1]; "
            places += [in_memory(source), in_shared(target)]
        asm(_by_one(code), *places)

    flat = [ref for pair in pairs for ref in pair]
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (1 + len(flat)))(instructions)(barrier, *flat)


def arrived(barrier: Any, turn: Any) -> None:
    """Waits for the copies of an even turn of a barrier, 0, or an odd one, 1."""

    def instructions(_: Any, memory: Any, number: Any) -> None:
        code = "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra WAIT; }"
        asm(code, in_shared(memory), number.registers.item())

    kinds = (plgpu.RefType(), plgpu.Layout.WG_SPLAT(()))
    plgpu.inline_mgpu(arg_types=kinds)(instructions)(barrier, turn)


def sums(board: Any, vectors: Sequence[jax.Array], *, layout: Any) -> tuple[jax.Array, ...]:
    """The sum of each vector's elements; all threads have met by then. A board is written anew after another's call.

    The lanes of a warp halve the vectors among them: a sum of each would take five exchanges a vector.
    """

    def show(base: Any, arrays: Sequence[Any]) -> None:
        thread = _thread()
        warp = arith.shrui(thread, _constant(5))
        lane = arith.andi(thread, _constant(_LANES - 1))
        values = [together.own(array) for array in arrays]
        value, alike = folded(values, _InWarp(lane))
        which = arith.shrui(lane, _constant(alike.bit_length() - 1))
        first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, _constant(alike - 1)), _constant(0))
        with mosaic.utils.when(first):
            place = arith.addi(warp, arith.muli(which, _constant(_WARPS)))
            llvm.store(value, mosaic.utils.getelementptr(base, [place], ir.F32Type.get()))

    def read(base: Any, at: int) -> list[Any]:
        real = ir.F32Type.get()
        place = mosaic.utils.getelementptr(base, [at * _WARPS], real)
        found = llvm.load(ir.VectorType.get((_WARPS,), real), place)
        return [llvm.extractelement(found, _constant(one)) for one in range(_WARPS)]

    return together.by_board(board, vectors, show, read, layout=layout)


def folded(values: Sequence[Any], warp: Any) -> tuple[Any, int]:
    """A value's sum over all lanes in each lane of a warp, and the number of neighbouring lanes with the same value.

    The highest bits of a lane's number are its value's.
    """
    values, distance = list(values), _LANES // 2
    while len(values) & (len(values) - 1):
        values.append(warp.zero())
    while len(values) > 1:
        half = len(values) // 2
        pairs = list(zip(values[:half], values[half:], strict=True))
        kept, given = ([warp.pick(distance, *pair[::way]) for pair in pairs] for way in (1, -1))
        values = [warp.add(a, warp.swap(b, distance)) for a, b in zip(kept, given, strict=True)]
        distance //= 2
    (value,), alike = values, 2 * distance
    while distance:
        value, distance = warp.add(value, warp.swap(value, distance)), distance // 2
    return value, alike


class _InWarp:
    """The steps of `folded` as instructions."""

    def __init__(self, lane: Any) -> None:
        self.lane = lane

    def zero(self) -> Any:
        return arith.constant(ir.F32Type.get(), 0.0)

    def add(self, a: Any, b: Any) -> Any:
        return arith.addf(a, b)

    def swap(self, value: Any, distance: int) -> Any:
        """The value of the lane with a number that differs in this bit."""
        return mosaic.utils.shfl_bfly(value, distance)

    def pick(self, distance: int, low: Any, high: Any) -> Any:
        """The second value in lanes with this bit in their number, else the first."""
        bit = arith.andi(self.lane, _constant(distance))
        return arith.select(arith.cmpi(arith.CmpIPredicate.ne, bit, _constant(0)), high, low)


def _thread() -> Any:
    return mosaic.utils.thread_idx()


def _constant(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def in_shared(memory: Any) -> Any:
    """The address of what is in shared memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mosaic.utils.memref_ptr(memory))


def in_memory(memory: Any) -> Any:
    """The address of what is in the device's memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mosaic.utils.memref_ptr(memory))


def _bytes(memory: Any) -> int:
    kind = ir.MemRefType(memory.type)
    return math.prod(kind.shape) * int(mosaic.utils.bitwidth(kind.element_type)) // 8


def _by_one(code: str) -> str:
    """Instructions under p, which thread 0 alone has; $0 is a thread's number."""
    return f"{{ .reg .pred p; setp.eq.u32 p, $0, 0; {code} }}"


def asm(code: str, *operands: Any) -> None:
    """Instructions of each thread, on integers of 32 and 64 bits."""
    kinds = ["l" if ir.IntegerType(one.type).width == 64 else "r" for one in operands]
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, list(operands), code, ",".join([*kinds, "~{memory}"]), has_side_effects=True)
