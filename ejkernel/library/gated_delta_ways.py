"""The gated delta rule step by step, and over chunks in which all steps are taken at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .recurrence import (
    decays,
    finite_gates,
    in_chunks,
    left_at_the_end,
    nearly_decays,
    out_of_chunks,
    states_of,
    unit_inverse,
)
from .rows import across
from .varying import varying_like

Result = tuple[jax.Array, jax.Array]


def stepwise(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Result:
    """`S = exp(g) S; S += k (beta (v - S^T k))^T; out = S^T q`, in float32."""
    arrays = [jnp.moveaxis(a.astype(jnp.float32), 1, 0) for a in (q, k, v, g, beta)]

    def step(state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = now
        state = state * jnp.exp(g)[..., None, None]
        error = (v - jnp.sum(state * k[..., None], axis=-2)) * beta[..., None]
        state = state + k[..., None] * error[..., None, :]
        return state, jnp.sum(state * q[..., None], axis=-2)

    last, out = jax.lax.scan(step, varying_like(state, *arrays), tuple(arrays))
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), last


def chunked(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, *, chunk: int, levels: bool) -> Result:
    """All steps of a chunk at once: their errors are the solution of a triangular system."""
    length, dtype = q.shape[1], v.dtype
    # Numbers that were narrow are so in every product, and gradients are added up before they are rounded.
    how = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    q, k, v, g, beta = (in_chunks(a.astype(jnp.float32), chunk) for a in (q, k, v, finite_gates(g), beta))
    sums = jnp.cumsum(g, axis=-1)
    beta = beta[..., None]
    left, last = (decays if how == jax.lax.Precision.HIGHEST else nearly_decays)(g), sums[..., -1:]
    likeness = jnp.einsum("...ik,...jk->...ij", k, k, precision=how) * left * beta
    solved = unit_inverse(jnp.tril(likeness, -1))
    # Errors as if the chunk began with nothing, and what each error takes of the state at its begin.
    # Side by side, so that each is one product.
    both = jnp.concatenate([v * beta, k * beta * jnp.exp(sums)[..., None]], axis=-1)
    both = jnp.matmul(solved, both, precision=how)
    own, of_state = jnp.split(both, [v.shape[-1]], axis=-1)
    kept = k * left_at_the_end(g, 3)[..., None]
    added, taken = jnp.split(jnp.einsum("...ck,...cv->...kv", kept, both, precision=how), [v.shape[-1]], axis=-1)
    moves = across(jnp.eye(k.shape[-1], dtype=jnp.float32), taken) * jnp.exp(last)[..., None] - taken
    before, end = states_of(moves, added, state, levels=levels, how=how)
    errors = own - jnp.matmul(of_state, before, precision=how)
    scores = jnp.einsum("...ik,...jk->...ij", q, k, precision=how) * left
    out = jnp.matmul(q * jnp.exp(sums)[..., None], before, precision=how)
    out = out + jnp.matmul(scores, errors, precision=how)
    return out_of_chunks(out, length).astype(dtype), end


def linear_stepwise(q: Any, k: Any, v: Any, g: Any, state: Any) -> Result:
    """`S = exp(g) S + k v^T; out = S^T q`, in float32; g for each head or each of its rows."""
    arrays = [jnp.moveaxis(a.astype(jnp.float32), 1, 0) for a in (q, k, v, g)]

    def step(state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        q, k, v, g = now
        state = state * jnp.exp(g if g.ndim == k.ndim else g[..., None])[..., None] + k[..., None] * v[..., None, :]
        return state, jnp.sum(state * q[..., None], axis=-2)

    last, out = jax.lax.scan(step, varying_like(state, *arrays), tuple(arrays))
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), last


def linear_chunked(q: Any, k: Any, v: Any, g: Any, state: Any, *, chunk: int, levels: bool) -> Result:
    """All steps of a chunk at once: scores within it, a state between chunks."""
    length, dtype = q.shape[1], v.dtype
    how = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    q, k, v, g = (in_chunks(a.astype(jnp.float32), chunk) for a in (q, k, v, finite_gates(g)))
    sums, ends = jnp.cumsum(g, axis=3), left_at_the_end(g, 3)
    if g.ndim == k.ndim - 1:
        scores = jnp.einsum("...ik,...jk->...ij", q, k, precision=how) * decays(g)
        sums, ends = sums[..., None], ends[..., None]
    else:
        # Each row decays by itself, so the factor is within the sum. A quotient of two exponentials could overflow.
        left = decays(jnp.swapaxes(g, -1, -2))
        scores = jnp.einsum("...ik,...jk,...kij->...ij", q, k, left, precision=how)
    added = jnp.einsum("...ck,...cv->...kv", k * ends, v, precision=how)
    moves = jnp.broadcast_to(jnp.exp(sums[..., -1, :]), added.shape[:-1])
    before, end = states_of(moves, added, state, levels=levels, how=how)
    out = jnp.matmul(q * jnp.exp(sums), before, precision=how) + jnp.matmul(scores, v, precision=how)
    return out_of_chunks(out, length).astype(dtype), end
