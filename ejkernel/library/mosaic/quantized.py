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
from .quantized_tiles import BITS, HEIGHT, Strip, registers
from .tiles import LINE_BYTES
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
    held_each = registers(strip.workers)

    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        *scale_refs, o_ref, held, x_held, full, empty = refs[: len(along) + 5]
        narrow, seen = (held, held) if interpret else held
        part, j, i = (jax.lax.axis_index(name) for name in ("part", "column", "row"))
        worker = jax.lax.axis_index("group")
        first = part * (share * each)
        mine = jnp.clip(steps - first, 0, share * each)

        @pl.when(worker == strip.workers)
        def _() -> None:
            if held_each and not interpret:
                plgpu.set_max_registers(held_each[0], action="decrease")

            def copied(at: Any, state: Any) -> Any:
                slot = jax.lax.rem(at, jnp.int32(strip.stages))
                pl.when(at >= strip.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))

                here = pl.ds((first + at) * strip.k, strip.k)
                plgpu.copy_gmem_to_smem(w_ref.at[here, pl.ds(j * strip.n, strip.n)], narrow.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(i * rows, rows), here], x_held.at[slot], full.at[slot])
                return state

            loop(mine, copied, (), interpret=interpret)
            # Every phase of a barrier is waited for, also the last ones.
            last = jnp.minimum(mine, strip.stages)

            def drained(at: Any, state: Any) -> Any:
                plgpu.barrier_wait(empty.at[jax.lax.rem(mine - last + at, jnp.int32(strip.stages))])
                return state

            loop(last, drained, (), interpret=interpret)

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

        @pl.when(worker < strip.workers)
        def _() -> None:
            if held_each and not interpret:
                plgpu.set_max_registers(held_each[1], action="increase")
            if strip.each() == words:
                multiplied(range(words), worker)
                return
            # Two warpgroups share a tile, and each has one byte of its words.
            for byte in range(2):

                @pl.when(jax.lax.rem(worker, jnp.int32(2)) == byte)
                def _(byte: int = byte) -> None:
                    numbers = range(byte * words // 2, (byte + 1) * words // 2)
                    multiplied(numbers, jax.lax.div(worker, jnp.int32(2)))

    weights = plgpu.SMEM((strip.stages, strip.k, strip.n), weight.dtype, transforms=_lines(bits, interpret))
    as_words = plgpu.SMEM((strip.stages, strip.k, strip.n // words), jnp.int16, transforms=_lines(16, interpret))
    (made,) = launch(
        kernel,
        [x, weight, *along],
        out=[jax.ShapeDtypeStruct((strip.parts, words, blocks * rows, columns * strip.n // words), jnp.float32)],
        grid={"part": strip.parts, "column": columns, "row": blocks},
        scratch=[
            # Both have the same lines of 128 bytes: what is copied as weights is read as words.
            weights if interpret else plgpu.RefUnion(weights, as_words),
            plgpu.SMEM((strip.stages, rows, strip.k), x.dtype, transforms=_lines(16, interpret)),
            plgpu.Barrier(num_arrivals=2, num_barriers=strip.stages),
            plgpu.Barrier(num_arrivals=strip.workers, num_barriers=strip.stages),
            # The interpreter takes a factor from shared memory alone.
            *(
                [plgpu.SMEM((strip.workers, HEIGHT, 64), x.dtype, transforms=_lines(16, interpret))]
                if interpret
                else []
            ),
        ],
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


def _lines(bits: int, interpret: bool) -> tuple[Any, ...]:
    return () if interpret else (plgpu.TilingTransform((8, LINE_BYTES * 8 // bits)), plgpu.SwizzleTransform(LINE_BYTES))


def _down(ref: Any, interpret: bool) -> jax.Array:
    """A number for each row of a product."""
    return load(ref, plgpu.Layout.WGMMA.reduce(1), interpret=interpret, optimized=False)


def _zeros(shape: tuple[int, ...], interpret: bool) -> jax.Array:
    zeros = jnp.zeros(shape, jnp.float32)
    return zeros if interpret else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
