"""Decoding over pages as a case: one query a sequence, keys and values in pages of a pool."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from cases.case import Case, normal

from ejkernel.library import DecodeAttention


def gathered(q: Any, k: Any, v: Any, lengths: Any, table: Any, *, scale: float) -> jax.Array:
    """The pages of each sequence side by side, and attention over them."""
    k, v = (pages[table].reshape(table.shape[0], -1, *pages.shape[2:]) for pages in (k, v))
    how = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, scale=scale, implementation=how)


def case(name: str, platform: str, shape: tuple[int, int, int, int, int, int]) -> Case:
    """A case from (sequences, tokens of each, heads, key heads, head size, tokens of a page)."""
    batch, tokens, heads, key_heads, depth, page = shape
    each = tokens // page

    def make(rng: Any) -> Any:
        table = jnp.asarray(rng.permutation(batch * each).reshape(batch, each), jnp.int32)
        pages = [normal(rng, (batch * each, page, key_heads, depth), jnp.bfloat16) for _ in range(2)]
        q = normal(rng, (batch, 1, heads, depth), jnp.bfloat16)
        return (q, *pages, jnp.full(batch, tokens, jnp.int32), table), {"scale": depth**-0.5}

    flops = 4 * batch * heads * depth * tokens
    traffic = 2 * 2 * batch * tokens * key_heads * depth
    return Case("decode_attention", name, platform, make, DecodeAttention, gathered, flops, traffic)
