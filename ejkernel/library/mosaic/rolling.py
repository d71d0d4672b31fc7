"""Products tile after tile on Hopper GPUs: a block for each multiprocessor, which copies ahead into its next tile.

A block for each tile begins with nothing in shared memory, and ends by waiting for its writes: an H200 multiplies for
8 us of a tile of 128x256 by 768, and waits for some 4 more. Here the copying warpgroup is some steps ahead, whatever
tile these belong to, and writes of a tile are waited for while the next one is multiplied.

Two warpgroups that begin together end their tiles together, and tensor cores wait while both hand over. A tile's `lead`
makes the second begin some steps later. That difference lasts by itself: while one hands over, the other has the tensor
cores alone, and gets as far ahead as it was behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import launch, loop, plgpu
from .matmul import lines
from .tiles import PROCESSORS, WORKERS, Tile

# The copying warpgroup needs few registers, and leaves its others to those that hold sums: 40 + 2 * 232 of 512.
_COPYING, _MULTIPLYING = 40, 232


@dataclass(frozen=True)
class StepTiles:
    """Shared memory of a step's tiles: the left one and those on the right.

    Copies arrive at the first barrier, and warpgroups that are done with the tiles at the second. `number`: steps of
    the block before this one.
    """

    left: Any
    right: Sequence[Any]
    full: Any
    empty: Any
    number: Any


@dataclass(frozen=True)
class OwnCopies:
    """Copies of the left tiles which the barrier of a step's copies does not know of.

    `begin(*references)` is called once by all threads, before everything else. `prepare(place, *references)` gives the
    place that the copying warpgroup's `fill` has, once a tile, and `arrived(step, *references)` waits for a step's left
    tile, after the others have arrived.
    """

    begin: Callable[..., None]
    prepare: Callable[..., Any]
    arrived: Callable[..., None]


@dataclass(frozen=True)
class TileWork:
    """The tiles of a launch, from 0 to before `count`.

    `read(number, *references)` gives numbers from memory, which are asked for a tile ahead. `find(number, *numbers)`
    gives anything that says which tile it is, whether there is something to do, and how many steps that takes.
    `fill(place, at, step, *references)` starts a copy to shared memory for each tile of step `at`. `multiply(place, at,
    totals, step)` adds a step's products up, one for each tile on the right, and `write(place, totals, later,
    *references)` hands a warpgroup's share of the tile over. Where `is_idle(place)` holds, a warpgroup has no share,
    and leaves the tensor cores to the other. After its steps a tile has `later` more, which are filled likewise:
    `write` waits for their tiles, and says when it is done with them.
    """

    count: int
    read: Callable[..., Sequence[Any]]
    find: Callable[..., tuple[Any, Any, Any]]
    fill: Callable[..., None]
    multiply: Callable[[Any, Any, Sequence[Any], StepTiles], None]
    write: Callable[..., None]
    is_idle: Callable[[Any], Any] | None = None
    later: int = 0
    own: OwnCopies | None = None


def rolling(
    work: TileWork,
    operands: Sequence[jax.Array],
    *,
    out: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    left: tuple[int, int],
    right: Sequence[tuple[int, int]],
    tile: Tile,
    interpret: bool,
    name: str,
    fast: bool = False,
    blocks: int = PROCESSORS,
) -> Sequence[jax.Array]:
    """Runs the work; `left` and `right` are shapes of a step's tiles, which have the last operand's dtype.

    References are those of operands, results and scratch, in this order. The columns of a tile are shared out evenly
    among the tiles on the right. `fast`: exponentials may be off by 1e-6 of themselves.
    """
    dtype, stages, own = operands[-1].dtype, tile.stages, work.own
    # Steps that the first warpgroup is ahead are held until the second has multiplied them too.
    lead = min(tile.lead, stages - 1)
    blocks = min(blocks, work.count)
    sums = plgpu.ACC((tile.share, tile.n // len(right)), jnp.float32)
    given = len(operands) + len(out) + len(scratch)

    def kernel(*refs: Any) -> None:
        arrays, (left_ref, *right_refs, full, empty) = refs[:given], refs[given : given + 3 + len(right)]
        block, group = jax.lax.axis_index("block"), jax.lax.axis_index("group")
        if own:
            own.begin(*arrays)

        def slot(at: Any) -> Any:
            return jax.lax.rem(at, jnp.int32(stages))

        def held(at: Any) -> StepTiles:
            right = [ref.at[slot(at)] for ref in right_refs]
            return StepTiles(left_ref.at[slot(at)], right, full.at[slot(at)], empty.at[slot(at)], at)

        # A block's first tile with steps alone: afterwards neither warpgroup waits for the other.
        def begun(before: Any, steps: Any) -> None:
            if lead:
                is_late = (group == WORKERS - 1) & (before == 0) & (steps > 0)
                pl.when(is_late)(lambda: plgpu.barrier_wait(refs[-1]))

        def led(before: Any, at: Any, steps: Any) -> None:
            if lead:
                # Of a tile with fewer steps the last one: what is arrived at is waited for, and the other way round.
                is_ahead = (group == 0) & (before == 0) & (at == jnp.minimum(lead, steps - 1))
                pl.when(is_ahead)(lambda: plgpu.barrier_arrive(refs[-1]))

        # All warpgroups go through the same tiles, and count the steps before each.
        def through(do: Callable[[Any, Any, Any], None]) -> Any:
            def read(number: Any) -> list[Any]:
                return list(work.read(jnp.minimum(number, work.count - 1), *arrays))

            def turn(number: Any, state: Any) -> Any:
                before, numbers = state
                there = number * blocks + block
                after = read(there + blocks)
                place, is_used, steps = work.find(jnp.minimum(there, work.count - 1), *numbers)
                is_used = is_used & (there < work.count)
                pl.when(is_used)(lambda: do(place, before, steps))
                return before + jnp.where(is_used, steps + work.later, 0), after

            state = (jnp.int32(0), read(block))
            return loop(pl.cdiv(work.count, blocks), turn, state, interpret=interpret)[0]

        def copied(place: Any, before: Any, steps: Any) -> None:
            if own:
                place = own.prepare(place, *arrays)

            def step(at: Any, nothing: Any) -> Any:
                here = before + at
                pl.when(here >= stages)(lambda: plgpu.barrier_wait(empty.at[slot(here)]))
                work.fill(place, at, held(here), *arrays)
                return nothing

            loop(steps + work.later, step, (), interpret=interpret)

        def multiplied(place: Any, before: Any, steps: Any) -> None:
            def added_up(*totals: Any) -> Any:
                def step(at: Any, nothing: Any) -> Any:
                    here = held(before + at)
                    plgpu.barrier_wait(here.full)
                    if own:
                        own.arrived(here, *arrays)
                    work.multiply(place, at, totals, here)
                    # These products are still running while the next tiles are waited for: their own are released then.
                    plgpu.wgmma_wait(len(totals))
                    pl.when(at > 0)(lambda: plgpu.barrier_arrive(empty.at[slot(before + at - 1)]))
                    led(before, at, steps)
                    return nothing

                loop(steps, step, (), interpret=interpret)
                plgpu.wgmma_wait(0)
                pl.when(steps > 0)(lambda: plgpu.barrier_arrive(empty.at[slot(before + steps - 1)]))
                return tuple(total[...] for total in totals)

            totals = pl.run_scoped(added_up, *(sums for _ in right))
            work.write(place, totals, [held(before + steps + number) for number in range(work.later)], *arrays)

        def passed(place: Any, before: Any, steps: Any) -> None:
            def step(at: Any, nothing: Any) -> Any:
                plgpu.barrier_wait(full.at[slot(before + at)])
                plgpu.barrier_arrive(empty.at[slot(before + at)])
                led(before, at, steps)
                return nothing

            loop(steps + work.later, step, (), interpret=interpret)

        def worked(place: Any, before: Any, steps: Any) -> None:
            begun(before, steps)
            if work.is_idle is None:
                multiplied(place, before, steps)
            else:
                idle = work.is_idle(place)
                pl.when(idle)(lambda: passed(place, before, steps))
                pl.when(jnp.logical_not(idle))(lambda: multiplied(place, before, steps))

        @pl.when(group == WORKERS)
        def _() -> None:
            if not interpret:
                plgpu.set_max_registers(_COPYING, action="decrease")
            done = through(copied)
            # Every phase of a barrier is waited for, also the last ones.
            last = jnp.minimum(done, stages)

            def drained(at: Any, nothing: Any) -> Any:
                plgpu.barrier_wait(empty.at[slot(done - last + at)])
                return nothing

            loop(last, drained, (), interpret=interpret)

        @pl.when(group < WORKERS)
        def _() -> None:
            if not interpret:
                plgpu.set_max_registers(_MULTIPLYING, action="increase")
            through(worked)
            plgpu.wait_smem_to_gmem(0)

    made: Sequence[jax.Array] = launch(
        kernel,
        operands,
        out=out,
        grid={"block": blocks},
        scratch=[
            *scratch,
            *(plgpu.SMEM((stages, *shape), dtype, transforms=lines(dtype)) for shape in (left, *right)),
            plgpu.Barrier(num_arrivals=len(right) + (own is None), num_barriers=stages),
            plgpu.Barrier(num_arrivals=WORKERS, num_barriers=stages),
            *([plgpu.Barrier()] if lead else []),
        ],
        groups={"group": WORKERS + 1},
        interpret=interpret,
        name=name,
        approx_math=fast,
    )
    return made
