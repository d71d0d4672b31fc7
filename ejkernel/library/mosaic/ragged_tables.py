"""Tables of grouped products' tiles, from the sizes of groups: by XLA, and in one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..counting import ended_before, running_sums
from ..ragged_dot_tiles import starts_of
from .launch import LANES, launch, loop, places, plgpu
from .tiles import LINE_ROWS, visits

# Groups of a step, which asks for their sizes at once: more wait for memory less often, and are more instructions.
_MOST_AT_ONCE = 16
# Tables from the sizes, the rows and those of a tile: as `visits_of` makes them, or longer.
Tables = Callable[[jax.Array, int, int], Sequence[jax.Array]]


def visits_of(sizes: jax.Array, rows: int, tile: int) -> tuple[jax.Array, ...]:
    """The group of each visit, the first line of its tile, and where the rows that are the group's begin and end.

    A group's tiles follow each other from the line of rows that its first one is in: copies start at lines. One more
    group has the rows that belong to none. A visit that is not needed has no rows.
    """
    starts, stops = starts_of(sizes, rows)
    starts = jnp.append(starts, stops[-1])
    stops = jnp.append(stops, rows)
    begins = starts // LINE_ROWS * LINE_ROWS
    tiles = jnp.where(starts < stops, -(-(stops - begins) // tile), 0)
    ends = running_sums(tiles)
    groups = sizes.shape[0] + 1
    number = jnp.arange(visits(rows, sizes.shape[0], tile), dtype=jnp.int32)
    group = jnp.minimum(ended_before(ends, number), groups - 1)
    place = begins[group] + (number - (ends - tiles)[group]) * tile
    low = jnp.maximum(starts[group], place)
    high = jnp.where(number < ends[-1], jnp.minimum(stops[group], place + tile), low)
    # The last tile of all does not reach over the last row: it has rows of the tile before.
    line = jnp.clip(place, 0, max(0, rows - tile)) // LINE_ROWS
    return tuple(x.astype(jnp.int32) for x in (group, line, low, high))


class _Found(NamedTuple):
    """Rows and tiles of the groups so far, and of each visit its group, where its tiles begin, and its rows."""

    stop: Any
    end: Any
    group: Any
    base: Any
    low: Any
    high: Any


# Traced once for equal shapes: XLA sees that equal calls are one, which it does not see of kernels traced twice.
@functools.partial(jax.jit, static_argnames=("rows", "tile", "interpret"))
def visits_at_once(sizes: jax.Array, rows: int, tile: int, *, interpret: bool) -> Sequence[jax.Array]:
    """The tables of `visits_of` and more visits behind, for whole warpgroups of them; not run on a GPU yet.

    XLA makes those tables in four launches, each of which waits for the one before.
    """
    groups = sizes.shape[0]
    if sizes.dtype != jnp.int32:
        sizes = jnp.clip(sizes, 0, rows).astype(jnp.int32)
    blocks = pl.cdiv(visits(rows, groups, tile), LANES)
    # One more group has the rows that belong to none.
    steps = pl.cdiv(groups + 1, _MOST_AT_ONCE)
    at_once = pl.cdiv(groups + 1, steps)

    def kernel(size_ref: Any, *made_refs: Any) -> None:
        at = jax.lax.axis_index("part") * LANES
        layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
        number = at + places(LANES, layout, interpret=interpret)

        def add(found: _Found, group: Any, size: Any) -> _Found:
            start = found.stop
            stop = jnp.minimum(start + jnp.clip(size, 0, rows), rows)
            begin = jax.lax.div(start, jnp.int32(LINE_ROWS)) * LINE_ROWS
            tiles = jnp.where(start < stop, jax.lax.div(stop - begin + (tile - 1), jnp.int32(tile)), 0)
            # The last group that begins at or before a visit has it: one without tiles gives way to the next.
            is_behind = (number >= found.end) & (group <= groups)
            news = (group, begin - found.end * tile, start, stop)
            kept = (jnp.where(is_behind, new, old) for new, old in zip(news, found[2:], strict=True))
            return _Found(stop, found.end + tiles, *kept)

        def step(number: Any, found: _Found) -> _Found:
            several = [number * at_once + ahead for ahead in range(at_once)]
            # Those beyond the last have the rows that belong to none: the first of them has all.
            asked = [size_ref[jnp.minimum(group, groups - 1)] for group in several]
            for group, size in zip(several, asked, strict=True):
                found = add(found, group, jnp.where(group < groups, size, rows))
            return found

        none = jnp.zeros_like(number)
        found = _Found(jnp.int32(0), jnp.int32(0), none, none, none, none)
        found = loop(steps, step, found, interpret=interpret)
        place = number * tile + found.base
        low = jnp.maximum(found.low, place)
        high = jnp.where(number < found.end, jnp.minimum(found.high, place + tile), low)
        line = jax.lax.div(jnp.clip(place, 0, max(0, rows - tile)), jnp.full_like(place, LINE_ROWS))
        for ref, table in zip(made_refs, (found.group, line, low, high), strict=True):
            ref[pl.ds(at, LANES)] = table

    out = [jax.ShapeDtypeStruct((blocks * LANES,), jnp.int32)] * 4
    return launch(kernel, [sizes], out=out, grid={"part": blocks}, interpret=interpret, name="library_ragged_tables")
