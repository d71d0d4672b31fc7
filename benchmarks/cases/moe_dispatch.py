"""Rows sent to experts and added up again, the experts' own results being an argument."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import moe_combine, moe_dispatch

from .case import Case, normal


def routed(logits: Any, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Plain JAX: each row's token and weight, in order of experts, and the size of each group."""
    values, chosen = jax.lax.top_k(logits, k)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=logits.shape[1]).astype(jnp.int32)
    return order // k, jax.nn.softmax(values.astype(jnp.float32), -1).reshape(-1)[order], sizes


def added(rows: Any, token: Any, weights: Any, like: Any) -> jax.Array:
    """Plain JAX: the weighted sum of each token's rows."""
    scaled = rows.astype(jnp.float32) * weights[:, None]
    return jnp.zeros(like.shape, jnp.float32).at[token].add(scaled).astype(like.dtype)


def plain(x: Any, logits: Any, made: Any, *, k: int) -> tuple[jax.Array, jax.Array]:
    """Sorts the rows by expert, and adds each result to its token."""
    token, weights, _ = routed(logits, k)
    return x[token], added(made, token, weights, x)


def there_and_back(
    x: Any, logits: Any, made: Any, *, k: int, executor: Any, dispatch: Any = None, combine: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Sends rows to the experts and adds the results up again, by the library."""
    sent = moe_dispatch(x, logits, k=k, cfg=dispatch, executor=executor)
    return sent.rows, moe_combine(made, sent.weights, sent.places, cfg=combine, executor=executor)


def case(shape: tuple[int, int, int, int], *, dtype: Any = jnp.float32, backward: bool = False) -> Case:
    """A case from (tokens, width, experts, experts of a token)."""
    tokens, width, count, k = shape

    def make(rng: Any) -> Any:
        # From the rows themselves, with weights that add up to one, the result would be x, and the gradient of logits
        # nothing but rounding.
        x, made = normal(rng, (tokens, width), dtype), normal(rng, (tokens * k, width), dtype)
        return (x, normal(rng, (tokens, count), jnp.float32), made), {"k": k}

    # Forward 1 and k in, k and 1 out; backward k and 1 and once more k in, 1 and k out.
    traffic = jnp.dtype(dtype).itemsize * tokens * width * (5 * k + 4 if backward else 2 * k + 2)
    title = f"and combine {tokens}x{width}, {k} of {count}{', gradient' if backward else ''}"
    return Case("moe_dispatch", title, "cpu", make, there_and_back, plain, 0, traffic, backward)


CASES = [case((2048, 256, 32, 4)), case((1024, 256, 32, 4), backward=True)]
