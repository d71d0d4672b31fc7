"""The order in which blocks that stay take a grouped product's tiles, so that all of them end at about the same time.

A group's last tile often has rows for one warpgroup alone, and takes about half as long as another: two of them are one
slot, as long as a whole tile, and slots are dealt out in turns. Of a last round that is at most half full, each block
takes half of a slot. For 32 groups of some 1,024 rows and 132 blocks that is 12.0 or 12.5 rounds where whole tiles take
13, and 6.0 or 6.5 where they take 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..counting import ended_before
from ..ragged_dot_tiles import starts_of
from .tiles import LINE_ROWS, visits

# Of each of two tiles the group, the first line, which of its rows are the group's; and how many slots there are.
_EACH = 3
_FIELDS = 2 * _EACH + 1
# Blocks of columns that a tile of rows meets while it is in the cache, in bands of about the same width.
_WIDEST_BAND = 8
# Pairs of groups that are compared at once.
_FEW_PAIRS = 1 << 23
_LINE_LOG = LINE_ROWS.bit_length() - 1
# The first row of a tile that is its group's, and the one after the last, are one number: fewer registers hold them.
_HALF = 16


def slots_of(sizes: jax.Array, rows: int, tile: int, *, paired: bool = True) -> jax.Array:
    """The slots one after the other, `_FIELDS` numbers each; most have no second tile, and those unused no tile.

    A group's tiles follow each other from the line of rows that its first one is in: copies start at lines. One more
    group has the rows that belong to none. Without `paired` each tile is a slot.
    """
    starts, stops = starts_of(sizes, rows)
    starts, stops = jnp.append(starts, stops[-1]), jnp.append(stops, rows)
    # By shifts, which are cheap enough for XLA to repeat them: a division had a launch of its own.
    begins, log = starts & -LINE_ROWS, tile.bit_length() - 1
    tiles = jnp.where(starts < stops, (stops - begins + (tile - 1)) >> log, 0)

    def rows_of(begin: Any, start: Any, stop: Any, at: Any) -> list[Any]:
        place = begin + at * tile
        # The last tile of all does not reach over the last row: it has rows of the tile before.
        line = jnp.clip(place, 0, max(0, rows - tile)) >> _LINE_LOG
        return [line, jnp.maximum(start, place), jnp.minimum(stop, place + tile)]

    def tile_of(group: Any, at: Any, is_there: Any) -> list[Any]:
        line, low, high = rows_of(begins[group], starts[group], stops[group], at)
        begin = line << _LINE_LOG
        return [group, line, jnp.where(is_there, (low - begin) << _HALF | (high - begin), 0)]

    everyone = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    line, low, high = rows_of(begins, starts, stops, tiles - 1)
    middle = line * LINE_ROWS + tile // 2
    is_low = (tiles > 0) & ((high <= middle) | (low >= middle)) & paired
    # Of the low tiles every second one makes a slot, with the one before it; a last one without another has its own.
    sums, ranks, latest = _along(tiles - is_low, is_low.astype(jnp.int32), jnp.where(is_low, everyone, 0))
    ends = sums + (ranks >> 1)
    whole, ends = jnp.append(sums - jnp.append(0, sums[:-1]), 0), jnp.append(ends, ends[-1] + (ranks[-1] & 1))
    begun = jnp.append(0, ends[:-1])
    number = jnp.arange(visits(rows, sizes.shape[0], tile), dtype=jnp.int32)
    section = jnp.minimum(ended_before(ends, number), tiles.shape[0])
    at, is_used = number - begun[section], number < ends[-1]
    is_pair = at >= whole[section]
    # The group of the low tile before that of this group.
    before = jnp.append(0, latest)
    own = jnp.minimum(section, tiles.shape[0] - 1)
    first = jnp.where(is_pair, before[section], own)
    one = tile_of(first, jnp.where(is_pair, tiles[first] - 1, at), is_used)
    other = tile_of(own, tiles[own] - 1, is_used & is_pair & (section < tiles.shape[0]))
    fields = [*one, *other, jnp.broadcast_to(ends[-1], number.shape)]
    return jnp.stack([x.astype(jnp.int32) for x in fields], axis=1).reshape(-1)


def _along(one: jax.Array, other: jax.Array, most: jax.Array) -> Sequence[jax.Array]:
    """Running sums of two vectors, and the running maximum of one without negative numbers: on a GPU in one launch."""
    size = one.shape[0]
    if size * size > _FEW_PAIRS:
        return [jnp.cumsum(one), jnp.cumsum(other), jax.lax.cummax(most)]
    place = jnp.arange(size)
    pairs = [jnp.where(place[None] <= place[:, None], x[None], 0) for x in (one, other, most)]

    def join(x: Any, y: Any) -> Any:
        return x[0] + y[0], x[1] + y[1], jnp.maximum(x[2], y[2])

    made: Sequence[jax.Array] = jax.lax.reduce(pairs, [jnp.zeros((), x.dtype) for x in pairs], join, (1,))
    return made


@dataclass(frozen=True)
class KnownSlots:
    """Numbers that a launch's blocks read once: how many slots there are, and the first turn that is half of one."""

    slots: Any
    halved: Any


