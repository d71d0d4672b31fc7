"""Exponentials of a product's elements for Hopper GPUs: what a softmax of its rows needs, without the product itself.

Each tile of the product is added up in registers, as `rolling` does it. What is written of it are its exponentials in
bfloat16, once each row's offset is taken off, and a few numbers of each row of the tile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import load, plgpu
from .matmul import lines, turned
from .rolling import StepTiles, TileWork, rolling
from .tiles import CHUNK, EXPONENTIALS, PROCESSORS, SHARED_BYTES, WORKERS, Tile

# An exponential may be this large, as a logarithm: e^40 is 2.4e17, and times a sum of a million others and a gradient
# of 1e15 it stays within float32. The other way round a gradient vanishes: where a token's logits are 38 above those
# that its offset is made of, a cotangent of 1e-22 divided by their exponentials is less than float32's normal numbers.
_MOST = 40.0
# Columns of tiles that rows of tiles share while these are in the cache.
_BAND = 8
# The largest offset, so that it is finite as a power of two as well.
LARGEST = float(jnp.finfo(jnp.float32).max) / 2
# An exponential as a power of two.
_BITS = 1 / math.log(2)


class Parts(NamedTuple):
    """Numbers of each row in each tile, (tiles, rows), in float32.

    What is taken off before exponentials, their sum without the label's, the label's element or 0; what rounding took
    from the sum, and the sum of the elements, where these were asked for.
    """

    offset: jax.Array
    norm: jax.Array
    label: jax.Array
    lost: jax.Array | None = None
    total: jax.Array | None = None


@dataclass(frozen=True)
class _Place:
    row: Any
    column: Any
    # Has the warpgroup's share of it a label, or columns that are no words?
    is_mixed: Any = None


def exponentials(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    expected: jax.Array | None,
    *,
    words: int,
    vocab_first: bool,
    total: bool,
    interpret: bool,
    blocks: int = PROCESSORS,
) -> tuple[jax.Array | None, Parts]:
    """`exp(hidden @ weight - offset)` in bfloat16, and its parts; columns beyond so many words count for nothing.

    A label's exponential is 0, so that the sum is that of the others, and a more exact one can be added to it.
    The offset of a row is `expected`, but in tiles with elements that are over `_MOST` above it: there it is their
    maximum. Without `expected` it is the maximum in all tiles, and exponentials are not written. One warpgroup is
    ahead of the other, so that tensor cores multiply while either computes exponentials.
    """
    tile = EXPONENTIALS
    (rows, depth), columns = hidden.shape, weight.shape[0 if vocab_first else 1]
    is_kept = expected is not None
    high, across = pl.cdiv(rows, tile.m), pl.cdiv(columns, tile.n)
    # What is copied is cut off at the last row, and what is loaded and stored is not.
    beyond = (0, high * tile.m - rows)
    vectors = [jnp.pad(labels.astype(jnp.int32), beyond, constant_values=-1)]
    vectors += [] if expected is None else [jnp.pad(expected, beyond)]
    mixed = _mixed(vectors[0], across, words, tile)
    names = ["offset", "norm", "label", *["near"] * is_kept, *["total"] * total]
    places, given = range(0, tile.n, CHUNK), len(vectors) + 3
    held = (SHARED_BYTES - tile.bytes(2, 0)) // (tile.m * CHUNK * 2)

    def read(number: Any, *refs: Any) -> list[Any]:
        place, group = _place(number, high, across), jnp.minimum(jax.lax.axis_index("group"), WORKERS - 1)
        return [refs[0][(place.column * high + place.row) * WORKERS + group]]

    def find(number: Any, is_mixed: Any) -> tuple[_Place, Any, Any]:
        place = replace(_place(number, high, across), is_mixed=is_mixed)
        return place, number >= 0, jnp.int32(depth // tile.k)

    def fill(place: _Place, at: Any, step: StepTiles, *refs: Any) -> None:
        hidden_ref, weight_ref = refs[given - 2 : given]
        inner, there = pl.ds(at * tile.k, tile.k), pl.ds(place.column * tile.n, tile.n)
        plgpu.copy_gmem_to_smem(hidden_ref.at[pl.ds(place.row * tile.m, tile.m), inner], step.left, step.full)
        right = weight_ref.at[there, inner] if vocab_first else weight_ref.at[inner, there]
        plgpu.copy_gmem_to_smem(right, step.right[0], step.full)

    def multiply(place: _Place, at: Any, totals: Sequence[Any], step: StepTiles) -> None:
        mine = pl.ds(jax.lax.axis_index("group") * tile.share, tile.share)
        plgpu.wgmma(totals[0], step.left.at[mine], turned(step.right[0]) if vocab_first else step.right[0])

    def write(place: _Place, totals: Sequence[jax.Array], later: Sequence[StepTiles], *refs: Any) -> None:
        pl.when(place.is_mixed == 0)(lambda: hand_over(place, totals[0], refs, is_mixed=False))
        pl.when(place.is_mixed != 0)(lambda: hand_over(place, totals[0], refs, is_mixed=True))

    def hand_over(place: _Place, product: jax.Array, refs: Sequence[Any], *, is_mixed: bool) -> None:
        made = refs[given:]
        group, first = jax.lax.axis_index("group"), place.column * tile.n
        mine = pl.ds(place.row * tile.m + group * tile.share, tile.share)
        label, *others = (_rows_of(ref.at[mine], interpret) for ref in refs[1 : given - 2])
        column = jax.lax.broadcasted_iota("int32", (tile.share, CHUNK), 1)
        column = column if interpret else plgpu.layout_cast(column, plgpu.Layout.WGMMA)

        def along(numbers: jax.Array) -> jax.Array:
            return jax.lax.broadcast_in_dim(numbers, column.shape, (0,))

        def masked(at: int, found: jax.Array, other: float) -> jax.Array:
            if words == across * tile.n or not is_mixed:
                return found
            return jnp.where(column < words - first - at, found, jnp.full_like(found, other))

        chunks = [product[:, at : at + CHUNK] for at in places]
        sums: dict[str, jax.Array] = {}

        def add(name: str, found: jax.Array, *, at_once: bool) -> None:
            found = jnp.sum(found, axis=1) if at_once else found
            sums[name] = sums[name] + found if name in sums else found

        if total:
            for at, found in zip(places, chunks, strict=True):
                add("total", masked(at, found, 0.0), at_once=True)
        # Nothing reads them unmasked after this: registers have no room for both.
        values = [masked(at, found, -jnp.inf) for at, found in zip(places, chunks, strict=True)]
        offset = jnp.max(functools.reduce(jnp.maximum, values), axis=1)
        # Finite, so that what is infinite stays so, or becomes zero.
        offset = jnp.minimum(jnp.maximum(offset, -LARGEST), LARGEST)
        if is_kept:
            offset = jnp.where(offset > others[0] + _MOST, offset, others[0])
        below = along(offset * _BITS)
        at_label = jnp.zeros_like(values[0])
        for number, (at, found) in enumerate(zip(places, values, strict=True)):
            # One operation and a power of two.
            powers = jnp.exp2(found * _BITS - below)
            if is_mixed:
                is_label = column == along(label - first - at)
                at_label = jnp.where(is_label, found, at_label)
                powers = jnp.where(is_label, jnp.zeros_like(powers), powers)
            # Columns are added up at the end, if registers have room for their sums: threads meet once then.
            add("norm", powers, at_once=is_mixed)
            if is_kept:
                near = _rounded(powers)
                narrow = near.astype(jnp.bfloat16)
                add("near", near, at_once=is_mixed)
                # What was there before has been read by now: by copies of this tile, all but the last few ones.
                plgpu.wait_smem_to_gmem(held - 1 if number else 0, wait_read_only=True)
                part = made[-1].at[number % held, pl.ds(group * tile.share, tile.share)]
                part[...] = narrow
                plgpu.commit_smem()
                # Beyond the last column nothing is written.
                plgpu.copy_smem_to_gmem(part, made[1].at[mine, pl.ds(first + at, CHUNK)])
        nothing = jnp.zeros_like(offset)
        nothing = nothing if interpret else plgpu.layout_cast(nothing, plgpu.Layout.WGMMA.reduce(1))
        found_sums = {name: jnp.sum(found, axis=1) if found.ndim > 1 else found for name, found in sums.items()}
        found_sums |= {"offset": offset, "label": jnp.sum(at_label, axis=1) if is_mixed else nothing}
        for number, name in enumerate(names):
            made[0][number, place.column, mine] = found_sums[name]

    parts_shape = (len(names), across, high * tile.m)
    made = rolling(
        TileWork(high * across, read, find, fill, multiply, write),
        [mixed, *vectors, hidden, weight],
        out=[
            jax.ShapeDtypeStruct(parts_shape, jnp.float32),
            *([jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)] * is_kept),
        ],
        scratch=[plgpu.SMEM((held, tile.m, CHUNK), jnp.bfloat16, transforms=lines(jnp.bfloat16))] * is_kept,
        left=(tile.m, tile.k),
        right=[(tile.n, tile.k) if vocab_first else (tile.k, tile.n)],
        tile=tile,
        interpret=interpret,
        name="library_exponentials",
        fast=True,
        blocks=blocks,
    )
    found = dict(zip(names, made[0][:, :, :rows], strict=True))
    lost = found["norm"] - found["near"] if is_kept else None
    parts = Parts(found["offset"], found["norm"], found["label"], lost, found.get("total"))
    return made[1] if is_kept else None, parts


def _rounded(powers: jax.Array) -> jax.Array:
    """Rounded to the bits of bfloat16, in float32.

    Converted to bfloat16 and back they would be converted one by one, by the units that compute exponentials. Here a
    compiler may join a product and a sum: such a product is exact, so that nothing changes.
    """
    far = powers * 2.0**16
    return (far + powers) - far


def _place(number: Any, high: int, across: int) -> _Place:
    """The tile of this number: columns of tiles in bands, of which the last may be narrower."""
    wide = min(_BAND, across)
    whole = across // wide * wide
    is_last = number >= whole * high
    width = jnp.where(is_last, max(across - whole, 1), wide)
    number = number - jnp.where(is_last, whole * high, 0)
    line, column = jax.lax.div(number, width), jax.lax.rem(number, width)
    row, band = jax.lax.rem(line, jnp.int32(high)), jax.lax.div(line, jnp.int32(high))
    return _Place(row, jnp.where(is_last, whole, band * wide) + column)


def _mixed(labels: jax.Array, across: int, words: int, tile: Tile) -> jax.Array:
    """A 1 for each warpgroup's share of a tile that has a label or columns that are no words, else a 0; by columns."""
    column = jnp.arange(across, dtype=jnp.int32)
    owner = jnp.where(labels < 0, -1, jax.lax.div(labels, jnp.int32(tile.n))).reshape(1, -1, tile.share)
    has_label = jnp.any(owner == column[:, None, None], axis=2)
    found = has_label | ((column + 1) * tile.n > words)[:, None]
    return found.astype(jnp.int32).reshape(-1)


def _rows_of(ref: Any, interpret: bool) -> jax.Array:
    return load(ref, plgpu.Layout.WGMMA.reduce(1), interpret=interpret, optimized=False)
