"""The largest of short rows by lists: each lane sorts its few elements once, and the largest is the first of a list.

Taking the largest one after the other out of whole rows looks at every element each time. Here it looks at one element
a lane, and the lane that had it moves its list up.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..order import ordered
from .launch import inside, load, power_of_two
from .select import keep, launched
from .served import missing

# Lanes of a warp, and the elements that one of them sorts.
_LANES, _MOST = 32, 16
_MOST_TAKEN = 32

List = list[tuple[jax.Array, jax.Array]]


def largest_by_lists(
    x: jax.Array, k: int, *, rows: int, num_warps: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row, in order, and their indices; equal ones by their index."""
    count, width = x.shape
    kind = x.dtype
    if not jnp.issubdtype(kind, jnp.floating):
        # Integers are made alike before.
        x = ordered(x).astype(jnp.int32)
    block, slots = max(_LANES, power_of_two(width)), power_of_two(k)
    ragged = count % rows != 0
    least, beyond = jnp.iinfo(jnp.int32).min, block

    def kernel(x_ref: Any, values_ref: Any, o_ref: Any) -> None:
        shape = (rows, _LANES)
        lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        here = inside(pl.program_id(0), rows, count, 0, shape)

        def element(low: int) -> tuple[jax.Array, jax.Array]:
            whole = low + _LANES <= width
            real = lane + low < width
            mask = (None if whole else real) if not ragged else here if whole else here & real
            # A zero of the array's own kind: one of another would make its integers floating-point numbers.
            values = load(x_ref.at[:, pl.ds(low, _LANES)], mask, x.dtype.type(0))
            keys = ordered(values).astype(jnp.int32)
            return (keys, lane + low) if whole else (jnp.where(real, keys, least), jnp.where(real, lane + low, beyond))

        ranked = _sorted([element(low) for low in range(0, block, _LANES)], k)
        slot = jax.lax.broadcasted_iota(jnp.int32, (rows, slots), 1)
        found = most_of = jnp.zeros((rows, slots), jnp.int32)
        for number in range(k):
            key, column = ranked[0]
            most = jnp.max(key, axis=1, keepdims=True)
            # An empty list has the least key and a column beyond the row: so any key may be the least one.
            first = jnp.min(jnp.where(key == most, column, beyond), axis=1, keepdims=True)
            most_of, found = (jnp.where(slot == number, a, b) for a, b in ((most, most_of), (first, found)))
            ranked = _moved(ranked, column == first, least, beyond)[: k - number - 1]
        keep((values_ref, o_ref), most_of, found, slot, x, k)

    sizes = (rows, block, slots)
    return launched(kernel, x, kind, k, sizes=sizes, num_warps=num_warps, interpret=interpret)


def _sorted(elements: List, k: int) -> List:
    """The first k in order. Neighbours alone change places, and equal ones never do: so these keep their order."""
    made = list(elements)
    for passes in range(min(k, len(made) - 1)):
        for at in range(len(made) - 2, passes - 1, -1):
            (key, column), (other, its) = made[at], made[at + 1]
            swap = other > key
            made[at] = jnp.maximum(key, other), jnp.where(swap, its, column)
            made[at + 1] = jnp.minimum(key, other), jnp.where(swap, column, its)
    return made[:k]


def _moved(ranked: List, taken: jax.Array, least: int, beyond: int) -> List:
    """The lists, without their first where it was taken."""
    none = jnp.full_like(ranked[0][0], least), jnp.full_like(ranked[0][1], beyond)
    after = [*ranked[1:], none]
    return [
        (jnp.where(taken, later[0], now[0]), jnp.where(taken, later[1], now[1]))
        for now, later in zip(ranked, after, strict=True)
    ]


def refuses(width: int, k: int, rows: int | None, num_warps: int | None) -> str:
    """The reason that rows of this width cannot be taken so; empty where they can."""
    if missing():
        return missing()
    if not rows or not num_warps or rows & (rows - 1) or num_warps & (num_warps - 1) or rows < num_warps:
        return f"rows={rows} and num_warps={num_warps} must be powers of two, a row or more for each warp"
    if width > _LANES * _MOST or k > _MOST_TAKEN:
        return f"{k} of {width} are too many for lists: at most {_MOST_TAKEN} of {_LANES * _MOST}"
    return ""
