"""Products with weights of 8 or 4 bits for Hopper GPUs: a warpgroup copies, others make weights wide in registers.

The product is computed transposed, weights times rows, since tensor cores take the left factor from registers: wide
weights are never in shared memory, which would be its bottleneck. A word of 16 bits holds two or four neighbouring
columns. Words are loaded transposed, which hardware has for 16 bits alone, and each of their numbers is a product of
its own; the sums of all parts of the depth are added up, scaled and put in order afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import launch, load, loop, plgpu
from .matmul import turned
from .quantized_blocks import copy, scratch, share_out
from .quantized_tiles import BITS, HEIGHT, Strip
from .words import widened


def product(x: jax.Array, weight: jax.Array, scales: jax.Array, *, strip: Strip, interpret: bool) -> jax.Array:
    """`x @ (weight * scales)` for calls that `quantized_tiles` serves; scales (n,) or (groups, n)."""
    (count, depth), width, bits = x.shape, weight.shape[1], BITS[weight.dtype.name]
    words = 16 // bits
    grouped = scales.ndim == 2
    rows = strip.rows(count, grouped=grouped)
    blocks, columns = -(-count // rows), -(-width // strip.n)
    if blocks * rows != count:
        x = jnp.pad(x, ((0, blocks * rows - count), (0, 0)))
    factors = scales.astype(jnp.float32)
    along = [factors.reshape(-1, width // words, words)] if grouped else []
    if grouped and columns * strip.n != width:
        # The last block reads a factor for each of its columns.
        along = [jnp.pad(along[0], ((0, 0), (0, (columns * strip.n - width) // words), (0, 0)))]
    steps = -(-depth // strip.k)
    groups = scales.shape[0] if grouped else 1
    # Steps of a group, and groups of a part; without groups each part is one.
    each = depth // groups // strip.k if grouped else -(-steps // strip.parts)
    share = -(-groups // strip.parts) if grouped else 1

    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        *scale_refs, o_ref, held, x_held, full, empty = refs[: len(along) + 5]
        narrow, seen = (held, held) if interpret else held
        part, j, i = (jax.lax.axis_index(name) for name in ("part", "column", "row"))
        worker = jax.lax.axis_index("group")
        first = part * (share * each)
        mine = jnp.clip(steps - first, 0, share * each)

        held_steps = (narrow, x_held, full, empty)
        part_of: dict[str, Any] = {"rows": rows, "at_row": i, "at_column": j, "first": first, "mine": mine}
        copy(x_ref, w_ref, held_steps, strip, **part_of, worker=worker, interpret=interpret)

        def multiplied(numbers: range, tile: Any) -> None:
            """The products of these numbers of the words of a tile."""
            staged = refs[-1]

            def wide(slot: Any, low: int) -> Iterator[Any]:
                depths = pl.ds(low, 64)
                if interpret:
                    found = seen[slot, depths, pl.ds(tile * (HEIGHT * words), HEIGHT * words)]
                    found = jax.lax.bitcast_convert_type(found.reshape(64, HEIGHT, words), jnp.int16).T
                    for number in numbers:
                        staged[worker] = widened(found, number, bits, interpret=True)
                        plgpu.commit_smem()
                        yield staged.at[worker]
                    return
                found = load(
                    turned(seen.at[slot, depths, pl.ds(tile * HEIGHT, HEIGHT)]), plgpu.Layout.WGMMA, interpret=False
                )
                for number in numbers:
                    yield widened(found, number, bits, interpret=False)

            def group_sums(begin: Any, length: Any) -> tuple[jax.Array, ...]:
                def scope(*totals: Any) -> tuple[jax.Array, ...]:
                    def step(at: Any, _: Any) -> Any:
                        slot = jax.lax.rem(begin + at, jnp.int32(strip.stages))
                        plgpu.barrier_wait(full.at[slot])
                        for low in range(0, strip.k, 64):
                            right = turned(x_held.at[slot, :, pl.ds(low, 64)])
                            for total, left in zip(totals, wide(slot, low), strict=True):
                                plgpu.wgmma(total, left, right)
                        # Registers that a product still reads must not be written by the next step.
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot])
                        return ()

                    loop(length, step, (), interpret=interpret)
                    return tuple(total[...] for total in totals)

                sums = [plgpu.ACC((HEIGHT, rows), jnp.float32) for _ in numbers]
                return pl.run_scoped(scope, *sums)  # type: ignore[no-any-return]

            place = pl.ds(j * (strip.n // words) + tile * HEIGHT, HEIGHT)
            if not grouped:
                sums = group_sums(jnp.int32(0), mine)
            else:

                def added(at: Any, before: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    # Asked for before the products, so that they come meanwhile.
                    factors = [_down(scale_refs[0].at[part * share + at, place, n], interpret) for n in numbers]
                    made = group_sums(at * each, each)
                    return tuple(
                        total + one * jax.lax.broadcast_in_dim(factor, one.shape, (0,))
                        for total, one, factor in zip(before, made, factors, strict=True)
                    )

                zeros = tuple(_zeros((HEIGHT, rows), interpret) for _ in numbers)
                sums = loop(jnp.clip(groups - part * share, 0, share), added, zeros, interpret=interpret)
            for number, total in zip(numbers, sums, strict=True):
                there = o_ref.at[part, number, pl.ds(i * rows, rows), place]
                if interpret:
                    there[...] = total.T
                else:
                    turned(there)[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)

        share_out(multiplied, strip, words, worker=worker, interpret=interpret)

    (made,) = launch(
        kernel,
        [x, weight, *along],
        out=[jax.ShapeDtypeStruct((strip.parts, words, blocks * rows, columns * strip.n // words), jnp.float32)],
        grid={"part": strip.parts, "column": columns, "row": blocks},
        scratch=scratch(x, weight, strip, rows, interpret=interpret),
        groups={"group": strip.workers + 1},
        interpret=interpret,
        name="library_quantized_matmul",
    )
    # Sums one by one, not a reduction: XLA computes all of this in one pass.
    total = made[0]
    for number in range(1, strip.parts):
        total = total + made[number]
    whole = jnp.moveaxis(total[:, :count, : width // words], 0, -1).reshape(count, width)
    return (whole if grouped else whole * factors[None]).astype(x.dtype)


def _down(ref: Any, interpret: bool) -> jax.Array:
    """A number for each row of a product."""
    return load(ref, plgpu.Layout.WGMMA.reduce(1), interpret=interpret, optimized=False)


def _zeros(shape: tuple[int, ...], interpret: bool) -> jax.Array:
    zeros = jnp.zeros(shape, jnp.float32)
    return zeros if interpret else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
