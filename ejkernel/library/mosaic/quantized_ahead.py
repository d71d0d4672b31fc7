"""Products with weights of 8 or 4 bits for Hopper GPUs: the next weights are made wide while tensor cores multiply.

As in `quantized.py` the product is transposed, and wide weights go from registers to tensor cores. There a step ends
when its products do, so that both units take turns. Here a product of 64 deep is under way while the next weights are
made wide, and words are loaded before they are needed. Sums are written in order of columns, since a thread has those
of neighbouring columns, and the parts of the depth are added up, scaled and rounded afterwards.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import launch, load, loop, plgpu
from .matmul import turned
from .quantized_blocks import copy, scratch, share_out
from .quantized_tiles import BITS, HEIGHT, Strip
from .words import placed, widened


def product(x: jax.Array, weight: jax.Array, scales: jax.Array, *, strip: Strip, interpret: bool) -> jax.Array:
    """`x @ (weight * scales)` for calls that `quantized_tiles` serves with scales (n,)."""
    (count, depth), width, bits = x.shape, weight.shape[1], BITS[weight.dtype.name]
    words = 16 // bits
    rows = strip.rows(count, grouped=False)
    blocks, columns = -(-count // rows), -(-width // strip.n)
    if blocks * rows != count:
        x = jnp.pad(x, ((0, blocks * rows - count), (0, 0)))
    factors = scales.astype(jnp.float32)
    whole = columns * strip.n
    steps = -(-depth // strip.k)
    each = -(-steps // strip.parts)

    def kernel(x_ref: Any, w_ref: Any, sums_ref: Any, *refs: Any) -> None:
        held, x_held, full, empty = refs[:4]
        narrow, seen = (held, held) if interpret else held
        staged: Any = refs[4] if interpret else None
        part, j, i = (jax.lax.axis_index(name) for name in ("part", "column", "row"))
        worker = jax.lax.axis_index("group")
        first = part * each
        mine = jnp.clip(steps - first, 0, each)

        held_steps = (narrow, x_held, full, empty)
        part_of: dict[str, Any] = {"rows": rows, "at_row": i, "at_column": j, "first": first, "mine": mine}
        copy(x_ref, w_ref, held_steps, strip, **part_of, worker=worker, interpret=interpret)

        def found(slot: Any, low: int, tile: Any) -> jax.Array:
            """64 deep of the words of a tile, transposed."""
            depths = pl.ds(low, 64)
            if interpret:
                here = seen[slot, depths, pl.ds(tile * (HEIGHT * words), HEIGHT * words)]
                return jax.lax.bitcast_convert_type(here.reshape(64, HEIGHT, words), jnp.int16).T
            here = turned(seen.at[slot, depths, pl.ds(tile * HEIGHT, HEIGHT)])
            return load(here, plgpu.Layout.WGMMA, interpret=False)

        def multiplied(numbers: range, tile: Any) -> tuple[jax.Array, ...]:
            """The products of these numbers of the words of a tile."""

            def of(at: Any) -> Any:
                return jax.lax.rem(at, jnp.int32(strip.stages))

            def following(at: Any, low: int) -> jax.Array:
                """The words after these; after the last ones, some that are there."""
                if low + 64 < strip.k:
                    return found(of(at), low + 64, tile)
                further = at + 1 < mine
                pl.when(further)(lambda: plgpu.barrier_wait(full.at[of(at + 1)]))
                return found(of(jnp.where(further, at + 1, at)), 0, tile)

            def scope(*totals: Any) -> tuple[jax.Array, ...]:
                def step(at: Any, now: jax.Array) -> jax.Array:
                    slot = of(at)
                    for low in range(0, strip.k, 64):
                        right = turned(x_held.at[slot, :, pl.ds(low, 64)])
                        after = now
                        for total, number in zip(totals, numbers, strict=True):
                            left = widened(now, number, bits, interpret=interpret)
                            if interpret:
                                staged[worker] = left
                                plgpu.commit_smem()
                            plgpu.wgmma(total, staged.at[worker] if interpret else left, right)
                            # The product before has ended, and this one runs while the next weights are made wide.
                            plgpu.wgmma_wait(1)
                            if number == numbers[0]:
                                if low == 0:
                                    # The products of the step before have ended: its slot may be overwritten.
                                    pl.when(at > 0)(lambda: plgpu.barrier_arrive(empty.at[of(at - 1)]))
                                after = following(at, low)
                        now = after
                    return now

                @pl.when(mine > 0)
                def _() -> None:
                    plgpu.barrier_wait(full.at[0])

                loop(mine, step, found(jnp.int32(0), 0, tile), interpret=interpret)
                plgpu.wgmma_wait(0)
                pl.when(mine > 0)(lambda: plgpu.barrier_arrive(empty.at[of(mine - 1)]))
                return tuple(total[...] for total in totals)

            sums = [plgpu.ACC((HEIGHT, rows), jnp.float32) for _ in numbers]
            return pl.run_scoped(scope, *sums)  # type: ignore[no-any-return]

        def written(numbers: range, tile: Any) -> None:
            """The sums, in order of columns."""
            sums = multiplied(numbers, tile)
            down, place = pl.ds(i * rows, rows), j * (strip.n // words) + tile * HEIGHT
            if interpret:
                there = sums_ref.at[part, down, pl.ds(place, HEIGHT), pl.ds(numbers[0], len(numbers))]
                there[...] = jnp.stack([total.T for total in sums], axis=-1)
            else:
                placed(sums_ref.at[part, down, pl.ds(place * words, HEIGHT * words)], sums, numbers[0], words, whole)

        share_out(written, strip, words, worker=worker, interpret=interpret)

    shape = (whole // words, words) if interpret else (whole,)
    (made,) = launch(
        kernel,
        [x, weight],
        out=[jax.ShapeDtypeStruct((strip.parts, blocks * rows, *shape), jnp.float32)],
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
    return (total.reshape(blocks * rows, whole)[:count, :width] * factors[None]).astype(x.dtype)
