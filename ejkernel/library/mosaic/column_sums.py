"""Sums over the rows that the blocks of a gradient wrote: all arrays' by one kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import LANES, launch, load, loop, places, plgpu
from .meeting import meet, meeting

# Warpgroups of a block, among which rows are divided, and rows that each of them loads before it adds.
_GROUPS, _AT_ONCE = 8, 8


def serves(width: int) -> bool:
    """Has every thread of a warpgroup a column?"""
    return width % LANES == 0


def column_sums(parts: Sequence[jax.Array], *, interpret: bool, name: str) -> Sequence[jax.Array]:
    """The sum over the rows of each array, (rows, width) in float32, all of one shape."""
    rows, width = parts[0].shape
    steps = -(-rows // (_GROUPS * _AT_ONCE))
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    def kernel(*refs: Any) -> None:
        part_refs, sum_refs = refs[: len(parts)], refs[len(parts) : 2 * len(parts)]
        board, *barriers = refs[2 * len(parts) :]
        group, here = jax.lax.axis_index("group"), pl.ds(jax.lax.axis_index("tile") * LANES, LANES)
        zeros = jnp.zeros(LANES, jnp.float32)
        zeros = zeros if interpret else plgpu.layout_cast(zeros, layout)
        counting = places(LANES, layout, interpret=interpret)

        def summed(part_ref: Any, sum_ref: Any) -> None:
            def step(number: Any, total: jax.Array) -> jax.Array:
                first = number * (_GROUPS * _AT_ONCE) + group
                found = []
                for at in range(_AT_ONCE):
                    there = first + at * _GROUPS
                    values = load(part_ref.at[jnp.minimum(there, rows - 1), here], layout, interpret=interpret)
                    # A vector of truths: one number's is not spread over threads.
                    found.append(jnp.where(counting < (rows - there) * LANES, values, 0.0))
                return total + functools.reduce(jnp.add, found)

            board[group] = loop(steps, step, zeros, interpret=interpret)
            meet(barriers[0] if barriers else None)

            def write() -> None:
                shown = [load(board.at[one], layout, interpret=interpret) for one in range(_GROUPS)]
                sum_ref[here] = functools.reduce(jnp.add, shown)

            pl.when(group == 0)(write)

        for number, pair in enumerate(zip(part_refs, sum_refs, strict=True)):
            pl.when(jax.lax.axis_index("part") == number)(functools.partial(summed, *pair))

    return launch(
        kernel,
        parts,
        out=[jax.ShapeDtypeStruct((width,), jnp.float32) for _ in parts],
        grid={"part": len(parts), "tile": width // LANES},
        scratch=[plgpu.SMEM((_GROUPS, LANES), jnp.float32), *meeting(_GROUPS, interpret=interpret)],
        groups={"group": _GROUPS},
        interpret=interpret,
        name=f"{name}_sums",
    )
