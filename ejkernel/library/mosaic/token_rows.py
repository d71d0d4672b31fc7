"""Rows of tokens to their places among the experts' rows, and back: a block for each token.

A token's own row is read once and written k times, or k rows are read and written once as their sum. No list says which
token a place belongs to: `places` alone, as (tokens, k), is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..arguments import ArgumentError
from . import together
from .launch import launch
from .rows import Row, boards_of, row_of
from .spread import spread, token_groups, tokens_refuse

# Numbers that warps can show each other at once.
_SHOWN = 128


def sent(x: jax.Array, places: jax.Array, *, interpret: bool) -> jax.Array:
    """Row t of `x` (tokens, width) at each of `places[t]`, which are all places from 0 to before tokens times k."""
    k = places.shape[1]

    def move(row: Row, token: Any, there: Sequence[Any], x_ref: Any, o_ref: Any) -> None:
        for number in range(row.spread.count):
            values = row.load(x_ref.at[token], number)
            for place in there:
                row.store(o_ref.at[place], number, values)

    out = jax.ShapeDtypeStruct((places.size, x.shape[1]), x.dtype)
    (made,) = _by_tokens(move, places, [x], [out], k * x.shape[0], interpret=interpret, name="library_moe_sent")
    return made


def summed(rows: jax.Array, places: jax.Array, weights: jax.Array | None, *, interpret: bool) -> jax.Array:
    """The sum of the rows at `places[t]`, times `weights[t]`, for each token: added up in float32, rounded once."""
    given = [rows] if weights is None else [rows, weights.astype(jnp.float32).reshape(-1)]
    tokens, k = places.shape

    def move(row: Row, token: Any, there: Sequence[Any], rows_ref: Any, *refs: Any) -> None:
        *weight_refs, o_ref = refs
        by = [ref[token * k + at] for ref in weight_refs for at in range(k)]
        for number in range(row.spread.count):
            # All are asked for before the first is used.
            parts = [row.load(rows_ref.at[place], number) for place in there]
            wide = [part.astype(jnp.float32) for part in parts]
            if by:
                wide = [part * one for part, one in zip(wide, by, strict=True)]
            total = wide[0]
            for part in wide[1:]:
                total = total + part
            row.store(o_ref.at[token], number, total)

    out = jax.ShapeDtypeStruct((tokens, rows.shape[1]), rows.dtype)
    (made,) = _by_tokens(move, places, given, [out], rows.shape[0], interpret=interpret, name="library_moe_summed")
    return made


def pulled(
    dy: jax.Array, rows: jax.Array, places: jax.Array, weights: jax.Array, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `summed` for rows and weights, where every row has a place: all is read once and written once."""
    tokens, k = places.shape
    given = [dy, rows, weights.astype(jnp.float32).reshape(-1)]

    def move(row: Row, token: Any, there: Sequence[Any], *refs: Any) -> None:
        dy_ref, rows_ref, weights_ref, d_rows_ref, d_weights_ref, *board = refs
        by = [weights_ref[token * k + at] for at in range(k)]
        products: list[list[jax.Array]] = [[] for _ in there]
        for number in range(row.spread.count):
            towards = row.load(dy_ref.at[token], number).astype(jnp.float32)
            parts = [row.load(rows_ref.at[place], number) for place in there]
            for place, one, part, found in zip(there, by, parts, products, strict=True):
                row.store(d_rows_ref.at[place], number, towards * one)
                found.append(part.astype(jnp.float32) * towards)
        vectors = [row.joined(found) for found in products]
        if board:
            totals = together.sums(board[0], vectors, layout=row.layout, groups=row.spread.groups)
        else:
            totals = tuple(row.total(vector) for vector in vectors)

        def write() -> None:
            for at, total in enumerate(totals):
                d_weights_ref[token * k + at] = total

        pl.when(row.group == 0)(write) if row.spread.groups > 1 else write()

    out = [jax.ShapeDtypeStruct(rows.shape, rows.dtype), jax.ShapeDtypeStruct((tokens * k,), jnp.float32)]
    how: dict[str, Any] = {"interpret": interpret, "name": "library_moe_pulled", "adds": True}
    d_rows, d_weights = _by_tokens(move, places, given, out, rows.shape[0], **how)
    return d_rows, d_weights.reshape(tokens, k).astype(weights.dtype)


def _by_tokens(
    move: Callable[..., None],
    places: jax.Array,
    given: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
    count: int,
    *,
    interpret: bool,
    name: str,
    adds: bool = False,
) -> Sequence[jax.Array]:
    """`move(row, token, places, *references)` for each token; places are within the count of rows."""
    tokens, k = places.shape
    width, dtype = given[0].shape[1], given[0].dtype
    refused = tokens_refuse(width, dtype, k)
    if refused:
        raise ArgumentError(f"mosaic cannot compute this call: {refused}")
    lying = spread(width, dtype.itemsize, token_groups(width), None)
    # One barrier for all sums; the interpreter has each by itself.
    at_once = adds and not interpret and jax.__version_info__ >= (0, 11) and 4 * lying.groups * k <= _SHOWN
    boards = boards_of(lying, interpret=interpret) if adds else []

    def kernel(places_ref: Any, *refs: Any) -> None:
        arrays, shared = refs[: len(given) + len(out)], refs[len(given) + len(out) :]
        token = jax.lax.axis_index("token")
        row = row_of(lying, () if at_once else shared, interpret=interpret)
        there = [jnp.clip(places_ref[token * k + at], 0, count - 1) for at in range(k)]
        move(row, token, there, *arrays, *([shared[0].at[0]] if at_once else []))

    made: Sequence[jax.Array] = launch(
        kernel,
        [places.astype(jnp.int32).reshape(-1), *given],
        out=out,
        grid={"token": tokens},
        scratch=[together.boards()] if at_once else boards,
        groups={"group": lying.groups} if lying.groups > 1 else None,
        interpret=interpret,
        name=name,
    )
    return made
