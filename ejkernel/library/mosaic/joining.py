"""Sums of a product's parts, added up by the blocks that made them: in the same launch, without a second program.

Each thread writes its sums as they lie in its registers, 16 bytes at a time. Once all parts of a strip are written,
each of its blocks adds up some of the rows: the thread at the same place has the same words and rows in every part.

A counter for each strip says that all are there. Its highest bit flips with the last arrival and all lower bits are
zero again, so that the state after a launch may be the one before the next. Blocks that wait must run at the same time
as those they wait for: parts lie next to each other in the order in which blocks start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import llvm

from .launch import LANES, plgpu

# Untyped, as Pallas is.
mosaic: Any = gpu
arith: Any = typed_arith
# Rows that lie together in a product's registers, and numbers that a thread has of them for a number of its words.
_TOGETHER, EACH = 8, 4
_FLIP = 1 << 31
# XLA keeps equal constants of all programs in one place: no other program has one that ends so.
_MARK = np.frombuffer(b"ejkernel counters of joined sums", np.int32)


@dataclass(frozen=True)
class Joint:
    """Parts of a sum, warpgroups of a block, rows, numbers of a word, and columns of the whole result."""

    parts: int
    workers: int
    rows: int
    words: int
    stride: int

    @property
    def groups(self) -> int:
        """Groups of rows that lie together."""
        return self.rows // _TOGETHER

    @property
    def share(self) -> int:
        """Groups of rows that each part adds up."""
        return -(-self.groups // self.parts)

    @property
    def line(self) -> int:
        """Numbers that all threads write at once."""
        return self.workers * LANES * EACH

    def shape(self, strips: int, numbers: int) -> tuple[int, ...]:
        """That of the sums in memory, for a warpgroup that has so many numbers of its words."""
        return strips, self.parts * self.groups * numbers * self.line


def constant_counters(strips: int) -> Any:
    """Counters at zero, as a constant of the program; they are counted in the constant's memory."""
    return np.concatenate([np.zeros(strips, np.int32), _MARK])


def join(refs: Sequence[Any], place: Sequence[Any], sums: Sequence[jax.Array], first: int, joint: Joint) -> None:
    """Adds up the parts' sums (words, rows), scales, rounds and writes them; for every warpgroup of all parts.

    `refs` are those of the strip's sums in memory, its counter, and of this tile's scales and results; `place` is the
    part, the warpgroup, and 0 for a tile that the result does not have; `first` the first of these numbers in a word.
    """

    def instructions(_: Any, memory: Any, counter: Any, scales: Any, out: Any, *arrays: Any) -> None:
        part, worker, inside, *totals = arrays
        part, worker, inside = (one.registers.item() for one in (part, worker, inside))
        held = _held(totals[0])
        thread = arith.muli(mosaic.utils.thread_idx(), _whole(EACH))
        base = mosaic.utils.memref_ptr(memory)

        def line(of: Any, group: Any, number: int) -> Any:
            """The place of this thread's sums of a part."""
            at = arith.addi(arith.muli(of, _whole(joint.groups)), group)
            at = arith.addi(arith.muli(at, _whole(len(totals))), _whole(number))
            at = arith.addi(arith.muli(at, _whole(joint.line)), thread)
            return mosaic.utils.getelementptr(base, [at], ir.F32Type.get())

        factors = [_vector(scales, _column(word, joint, first), len(totals)) for _, word, _ in held[0]]
        for group, registers in enumerate(held):
            for number, array in enumerate(totals):
                value = _gathered([array.registers[at] for at, _, _ in registers])
                llvm.store(value, line(part, _whole(group), number))
        _meet(mosaic.utils.memref_ptr(counter), part, worker, joint)
        kind = ir.VectorType.get((EACH,), ir.F32Type.get())
        turns = [arith.addi(arith.muli(part, _whole(joint.share)), _whole(turn)) for turn in range(joint.share)]

        def read(group: Any) -> list[list[Any]]:
            return [
                [llvm.load(kind, line(_whole(of), group, number)) for of in range(joint.parts)]
                for number in range(len(totals))
            ]

        def finish(group: Any, found: list[list[Any]]) -> None:
            _finish(out, [_added(one) for one in found], factors, held[0], group, first, joint)

        with mosaic.utils.when(arith.cmpi(arith.CmpIPredicate.ne, inside, _whole(0))):
            if joint.groups % joint.parts == 0:
                # All are read before the first is written.
                for group, found in [(group, read(group)) for group in turns]:
                    finish(group, found)
                return
            for group in turns:
                with mosaic.utils.when(arith.cmpi(arith.CmpIPredicate.ult, group, _whole(joint.groups))):
                    finish(group, read(group))

    number = plgpu.Layout.WG_SPLAT
    kinds = (*[plgpu.RefType()] * 4, *[number] * 3, *[plgpu.Layout.WGMMA] * len(sums))
    plgpu.inline_mgpu(arg_types=kinds)(instructions)(*refs, *place, *sums)


