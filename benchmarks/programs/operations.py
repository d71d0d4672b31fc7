"""The operations of a step in two forms with one signature: plain JAX, and the library."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import library

_ACTIVATIONS: dict[Any, Any] = {None: lambda x: x, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


def routed(ops: Any, x: Any, logits: Any, gate: Any, up: Any, down: Any, k: int) -> jax.Array:
    """An expert layer with ragged products; routing, permuting and adding up are plain JAX."""
    scores, chosen = jax.lax.top_k(logits.astype(jnp.float32), k)
    shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=logits.shape[-1]).astype(jnp.int32)
    rows = x[order // k]
    hidden = jax.nn.silu(ops.ragged_dot(rows, gate, sizes)) * ops.ragged_dot(rows, up, sizes)
    out = ops.ragged_dot(hidden, down, sizes)
    back = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(x.shape[0], k, -1)
    return jnp.einsum("tcw,tc->tw", back, shares)


class Plain:
    """Operations of JAX alone; attention by cuDNN where that is asked for."""

    def __init__(self, attention: str | None = None) -> None:
        self._attention: Any = attention

    def attention(self, q: Any, k: Any, v: Any, *, causal: bool = False, key_value_lengths: Any = None) -> jax.Array:
        """Attention of (batch, length, heads, depth)."""
        more = {} if key_value_lengths is None else {"key_value_seq_lengths": key_value_lengths}
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=self._attention, **more)

    def matmul(self, a: Any, b: Any, bias: Any = None, *, activation: Any = None) -> jax.Array:
        """A product with bias and activation, which the compiler may fuse."""
        return _ACTIVATIONS[activation](a @ b if bias is None else a @ b + bias)

    def rms_norm(self, x: Any, weight: Any) -> jax.Array:
        """Computes the norm in float32."""
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
        return (normed * weight.astype(jnp.float32)).astype(x.dtype)

    def layer_norm(self, x: Any, weight: Any, bias: Any) -> jax.Array:
        """Computes the norm in float32."""
        wide = x.astype(jnp.float32)
        off = wide - jnp.mean(wide, -1, keepdims=True)
        normed = off * jax.lax.rsqrt(jnp.mean(off * off, -1, keepdims=True) + 1e-6)
        return (normed * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)

    def residual_norm(self, x: Any, residual: Any, weight: Any) -> tuple[jax.Array, jax.Array]:
        """The normed sum, and the sum."""
        return self.rms_norm(x + residual, weight), x + residual

    def softmax(self, x: Any) -> jax.Array:
        """A softmax over the last axis."""
        return jax.nn.softmax(x, axis=-1)

    def ragged_dot(self, lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
        """Groups of rows, each with a matrix of its own."""
        return jax.lax.ragged_dot(lhs, rhs, sizes)

    def moe(self, x: Any, logits: Any, gate: Any, up: Any, down: Any, *, k: int) -> jax.Array:
        """Copies of the rows sorted by expert, through their experts, and added up again."""
        return routed(self, x, logits, gate, up, down, k)

    def linear_cross_entropy(self, hidden: Any, weight: Any, labels: Any) -> jax.Array:
        """The mean, from all logits at once in float32."""
        logits = jnp.matmul(hidden, weight, preferred_element_type=jnp.float32)
        found = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - found)


class Library:
    """The library's functions, called as a user calls them."""

    attention = staticmethod(library.attention)
    matmul = staticmethod(library.matmul)
    rms_norm = staticmethod(library.rms_norm)
    layer_norm = staticmethod(library.layer_norm)
    softmax = staticmethod(library.softmax)
    ragged_dot = staticmethod(library.ragged_dot)
    residual_norm = staticmethod(library.residual_norm)
    moe = staticmethod(library.moe)
    linear_cross_entropy = staticmethod(library.linear_cross_entropy)
