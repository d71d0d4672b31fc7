"""Cross entropy of a linear layer from exponentials of logits, which are kept for both gradients.

The product writes `exp(logit - offset)` in bfloat16, and no logits. With one offset for all of a token's words its
derivatives are these numbers times one factor, but for its label's. So nothing is computed for each of them again: the
label's is put in its place, and the factor multiplies what comes of the other product, and the hidden states before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .arguments import ArgumentError
from .linear_cross_entropy_chunks import by_tokens
from .linear_cross_entropy_terms import Slopes, Sums, Terms
from .linear_cross_entropy_ways import LinearCrossEntropyConfig, refuses_exponentials, refuses_products
from .mosaic.tiles import EXPONENTIALS
from .narrow import rounded
from .reverse import recomputed
from .varying import varying_like

# Tokens that are multiplied at a time where a token has several offsets, which is rare.
_ROWS = 1024
# Less than this of a price on the normaliser is as good as nothing, and cannot be divided by.
_LEAST_STEEPNESS = 1e-6
# Tokens of a chunk where gradients of gradients are asked for.
_CHUNK = 512


class _Weights(NamedTuple):
    """The weight, and what is made of it for all tokens: padded, and where gradients are asked for some words and sums.

    `common` is about the words' mean, and `total` their sum where all share a part of the label.
    """

    given: Any
    whole: Any
    sampled: Any = None
    common: Any = None
    total: Any = None


def by_kept(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    scales: jax.Array,
    *,
    terms: Terms,
    gradients: bool,
    cfg: LinearCrossEntropyConfig,
    interpret: bool,
) -> tuple[jax.Array, Any]:
    """Losses of tokens, and, if asked for, the gradients of their sum weighted by `scales`, in the inputs' dtype.

    In that dtype they are no larger than in float32, so that nothing is lost but what rounding takes.
    """
    words = weight.shape[0 if terms.vocab_first else 1]
    refused = refuses_products(cfg, hidden.shape[0], words, hidden.dtype.name) if cfg.stacked else ""
    refused = refused or refuses_exponentials(cfg, hidden.shape, words, hidden.dtype)
    if refused:
        raise ArgumentError(f"mosaic_kept cannot compute this call: {refused}")

    def kernel(hidden: Any, weight: Any, labels: Any, scales: Any) -> Any:
        how: dict[str, Any] = {"terms": terms, "gradients": gradients, "cfg": cfg, "interpret": interpret}
        # Once, however many chunks there are.
        weights = _weights(weight, terms, cfg.padded, gradients=gradients)
        if not gradients or (cfg.chunk or hidden.shape[0]) == hidden.shape[0]:
            losses, grads = _made(hidden, weights, labels, scales, **how)
        else:
            losses, grads = _by_chunks(hidden, weights, labels, scales, **how)
        return losses, jax.tree.map(lambda x: x.astype(hidden.dtype), grads)

    def plain(hidden: Any, weight: Any, labels: Any, scales: Any) -> Any:
        chunk = min(_CHUNK, hidden.shape[0])
        losses, grads = by_tokens(hidden, weight, labels, scales, terms=terms, chunk=chunk, gradients=gradients)
        return losses, jax.tree.map(lambda x: x.astype(hidden.dtype), grads)

    made: tuple[jax.Array, Any] = recomputed(kernel, plain)(hidden, weight, labels, scales)
    return made


def _weights(weight: Any, terms: Terms, padded: int | None, *, gradients: bool) -> _Weights:
    found = _Weights(weight, terms.padded(weight, padded))
    if not gradients:
        return found
    axis = 0 if terms.vocab_first else 1
    total = jnp.sum(weight, axis=axis, dtype=jnp.float32) if terms.smoothing else None
    return found._replace(sampled=terms.sampled(weight), common=terms.common(weight), total=total)


def _by_chunks(
    hidden: Any, weights: _Weights, labels: Any, scales: Any, *, cfg: LinearCrossEntropyConfig, **how: Any
) -> tuple[jax.Array, Any]:
    """Losses and gradients of some tokens at a time; the gradient of the weight is added up in float32."""
    zeros = varying_like(jnp.zeros(weights.given.shape, jnp.float32), hidden, weights.given, labels, scales)

    def step(found: jax.Array, some: Any) -> Any:
        mine, label, scale = some
        losses, (d_hidden, d_weight) = _made(mine, weights, label, scale, cfg=cfg, **how)
        return found + d_weight, (losses, d_hidden.astype(hidden.dtype))

    chunks = tuple(x.reshape(-1, cfg.chunk, *x.shape[1:]) for x in (hidden, labels, scales))
    d_weight, (losses, d_hidden) = jax.lax.scan(step, zeros, chunks)
    return losses.reshape(-1), (d_hidden.reshape(hidden.shape), d_weight)


def _made(
    hidden: Any,
    weights: _Weights,
    labels: Any,
    scales: Any,
    *,
    terms: Terms,
    gradients: bool,
    cfg: LinearCrossEntropyConfig,
    interpret: bool,
) -> Any:
    from .mosaic.exponentials import exponentials

    words = weights.given.shape[0 if terms.vocab_first else 1]
    how: dict[str, Any] = {"words": words, "vocab_first": terms.vocab_first, "total": bool(terms.smoothing)}
    expected = _expected(hidden, weights.sampled, terms) if gradients else None
    kept, parts = exponentials(hidden, weights.whole, labels, expected, **how, interpret=interpret)
    top = jnp.max(parts.offset, axis=0)
    factors = jnp.exp(parts.offset - top[None])
    total = 0.0 if parts.total is None else jnp.sum(parts.total, axis=0)
    more = [] if parts.lost is None else [parts.lost * factors, parts.offset != top[None]]
    others, at_label, *of_kept = _added(parts.norm * factors, parts.label, *more)
    # A label far above the rest would leave nothing of the loss but what its large logarithm was rounded to.
    peak = jnp.maximum(top, at_label)
    near = others * jnp.exp(top - peak) + jnp.exp(at_label - peak)
    losses = terms.losses(Sums(peak, near, at_label, total), words)
    if kept is None:
        return losses, None
    lost, several = of_kept
    kept, beside = _levelled(kept, parts.offset, top, jnp.any(several > 0))
    lost = lost + beside
    at, labels = jnp.exp(at_label - top), jnp.clip(labels, 0, words - 1)
    sums = Sums(top, others + at, at_label, total)
    steepness = _steepness(terms, sums)
    share = steepness / sums.norm
    kept, lost, exactly = _with_labels(kept, lost, labels, at, others, (1 - terms.smoothing) / steepness)
    slopes, factor = Slopes(kept, lost), share * scales * exactly
    return losses, _gradients(hidden, weights, slopes, factor, scales, terms, cfg)


def _gradients(
    hidden: Any,
    weights: _Weights,
    slopes: Slopes,
    factor: jax.Array,
    scales: jax.Array,
    terms: Terms,
    cfg: LinearCrossEntropyConfig,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of hidden states and weight, from slopes without each token's factor."""
    axis = 0 if terms.vocab_first else 1
    words, wide = weights.given.shape[axis], hidden.astype(jnp.float32)
    # Rounded as it is written: it is as large as the weight, and a pass over it takes a fiftieth of all time.
    dtype = jnp.float32 if terms.smoothing or cfg.chunk else weights.given.dtype
    d_hidden = _of_hidden(slopes, weights, terms) * factor[:, None]
    d_weight = terms.of_weight(slopes, (wide * factor[:, None]).astype(hidden.dtype), dtype)
    d_weight = terms.of_words(d_weight, words)
    if terms.smoothing:
        # What all words share of each token's derivatives.
        each = (scales * (terms.smoothing / words))[:, None]
        d_hidden = d_hidden - each * weights.total[None]
        d_weight = d_weight - jnp.expand_dims(jnp.sum(wide * each, axis=0), axis)
    return d_hidden, d_weight