def _held(array: Any) -> list[list[tuple[tuple[int, ...], Any, Any]]]:
    """For each group of rows, the registers of it: index, word, and first row."""
    groups: dict[int, list[tuple[tuple[int, ...], Any, Any]]] = {}
    places = array.layout.thread_idxs(array.shape)
    for at, (word, row) in zip(np.ndindex(array.registers.shape), places, strict=True):
        groups.setdefault(at[1], []).append((at, word, row))
    return [groups[at] for at in range(len(groups))]


def _meet(counter: Any, part: Any, worker: Any, joint: Joint) -> None:
    """Waits until all warpgroups of all parts have written their sums."""
    arrivals = joint.parts * joint.workers
    one = arith.cmpi(arith.CmpIPredicate.eq, arith.addi(part, worker), _whole(0))
    value = arith.select(one, _whole(_FLIP - arrivals + 1), _whole(1))
    mosaic.utils.warpgroup_barrier()
    with mosaic.utils.single_thread(scope=mosaic.utils.ThreadSubset.WARPGROUP):
        code = (
            "{ .reg .pred p; .reg .b32 o, c; fence.acq_rel.gpu; atom.add.relaxed.gpu.global.u32 o, [$0], $1;"
            " WAITING: ld.relaxed.gpu.global.u32 c, [$0]; xor.b32 c, c, o; setp.ge.s32 p, c, 0; @p bra WAITING;"
            " fence.acq_rel.gpu; }"
        )
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [counter, value], code, "l,r,~{memory}", has_side_effects=True)
    mosaic.utils.warpgroup_barrier()


def _finish(
    out: Any, sums: list[Any], factors: list[Any], held: list[Any], group: Any, first: int, joint: Joint
) -> None:
    """Scales, rounds and writes the sums of a group of rows."""
    narrow = ir.VectorType.get((len(sums),), ir.BF16Type.get())
    base, index = mosaic.utils.memref_ptr(out), ir.IndexType.get()
    rows = EACH // len(held)
    for at, ((_, word, row), factor) in enumerate(zip(held, factors, strict=True)):
        for down in range(rows):
            value = _gathered([_element(one, at * rows + down) for one in sums])
            value = arith.truncf(narrow, arith.mulf(value, factor))
            line = arith.addi(row, arith.index_cast(index, arith.muli(group, _whole(_TOGETHER))))
            line = arith.muli(arith.addi(line, arith.constant(index, down)), arith.constant(index, joint.stride))
            there = arith.index_cast(_int(), arith.addi(line, _column(word, joint, first)))
            llvm.store(value, mosaic.utils.getelementptr(base, [there], ir.BF16Type.get()))


def _column(word: Any, joint: Joint, first: int) -> Any:
    index = ir.IndexType.get()
    return arith.addi(arith.muli(word, arith.constant(index, joint.words)), arith.constant(index, first))


def _vector(memory: Any, at: Any, size: int) -> Any:
    there = mosaic.utils.getelementptr(
        mosaic.utils.memref_ptr(memory), [arith.index_cast(_int(), at)], ir.F32Type.get()
    )
    return llvm.load(ir.VectorType.get((size,), ir.F32Type.get()), there)


def _added(values: list[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = arith.addf(total, value)
    return total


def _gathered(values: list[Any]) -> Any:
    """One vector of numbers and vectors."""
    numbers = []
    for value in values:
        if isinstance(value.type, ir.VectorType):
            numbers += [_element(value, at) for at in range(ir.VectorType(value.type).shape[0])]
        else:
            numbers.append(value)
    made = llvm.mlir_undef(ir.VectorType.get((len(numbers),), ir.F32Type.get()))
    for at, number in enumerate(numbers):
        made = llvm.insertelement(made, number, _whole(at))
    return made


def _element(vector: Any, at: int) -> Any:
    return llvm.extractelement(vector, _whole(at))


def _int() -> Any:
    return ir.IntegerType.get_signless(32)


def _whole(value: int) -> Any:
    return arith.constant(_int(), value if value < _FLIP else value - (1 << 32))
