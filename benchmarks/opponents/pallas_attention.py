"""JAX's own Pallas kernels for attention: attention, attention_mgpu, decode_attention and paged_attention."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library.jax_pallas import gpu_kernels

from .opponent import Call, Opponent

# Blocks of queries and keys, all blocks of the gradient, and warps: the kernel's own and those around them.
BLOCKS = ((128, 128, 32, None), (128, 64, 64, 4), (128, 64, 64, 8), (64, 64, 32, 4))
# Blocks of queries (of each of two warpgroups) and of keys, and steps in flight, as its benchmark has them.
MOSAIC = ((64, 256, 2), (64, 128, 2), (64, 128, 4), (64, 64, 2), (64, 64, 4))
# Over how many parts of the keys a decoding step is spread.
SPLITS = (1, 4, 16)


def by_triton(q: Any, k: Any, v: Any, *, config: Any, causal: bool, scale: float, interpret: bool = False) -> jax.Array:
    """JAX's `mha`, with a gradient."""
    kernels = gpu_kernels("attention")
    block_q, block_k, back, warps = config
    blocks = kernels.BlockSizes(block_q, block_k, back, back, back, back)
    return kernels.mha(q, k, v, None, scale, causal, blocks, num_warps=warps, interpret=interpret)


def by_mosaic(q: Any, k: Any, v: Any, *, config: tuple[int, int, int], causal: bool) -> jax.Array:
    """Runs the kernel without a scale: the queries come scaled."""
    kernels = gpu_kernels("attention_mgpu")
    block_q, block_kv, steps = config
    chosen = kernels.TuningConfig(block_q=block_q, block_kv=block_kv, max_concurrent_steps=steps, causal=causal)
    return kernels.attention(q, k, v, chosen)


def scaled_float16(scale: float) -> Any:
    """JAX 0.11 holds the queries in float16, whatever they are; that costs what bfloat16 would."""

    def prepare(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return (q.astype(jnp.float32) * scale).astype(jnp.float16), k.astype(jnp.float16), v.astype(jnp.float16)

    return prepare


def decode(q: Any, k: Any, v: Any, *, splits: int, scale: float, interpret: bool = False) -> jax.Array:
    """One query a sequence."""
    gqa = gpu_kernels("decode_attention").gqa
    return gqa(q[:, 0], k, v, sm_scale=scale, k_splits=splits, interpret=interpret)[:, None]


def paged(q: Any, k: Any, v: Any, lengths: Any, table: Any, *, splits: int, interpret: bool = False) -> jax.Array:
    """One query a sequence, keys in pages; without a scale: the queries come scaled."""
    kernel = gpu_kernels("paged_attention").paged_attention
    return kernel(q[:, 0], k, v, table, lengths, k_splits=splits, interpret=interpret)[:, None]


def scaled_pages(scale: float) -> Any:
    """Pages in JAX's layout, in which each head has its own."""

    def prepare(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> tuple[Any, ...]:
        pages = (jnp.transpose(pages, (2, 0, 1, 3)) for pages in (k, v))
        return (q.astype(jnp.float32) * scale).astype(q.dtype), *pages, lengths, table

    return prepare


def opponents(call: Call) -> Iterator[Opponent]:
    """Every kernel and config for the call."""
    if call.op == "attention" and call.static.get("window") is None:
        yield from _whole(call)
    elif call.op == "decode_attention":
        scale, each = call.static["scale"], call.arrays[4].shape[1]
        for splits in (splits for splits in SPLITS if each % splits == 0):
            fn = functools.partial(paged, splits=splits)
            yield Opponent(f"jax paged_attention({splits} splits)", fn, scaled_pages(scale))


def _whole(call: Call) -> Iterator[Opponent]:
    q, k, _ = call.arrays
    scale, causal = call.static["scale"], call.static["causal"]
    if q.shape[1] == 1 and not call.backward:
        for splits in SPLITS:
            fn = functools.partial(decode, splits=splits, scale=scale)
            yield Opponent(f"jax decode_attention({splits} splits)", fn)
        return
    # It wants as many heads of keys as of queries.
    if q.shape[2] == k.shape[2]:
        for blocks in (b for b in BLOCKS if q.shape[1] % b[0] == 0 and k.shape[1] % b[1] == 0):
            fn = functools.partial(by_triton, config=blocks, causal=causal, scale=scale)
            yield Opponent(f"jax attention{blocks}", fn)
    # Its gradient knows no causal mask.
    if q.shape[3] % 64 == 0 and not call.backward:
        for config in (c for c in MOSAIC if q.shape[1] % (2 * c[0]) == 0 and k.shape[1] % c[1] == 0):
            fn = functools.partial(by_mosaic, config=config, causal=causal)
            yield Opponent(f"jax attention_mgpu{config} float16", fn, scaled_float16(scale))
