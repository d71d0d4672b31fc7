"""Gradients of norms in one pass: each program goes through some rows of x and dy, and adds up what vectors get."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import inside, launch_all, load, power_of_two, store
from .rows import warps_for

# A step holds about seven arrays of its rows in float32 (x, dy, weight, normed, dx and two sums), and a multiprocessor
# has 64 Ki registers: rows up to 8192 wide fit, and wider ones would spill.
_WIDEST = 1 << 13
# Narrow rows are taken several at a time, so that a warp has 16 elements a thread as it has for wide ones.
_STEP_ELEMENTS = 1 << 9
# Each program writes its sums as a row in float32, so few programs are wanted, and no more than run at once: a thread
# needs some 112 registers, which leaves 16 warps for each of an H200's 132 multiprocessors. The sums of a vector then
# take 4 MiB at most, whatever the width. Of some 15 choices on an H200 it was within 3% of the fastest for nine of ten
# shapes (21% for rows of 1280): 0.40 of XLA's time for a layer norm of 8192x4096, 0.37 for an rms norm of 4096x4096.
_WARPS_OF_ALL = 1 << 11


def norm_gradients(
    x: jax.Array,
    dy: jax.Array,
    *,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    added: jax.Array | None = None,
    centred: bool,
    eps: float,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, ...]:
    """The gradients of x and of each vector that is given; `centred` rows had their mean taken off.

    `added` is another gradient of x, which comes on top.
    """
    width = x.shape[-1]
    flat, pulled = x.reshape(-1, width), dy.reshape(-1, width)
    count, block = flat.shape[0], power_of_two(width)
    tall, steps = portions(count, width)
    each = tall * steps
    shape, programs = (tall, block), pl.cdiv(count, each)
    ragged_columns, ragged_rows = block != width, count % each != 0
    scales = [] if weight is None else [weight]
    others = [] if added is None else [added.reshape(-1, width)]
    vectors = [vector for vector in (weight, bias) if vector is not None]

    def mean(values: jax.Array) -> jax.Array:
        return jnp.sum(values, axis=1, keepdims=True) / width

    def kernel(x_ref: Any, dy_ref: Any, *refs: Any) -> None:
        other_refs, refs = refs[: len(others)], refs[len(others) :]
        scale_refs, dx_ref, sum_refs = refs[: len(scales)], refs[len(scales)], refs[len(scales) + 1 :]
        program = pl.program_id(0)
        columns = inside(0, block, width, 1, shape) if ragged_columns else None
        along = inside(0, block, width, 0, (block,)) if ragged_columns else None
        scale = [load(ref, along).astype(jnp.float32)[None, :] for ref in scale_refs]

        def step(number: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            real = inside(program * steps + number, tall, count, 0, shape) if ragged_rows else None
            mask = columns if real is None else real if columns is None else columns & real
            here = (pl.ds(number * tall, tall), slice(None))
            given = load(dy_ref.at[here], mask).astype(jnp.float32)
            towards = given * scale[0] if scale else given
            off = load(x_ref.at[here], mask).astype(jnp.float32)
            if centred:
                off = off - mean(off)
                off = off if columns is None else jnp.where(columns, off, 0.0)
            over = jax.lax.rsqrt(mean(off * off) + eps)
            normed = off * over
            # mean(towards * normed), by a sum that need not wait for the other.
            back = towards - normed * (mean(towards * off) * over)
            back = back - mean(towards) if centred else back
            back = over * back
            for ref in other_refs:
                back = back + load(ref.at[here], mask).astype(jnp.float32)
            store(dx_ref.at[here], back.astype(dx_ref.dtype), mask)
            shares = [] if weight is None else [given * normed]
            if real is not None:
                # Without eps, rows beyond the last one are zero times infinity.
                shares = [jnp.where(real, share, 0.0) for share in shares]
            shares += [] if bias is None else [given]
            return tuple(total + share for total, share in zip(sums, shares, strict=True))

        zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in vectors)
        sums = jax.lax.fori_loop(0, steps, step, zeros)
        ends = inside(0, block, width, 1, (1, block)) if ragged_columns else None
        for ref, total in zip(sum_refs, sums, strict=True):
            store(ref, total if tall == 1 else jnp.sum(total, axis=0, keepdims=True), ends)

    whole = pl.BlockSpec((each, block), lambda i: (i, 0))
    dx, *partial = launch_all(
        kernel,
        [flat, pulled, *others, *scales],
        out=[
            jax.ShapeDtypeStruct(flat.shape, flat.dtype),
            *(jax.ShapeDtypeStruct((programs, width), jnp.float32) for _ in vectors),
        ],
        grid=(programs,),
        in_specs=[whole, whole, *(whole for _ in others), *(pl.BlockSpec((block,), lambda i: (0,)) for _ in scales)],
        out_specs=[whole, *(pl.BlockSpec((1, block), lambda i: (i, 0)) for _ in vectors)],
        num_warps=warps_for(width),
        num_stages=1,
        interpret=interpret,
        name=f"{name}_gradient",
    )
    sums = [jnp.sum(rows, axis=0).astype(vector.dtype) for rows, vector in zip(partial, vectors, strict=True)]
    return dx.reshape(x.shape), *sums


def fits(width: int) -> bool:
    """Does a row of this width, with all that its gradient needs, fit into registers?"""
    return power_of_two(width) <= _WIDEST


def portions(count: int, width: int) -> tuple[int, int]:
    """Rows that a program takes at a time, a power of two, and how often it does."""
    tall = min(max(_STEP_ELEMENTS // power_of_two(width), 1), power_of_two(count))
    return tall, pl.cdiv(count * warps_for(width), tall * _WARPS_OF_ALL)
