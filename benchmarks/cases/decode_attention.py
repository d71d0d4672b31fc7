"""Attention of one new token to a cache in pages: sequences as long as their room, and shorter ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import DecodeAttention

from .case import Case, normal


def plain(q: Any, k: Any, v: Any, lengths: Any, table: Any, *, scale: float, implementation: str = "xla") -> jax.Array:
    """Pages of each sequence side by side, then JAX's attention."""
    k, v = (x[table].reshape(table.shape[0], -1, *x.shape[2:]) for x in (k, v))
    how: dict[str, Any] = {"scale": scale, "implementation": implementation}
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, **how)


def case(
    name: str, shape: tuple[int, int, int, int, int], *, longest: int | None = None, dtype: Any = jnp.float32
) -> Case:
    """A case from (batch, room, heads, key heads, head size), on pages of 16; sequences are as long as their room."""
    batch, room, heads, shared, size = shape

    def make(rng: Any) -> Any:
        each = room // 16
        table = jnp.asarray(rng.permutation(batch * each).reshape(batch, each), jnp.int32)
        pages = [normal(rng, (batch * each, 16, shared, size), dtype) for _ in range(2)]
        lengths = [room] * batch if longest is None else rng.integers(longest // 2, longest + 1, batch)
        q = normal(rng, (batch, 1, heads, size), dtype)
        return (q, *pages, jnp.asarray(lengths, jnp.int32), table), {"scale": size**-0.5}

    traffic = 2 * jnp.dtype(dtype).itemsize * batch * (longest or room) * shared * size
    return Case("decode_attention", name, "cpu", make, DecodeAttention, plain, 0, traffic)


CASES = [
    case("8x1024, 8 heads on 2 of 64", (8, 1024, 8, 2, 64)),
    case("8 of up to 512 in 2048, 8 heads on 2 of 64", (8, 2048, 8, 2, 64), longest=512),
]