def _of_hidden(slopes: Slopes, weights: _Weights, terms: Terms) -> jax.Array:
    """The gradient of hidden states from that of logits, without tokens' factors."""
    # Else the product would begin with what is added here, which is as large as its result.
    made: jax.Array = jax.lax.optimization_barrier(terms.of_hidden(Slopes(slopes.values), weights.whole, None))
    return made if slopes.lost is None else made + slopes.lost[:, None] * weights.common[None, :]


def _expected(hidden: Any, sampled: Any, terms: Terms) -> jax.Array:
    """The largest logit among some words: no exponential is far too large once it is taken off, nor all too small."""
    from .mosaic.exponentials import LARGEST

    highest = jnp.max(terms.logits(hidden, sampled), axis=1)
    return jnp.clip(highest, -LARGEST, LARGEST)


def _steepness(terms: Terms, sums: Sums) -> jax.Array:
    found = terms.steepness(sums)
    if not terms.z_loss:
        return found
    return jnp.where(jnp.abs(found) < _LEAST_STEEPNESS, _LEAST_STEEPNESS, found)


def _added(*arrays: jax.Array) -> Sequence[jax.Array]:
    """The sums of the arrays' columns in one pass: one after the other they would be as many programs on a GPU."""
    made: jax.Array = jnp.sum(jnp.stack([x.astype(jnp.float32) for x in arrays]), axis=1)
    return list(made)


