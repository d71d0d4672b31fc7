"""Attention for Hopper GPUs with a running softmax: warpgroups of queries, and one more that copies keys and values."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .attention_order import order_of
from .launch import launch, plgpu
from .matmul import lines, turned

# Queries of a warpgroup.
ROWS = 64
# Exponentials of two are what the hardware has.
_LOG2E = math.log2(math.e)
# Registers of a thread that computes and of one that copies: together what the multiprocessor has.
_REGISTERS = {2: (232, 40), 3: (160, 32)}


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    causal: bool,
    block_q: int,
    block_k: int,
    stages: int,
    persistent: bool = False,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """The result, and the logarithm of each query's sum of exponentials; calls that `attention_tiles` serves.

    Exponentials of a step are computed while the values of the step before are multiplied, and each thread adds up its
    own weights until the end. `persistent`: a block of threads stays for several blocks of queries, and the next one's
    keys are copied while this one's result is written.
    """
    (batch, queries, heads, depth), (keys, key_heads), width = q.shape, k.shape[1:3], v.shape[-1]
    if scale <= 0:
        # The largest score is found before it is scaled.
        q, scale = (-q, -scale) if scale else (jnp.zeros_like(q), 1.0)
    groups, share = block_q // ROWS, ROWS
    factor = scale * _LOG2E
    order = order_of(q, k, v, block_q=block_q, persistent=persistent, causal=causal)
    # Keys come last block first: in that alone a warpgroup's queries see some keys and not others.
    crossed = causal or keys % block_k != 0
    whole = plgpu.Layout.WGMMA
    slots = 2 if persistent else 1
    own_result = width != depth

    def placed(x: jax.Array, layout: Any) -> jax.Array:
        return x if interpret else plgpu.layout_cast(x, layout)

    def along(numbers: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.lax.broadcast_in_dim(numbers, shape, (0,))

    def steps_to(end: Any) -> Any:
        """Blocks of keys that queries before this one see."""
        every = pl.cdiv(keys, block_k)
        return jnp.minimum(every, pl.cdiv(end, block_k)) if causal else every

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any, log_ref: Any, *refs: Any) -> None:
        q_held, k_held, v_held, q_full, q_empty, k_full, k_empty, v_full, v_empty, *others = refs
        group = jax.lax.axis_index("group")

        def copy() -> None:
            plgpu.set_max_registers(_REGISTERS[groups][1], action="decrease")

            def tile(number: Any, done: Any) -> Any:
                b, h, i = order.place(number)
                slot = jax.lax.rem(number, jnp.int32(slots)) * groups if persistent else 0
                key_head = jax.lax.div(h, jnp.int32(heads // key_heads))
                for g in range(groups):
                    if persistent:

                        @pl.when(number >= slots)
                        def _(at: Any = slot + g) -> None:
                            plgpu.barrier_wait(q_empty.at[at])

                    there = pl.ds(i * block_q + g * share, share)
                    plgpu.copy_gmem_to_smem(q_ref.at[b, there, h], q_held.at[slot + g], q_full.at[slot + g])
                count = steps_to((i + 1) * block_q)

                def step(at: Any, carried: Any) -> Any:
                    here = jax.lax.rem(done + at, jnp.int32(stages))
                    part = (b, pl.ds((count - 1 - at) * block_k, block_k), key_head)
                    for ref, held, full, empty in (
                        (k_ref, k_held, k_full, k_empty),
                        (v_ref, v_held, v_full, v_empty),
                    ):

                        @pl.when(done + at >= stages)
                        def _(empty: Any = empty) -> None:
                            plgpu.barrier_wait(empty.at[here])

                        plgpu.copy_gmem_to_smem(ref.at[part], held.at[here], full.at[here])
                    return carried

                jax.lax.fori_loop(0, count, step, jnp.int32(0))
                return done + count

            # What is still held is waited for: all see a barrier's every phase.
            done, tiles = order.walk(tile)
            drained = [(done, stages, 1, k_empty), (done, stages, 1, v_empty)]
            for used, places, each, empty in drained + [(tiles, slots, groups, q_empty)] * persistent:
                for at in range(places * each):

                    @pl.when(used > at // each)
                    def _(empty: Any = empty, at: int = at) -> None:
                        plgpu.barrier_wait(empty.at[at])

        def compute() -> None:
            plgpu.set_max_registers(_REGISTERS[groups][0], action="increase")
            order.walk(tile)

        def tile(number: Any, done: Any) -> Any:
            b, h, i = order.place(number)
            slot = jax.lax.rem(number, jnp.int32(slots)) * groups + group if persistent else group
            begin = i * block_q + group * share
            count = steps_to((i + 1) * block_q)
            mine = q_held.at[slot]

            def place(at: Any) -> Any:
                return jax.lax.rem(jnp.asarray(done + at, jnp.int32), jnp.int32(stages))

            def seen(at: Any) -> Any:
                shape = (share, block_k)
                column = placed(jax.lax.broadcasted_iota("int32", shape, 1), whole) + (count - 1 - at) * block_k
                inside = column < keys
                if not causal:
                    return inside
                past = column <= placed(jax.lax.broadcasted_iota("int32", shape, 0), whole) + begin
                return past & inside if keys % block_k and keys < queries else past

            def hidden(scores: jax.Array, at: Any) -> jax.Array:
                # Each query sees a key of this block, so that its largest score is a number.
                return jnp.where(seen(at), scores, jnp.full_like(scores, -jnp.inf)) if crossed else scores

            def softmax(scores: jax.Array, top: Any = None, norm: Any = None) -> Any:
                new = jnp.max(scores, axis=1)
                if top is not None:
                    new = jnp.maximum(top, new)
                weights = jnp.exp2(scores * factor - along(new * factor, scores.shape))
                added = summed(weights)
                if top is None:
                    return new, added, weights.astype(v.dtype), None
                kept = jnp.exp2((top - new) * factor)
                return new, norm * along(kept, norm.shape) + added, weights.astype(v.dtype), kept

            def summed(weights: jax.Array) -> jax.Array:
                # A thread has two of eight columns: what it adds up is its own, and threads meet at the end.
                parts = [weights[:, at : at + 8] for at in range(0, block_k, 8)]
                while len(parts) > 1:
                    parts = [sum(parts[at : at + 2][1:], parts[at]) for at in range(0, len(parts), 2)]
                return parts[0]

            def first_scores(at: Any) -> jax.Array:
                def multiplied(scores: Any) -> Any:
                    plgpu.wgmma(scores, mine, turned(k_held.at[place(at)]))
                    return scores[...]

                made: jax.Array = pl.run_scoped(multiplied, plgpu.ACC((share, block_k), jnp.float32))
                plgpu.barrier_arrive(k_empty.at[place(at)])
                return made

            def await_keys(at: Any) -> None:
                @pl.when(at < count)
                def _() -> None:
                    plgpu.barrier_wait(k_full.at[place(at)])

            def weighted(total: jax.Array, narrow: jax.Array, at: Any) -> jax.Array:
                plgpu.barrier_wait(v_full.at[place(at)])
                values = v_held.at[place(at)]
                if interpret:
                    # The interpreter takes a factor from shared memory alone, and no accumulator that holds something.
                    there = others[-1].at[group]
                    there[...] = narrow
                    plgpu.commit_smem()

                    def added(part: Any) -> Any:
                        plgpu.wgmma(part, there, values)
                        return part[...]

                    total = total + pl.run_scoped(added, plgpu.ACC((share, width), jnp.float32))
                else:
                    total = pl.run_state(lambda ref: plgpu.wgmma(ref, narrow, values))(plgpu.ACC.init(total))
                plgpu.barrier_arrive(v_empty.at[place(at)])
                return total

            def step(at: Any, state: Any) -> Any:
                total, top, norm, narrow = state
                if interpret:
                    total = weighted(total, narrow, at - 1)
                    new, norm, narrow, kept = softmax(first_scores(at), top, norm)
                    await_keys(at + 1)
                    return total * along(kept, total.shape), new, norm, narrow

                def multiplied(state: Any) -> None:
                    sum_ref, score_ref, top_ref, norm_ref, narrow_ref, kept_ref = state
                    plgpu.wgmma(score_ref, mine, turned(k_held.at[place(at)]))
                    plgpu.barrier_wait(v_full.at[place(at - 1)])
                    plgpu.wgmma(sum_ref, narrow, v_held.at[place(at - 1)])
                    # The values' product goes on.
                    scores = plgpu.wgmma_accumulator_load(score_ref, wait_n=1)
                    plgpu.barrier_arrive(k_empty.at[place(at)])
                    made = softmax(scores, top, norm)
                    top_ref[...], norm_ref[...], narrow_ref[...], kept_ref[...] = made
                    # Here, for the compiler takes no exponentials across the wait, and none behind the products' end.
                    await_keys(at + 1)

                blank = placed(jnp.zeros((share, block_k), jnp.float32), whole)
                given = (plgpu.ACC.init(total), plgpu.ACC.init(blank), top, norm, narrow, top)
                total, _, top, norm, narrow, kept = pl.run_state(multiplied)(given)
                plgpu.barrier_arrive(v_empty.at[place(at - 1)])
                return total * along(kept, total.shape), top, norm, narrow

            # Blocks of keys that this warpgroup's queries do not see, and another's do.
            unseen = count - steps_to(begin + share) if causal and groups > 1 else None
            if unseen is not None:

                def passed(at: Any, carried: Any) -> Any:
                    for full, empty in ((k_full, k_empty), (v_full, v_empty)):
                        plgpu.barrier_wait(full.at[place(at)])
                        plgpu.barrier_arrive(empty.at[place(at)])
                    return carried

                jax.lax.fori_loop(0, unseen, passed, jnp.int32(0))
            start = 0 if unseen is None else unseen
            plgpu.barrier_wait(q_full.at[slot])
            plgpu.barrier_wait(k_full.at[place(start)])
            top, norm, narrow, _ = softmax(hidden(first_scores(start), start))
            await_keys(start + 1)
            state = (placed(jnp.zeros((share, width), jnp.float32), whole), top, norm, narrow)
            state = jax.lax.fori_loop(start + 1, count, step, state)
            total, top, norm, narrow = state
            norm = jnp.sum(norm, axis=1)
            total = weighted(total, narrow, count - 1)
            made = others[0].at[group] if own_result else mine
            if own_result and persistent:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            made[...] = (total * along(1.0 / norm, total.shape)).astype(o_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(made, o_ref.at[b, pl.ds(begin, share), h])
            log_ref[b, h, pl.ds(begin, share)] = top * scale + jnp.log(norm)
            plgpu.wait_smem_to_gmem(0, wait_read_only=persistent)
            if persistent:
                plgpu.barrier_arrive(q_empty.at[slot])
            return done + count

        pl.when(group < groups)(compute)
        pl.when(group == groups)(copy)

    held = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=lines(q.dtype))
    full = plgpu.Barrier(num_barriers=stages)
    empty = plgpu.Barrier(num_barriers=stages, num_arrivals=groups)
    out, logs = launch(
        kernel,
        [q, k, v],
        out=[
            jax.ShapeDtypeStruct((batch, queries, heads, width), q.dtype),
            # The last block may be over the end: what is copied is cut off, and what is stored is not.
            jax.ShapeDtypeStruct((batch, heads, pl.cdiv(queries, block_q) * block_q), jnp.float32),
        ],
        grid={"tile": order.blocks},
        scratch=[
            *(held((slots * groups, share, depth)), held((stages, block_k, depth)), held((stages, block_k, width))),
            *[plgpu.Barrier(num_barriers=slots * groups)] * 2,
            *(full, empty, full, empty),
            *([held((groups, share, width))] if own_result else []),
            *([plgpu.SMEM((groups, share, block_k), q.dtype)] if interpret else []),
        ],
        groups={"group": groups + 1},
        interpret=interpret,
        name="library_attention",
        approx_math=True,
    )
    return out, logs[:, :, :queries]