@dataclass(frozen=True)
class SlotOrder:
    """Slots by blocks of columns; `even`: the tiles of a last round that is at most half full are taken by halves."""

    across: int
    blocks: int
    high: int
    even: bool

    def known(self, table: Any) -> tuple[KnownSlots, Any]:
        """Numbers that are read once, and how many turns of single blocks there are."""
        slots = table[_FIELDS - 1]
        tiles = slots * self.across
        if not self.even:
            return KnownSlots(slots, tiles), tiles
        left = jax.lax.rem(tiles, jnp.int32(self.blocks))
        halves = jnp.where(2 * left <= self.blocks, left, 0)
        return KnownSlots(slots, tiles - halves), tiles + halves

    def spot(self, known: KnownSlots, number: Any) -> tuple[Any, Any]:
        """The slot and the block of columns of a turn."""
        beyond = number - known.halved
        at = jnp.where(beyond < 0, number, known.halved + jax.lax.div(beyond, jnp.int32(2)))
        bands = pl.cdiv(self.across, _WIDEST_BAND)
        wide = pl.cdiv(self.across, bands)
        if bands == 1:
            return jax.lax.div(at, jnp.int32(wide)), jax.lax.rem(at, jnp.int32(wide))
        each = known.slots * wide
        band = jnp.minimum(jax.lax.div(at, each), bands - 1)
        rest, width = at - band * each, jnp.minimum(wide, self.across - band * wide)
        return jax.lax.div(rest, width), band * wide + jax.lax.rem(rest, width)

    def read(self, known: KnownSlots, number: Any, table: Any) -> list[Any]:
        """The numbers of both tiles of a slot."""
        begin = self.spot(known, number)[0] * _FIELDS
        return [table[begin + at] for at in range(2 * _EACH)]

    def parts(self, known: KnownSlots, number: Any, *numbers: Any) -> Any:
        """The number of tiles that a turn has."""
        return jnp.where((number < known.halved) & (numbers[-1] != 0), 2, 1)

    def tile(self, known: KnownSlots, number: Any, part: Any, *numbers: Any) -> Sequence[Any]:
        """The group, the first line, the first row and the one after the last of a turn's tile."""
        one, other = numbers[:_EACH], numbers[_EACH:]
        beyond = number - known.halved
        is_whole, has_two = beyond < 0, other[-1] != 0
        is_second = jnp.where(is_whole, part, jax.lax.rem(beyond, jnp.int32(2))) == 1
        owner, line, span = (jnp.where(has_two & is_second, y, x) for x, y in zip(one, other, strict=True))
        begin = line * LINE_ROWS
        low, high = begin + (span >> _HALF), begin + (span & ((1 << _HALF) - 1))
        if self.even:
            middle, is_half = begin + self.high // 2, jnp.logical_not(is_whole | has_two)
            low = jnp.where(is_half & is_second, jnp.maximum(low, middle), low)
            high = jnp.where(is_half & jnp.logical_not(is_second), jnp.minimum(high, middle), high)
        return owner, line, low, high
