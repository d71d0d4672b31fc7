"""Attention for Hopper GPUs with a running softmax: two warpgroups of queries, a third copies keys and values."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .launch import launch, plgpu
from .matmul import lines, turned
from .tiles import WORKERS

# Exponentials of two are what the hardware has.
_LOG2E = math.log2(math.e)
# The score of a hidden key: a difference to it is a number.
_HIDDEN = -1e30


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
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """The result, and the logarithm of each query's sum of exponentials; calls that `attention_tiles` serves."""
    (batch, queries, heads, depth), (keys, key_heads), width = q.shape, k.shape[1:3], v.shape[-1]
    share = block_q // WORKERS
    masked = causal or keys % block_k != 0
    rows, whole = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA

    def placed(x: jax.Array, layout: Any) -> jax.Array:
        return x if interpret else plgpu.layout_cast(x, layout)

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any, log_ref: Any, ready: Any, mine: Any, *refs: Any) -> None:
        # The result takes the place of the queries where it is as wide.
        made = mine if width == depth else refs[0]
        b, h, i = (jax.lax.axis_index(name) for name in ("batch", "head", "block"))
        group = jax.lax.axis_index("group")
        key_head = jax.lax.div(h, jnp.int32(heads // key_heads))
        begin = i * block_q + group * share
        steps: Any = pl.cdiv(keys, block_k)
        if causal:
            steps = jnp.minimum(steps, pl.cdiv((i + 1) * block_q, block_k))

        def along(numbers: jax.Array, shape: tuple[int, int]) -> jax.Array:
            return jax.lax.broadcast_in_dim(numbers, shape, (0,))

        def compute(pipeline: Any) -> None:
            plgpu.copy_gmem_to_smem(q_ref.at[b, pl.ds(begin, share), h], mine.at[group], ready.at[group])
            plgpu.barrier_wait(ready.at[group])
            zeros = placed(jnp.zeros((share, width), jnp.float32), whole)
            state = (zeros, placed(jnp.full(share, -jnp.inf), rows), placed(jnp.zeros(share), rows))
            total, top, norm = pipeline(state)
            made[group] = (total * along(1.0 / norm, total.shape)).astype(o_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(made.at[group], o_ref.at[b, pl.ds(begin, share), h])
            log_ref[b, h, pl.ds(begin, share)] = top / _LOG2E + jnp.log(norm)
            plgpu.wait_smem_to_gmem(0)

        def seen(step: Any) -> Any:
            shape = (share, block_k)
            column = placed(jax.lax.broadcasted_iota("int32", shape, 1), whole) + step * block_k
            if not causal:
                return column < keys
            return column <= placed(jax.lax.broadcasted_iota("int32", shape, 0), whole) + begin

        def step(indices: Any, k_part: Any, v_part: Any, state: Any) -> Any:
            total, top, norm = state

            def multiplied(scores: Any) -> Any:
                plgpu.wgmma(scores, mine.at[group], turned(k_part))
                return scores[...]

            scores = pl.run_scoped(multiplied, plgpu.ACC((share, block_k), jnp.float32)) * (scale * _LOG2E)
            if masked:
                scores = jnp.where(seen(indices[0]), scores, jnp.full_like(scores, _HIDDEN))
            new = jnp.maximum(top, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores - along(new, scores.shape))
            kept = jnp.exp2(top - new)
            norm = norm * kept + jnp.sum(weights, axis=1)
            total = total * along(kept, total.shape)
            narrow = weights.astype(v.dtype)
            if interpret:
                # The interpreter takes a factor from shared memory alone, and no accumulator that holds something.
                there = refs[-1]
                there[group] = narrow
                plgpu.commit_smem()

                def added(part: Any) -> Any:
                    plgpu.wgmma(part, there.at[group], v_part)
                    return part[...]

                return total + pl.run_scoped(added, plgpu.ACC((share, width), jnp.float32)), new, norm
            total = pl.run_state(lambda sum_ref: plgpu.wgmma(sum_ref, narrow, v_part))(plgpu.ACC.init(total))
            return total, new, norm

        order = lines(k.dtype)
        specs = [plgpu.BlockSpec((block_k, wide), lambda at: (at, 0), transforms=order) for wide in (depth, width)]
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps,),
            in_specs=specs,
            max_concurrent_steps=stages,
            memory_registers=40,
            wg_axis="group",
            num_compute_wgs=WORKERS,
            memory_thread_idx=WORKERS,
            compute_context=compute,
        )(k_ref.at[b, :, key_head], v_ref.at[b, :, key_head])

    order = lines(q.dtype)
    held = [depth, *([] if width == depth else [width]), *([block_k] if interpret else [])]
    out, logs = launch(
        kernel,
        [q, k, v],
        out=[
            jax.ShapeDtypeStruct((batch, queries, heads, width), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
        ],
        grid={"batch": batch, "head": heads, "block": queries // block_q},
        scratch=[
            plgpu.Barrier(num_barriers=WORKERS),
            *(plgpu.SMEM((WORKERS, share, wide), q.dtype, transforms=order) for wide in held),
        ],
        groups={"group": WORKERS + 1},
        interpret=interpret,
        name="library_attention",
    )
    return out, logs
