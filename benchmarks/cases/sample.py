"""Words drawn from a vocabulary, as a server draws them: with top-p, and with top-k before it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import Sample

from .case import Case, normal


def plain(key: Any, logits: Any, temperature: Any, top_p: Any, *, top_k: int | None) -> jax.Array:
    """Draws words by sorting each row."""
    wide = logits.astype(jnp.float32) / temperature[:, None]
    ordered = jnp.sort(wide, axis=-1, descending=True)
    if top_k is not None:
        wide = jnp.where(wide < ordered[:, top_k - 1 : top_k], -jnp.inf, wide)
        ordered = jnp.where(ordered < ordered[:, top_k - 1 : top_k], -jnp.inf, ordered)
    shares = jax.nn.softmax(ordered, axis=-1)
    kept = jnp.cumsum(shares, axis=-1) - shares < top_p[:, None]
    least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jax.random.categorical(key, jnp.where(wide >= least, wide, -jnp.inf)).astype(jnp.int32)


def case(rows: int, words: int, *, top_k: int | None = None) -> Case:
    """A case of so many rows, with a top-p of 0.9."""

    def make(rng: Any) -> Any:
        logits = normal(rng, (rows, words), jnp.float32, 3.0)
        return (jax.random.key(0), logits, jnp.ones(rows), jnp.full(rows, 0.9)), {"top_k": top_k}

    kind = "top-p" if top_k is None else f"top-k {top_k}, top-p"
    return Case("sample", f"{rows}x{words} {kind}", "cpu", make, Sample, plain, 0, 4 * rows * words)


CASES = [case(4, 32000), case(4, 32000, top_k=50)]
