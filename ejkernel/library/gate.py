"""The gate of a pair of products, `silu(opened) * raised`, and the gradients of both."""

from __future__ import annotations

import jax


def joined(opened: jax.Array, raised: jax.Array) -> jax.Array:
    """The gated result of both products, in float32."""
    return jax.nn.silu(opened) * raised


def pulled(opened: jax.Array, raised: jax.Array, towards: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of both products from that of the result, all in float32."""
    share = jax.nn.sigmoid(opened)
    return towards * raised * share * (1 + opened * (1 - share)), towards * opened * share