def _levelled(kept: jax.Array, offsets: jax.Array, top: jax.Array, is_needed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The exponentials with one offset a token, and what rounding took: in place, and only where that is needed."""
    tokens, columns = kept.shape
    rows = min(tokens, _ROWS)

    def step(number: Any, state: Any) -> Any:
        kept, lost = state
        # The last rows begin early enough to be whole, so some of them have been multiplied before.
        start = jnp.minimum(number * rows, tokens - rows)
        is_new = start + jnp.arange(rows) >= number * rows
        # Each tile's factor, of these rows: that of all would be written, and is not needed but here.
        offset, highest = (jax.lax.dynamic_slice_in_dim(x, start, rows, axis=-1) for x in (offsets, top))
        by = jnp.where(is_new[:, None], jnp.exp(offset - highest[None]).T, 1.0)
        by = jnp.repeat(by, EXPONENTIALS.n, axis=1)[:, :columns]
        wide = jax.lax.dynamic_slice_in_dim(kept, start, rows).astype(jnp.float32) * by
        near = rounded(wide, kept.dtype)
        kept = jax.lax.dynamic_update_slice_in_dim(kept, near.astype(kept.dtype), start, 0)
        more = jax.lax.dynamic_slice_in_dim(lost, start, rows) + jnp.sum(wide - near, axis=1)
        return kept, jax.lax.dynamic_update_slice_in_dim(lost, more, start, 0)

    count = jnp.where(is_needed, -(-tokens // rows), 0)
    made: tuple[jax.Array, jax.Array] = jax.lax.fori_loop(0, count, step, (kept, jnp.zeros_like(top)))
    return made


def _with_labels(
    kept: jax.Array, lost: jax.Array, labels: jax.Array, at: jax.Array, others: jax.Array, taken: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The exponentials with those `at` labels, less so much of all; what rounding took; a factor that makes it exact.

    Rounding the label's derivative would be most of a gradient's error. So what it takes is given back by the token's
    factor, which for other words is an error of as many bits as their own rounding.
    """
    # A share near 1 cancels here: what is left of it are the others, not a difference of exponentials.
    wide = at * (1 - taken) - others * taken
    near = rounded(wide, kept.dtype)
    is_zero = (wide == 0) | (near == 0)
    off = jnp.where(is_zero, 0.0, (near - wide) / jnp.where(is_zero, 1.0, wide))
    how: dict[str, Any] = {"mode": "promise_in_bounds", "unique_indices": True, "indices_are_sorted": True}
    kept = kept.at[jnp.arange(labels.shape[0]), labels].set(near.astype(kept.dtype), **how)
    return kept, lost + off * others, 1 / (1 + off)
