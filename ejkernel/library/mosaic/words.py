"""Numbers of 8 or 4 bits out of words of 16, in bfloat16: by bits and one subtraction, without a slow conversion.

A number's bits are put into the fraction of a power of two that has steps of one at the number's lowest bit, and that
power is taken away. The highest bit lies where the exponent has its lowest, and doubles what is taken away: so it
counts as a sign. The lowest four bits have room for their sign, which is flipped instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import llvm

from .launch import plgpu

# Untyped, as Pallas is.
mosaic: Any = gpu
arith: Any = typed_arith
# Tables of three inputs: (a & b) | c, and (a & b) ^ c.
_OR, _XOR = 0xEA, 0x6A


@dataclass(frozen=True)
class Place:
    """A number's place in a word: the shift before it, the masks of its bits and sign, and the power under it."""

    shift: int
    bits: int
    sign: int
    under: int

    @classmethod
    def of(cls, number: int, bits: int) -> Place:
        """The place of one of the numbers of so many bits, counted from the word's lowest."""
        shift, low = divmod(number * bits, 8)
        power = (127 + 7 - low) << 7
        if bits == 4 and low == 0:
            return cls(8 * shift, 0xF, 0, power | 8)
        return cls(8 * shift, ((1 << (bits - 1)) - 1) << low, 0x80, power)


def widened(found: jax.Array, number: int, bits: int, *, interpret: bool) -> jax.Array:
    """The number at one place of each word, as bfloat16; `interpret` is for machines without a GPU."""
    place = Place.of(number, bits)
    if interpret:
        return _plain(found, place)
    layout = plgpu.Layout.WGMMA
    out = plgpu.ShapeDtypeStruct(found.shape, jnp.bfloat16, layout=layout)

    # JAX makes five instructions of a shift of two words, and two of two operations of bits: these are half as many.
    def instructions(_: Any, words: Any) -> Any:
        made = np.empty_like(words.registers)
        for index, pair in np.ndenumerate(words.registers):
            made[index] = _of_pair(pair, place)
        return mosaic.FragmentedArray(_registers=made, _layout=words.layout, _is_signed=None)

    wide: jax.Array = plgpu.inline_mgpu(arg_types=(layout,), return_type=out)(instructions)(found)
    return wide


def _plain(found: jax.Array, place: Place) -> jax.Array:
    word = jax.lax.shift_right_logical(found, jnp.full_like(found, place.shift))
    bits, under = word & jnp.int16(place.bits), jnp.int16(place.under)
    one = bits | under if place.sign else bits ^ under
    two = (word & jnp.int16(place.sign)) | under
    wide, taken = (jax.lax.bitcast_convert_type(part, jnp.bfloat16) for part in (one, two))
    made: jax.Array = wide - taken
    return made


def _of_pair(pair: Any, place: Place) -> Any:
    """Both words of a register at once; bits that the shift brings over from the other word are masked away."""
    whole = ir.IntegerType.get_signless(32)
    word = mosaic.utils.bitcast(pair, whole)
    if place.shift:
        word = arith.shrui(word, arith.constant(whole, place.shift))
    bits, sign, under = (hex(part << 16 | part) for part in (place.bits, place.sign, place.under))
    taken = f"lop3.b32 t, $1, {sign}, {under}, {_OR};" if place.sign else f"mov.b32 t, {under};"
    table = _OR if place.sign else _XOR
    code = f"{{ .reg .b32 w, t; lop3.b32 w, $1, {bits}, {under}, {table}; {taken} sub.bf16x2 $0, w, t; }}"
    made = llvm.inline_asm(whole, [word], code, "=r,r")
    return mosaic.utils.bitcast(made, ir.VectorType.get((2,), ir.BF16Type.get()))


def placed(there: Any, sums: Sequence[jax.Array], first: int, words: int, stride: int) -> None:
    """Writes sums (words, rows) of numbers that lie side by side, from the first on, into (rows, columns) in memory.

    A thread has the sums of the same words: so many numbers are written at once, without a transposition before.
    """

    def instructions(_: Any, memory: Any, *arrays: Any) -> None:
        base = mosaic.utils.memref_ptr(memory)
        for at, word, row in _registers(arrays[0]):
            _write(base, arrays, at, _place(word, row, first, words, stride), stride)

    kinds = (plgpu.RefType(), *[plgpu.Layout.WGMMA] * len(sums))
    plgpu.inline_mgpu(arg_types=kinds)(instructions)(there, *sums)


def _registers(array: Any) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
    """Each register of an array (words, rows): its index, its word and the first of its rows."""
    places = array.layout.thread_idxs(array.shape)
    for at, (word, row) in zip(np.ndindex(array.registers.shape), places, strict=True):
        yield at, word, row


def _place(word: Any, row: Any, first: int, words: int, stride: int) -> Any:
    index = ir.IndexType.get()
    along = arith.addi(arith.muli(word, arith.constant(index, words)), arith.constant(index, first))
    return arith.addi(arith.muli(row, arith.constant(index, stride)), along)


def _write(base: Any, arrays: Sequence[Any], at: tuple[int, ...], begin: Any, stride: int) -> None:
    """All arrays' numbers of a register, those of one row side by side."""
    index, whole, number = ir.IndexType.get(), ir.IntegerType.get_signless(32), ir.F32Type.get()
    (held,) = ir.VectorType(arrays[0].registers[at].type).shape
    for row in range(held):
        value = llvm.mlir_undef(ir.VectorType.get((len(arrays),), number))
        for slot, array in enumerate(arrays):
            found = llvm.extractelement(array.registers[at], arith.constant(whole, row))
            value = llvm.insertelement(value, found, arith.constant(whole, slot))
        place = arith.index_cast(whole, arith.addi(begin, arith.constant(index, row * stride)))
        llvm.store(value, mosaic.utils.getelementptr(base, [place], number))
