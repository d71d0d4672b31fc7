"""Cross entropy of a linear layer in chunks of tokens or of words, and its gradients, without all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .linear_cross_entropy_terms import Slopes, Stack, Sums, Terms, narrowed, sloped, summed
from .varying import varying_like


class Passes(NamedTuple):
    """The two passes over a chunk's logits: `summed` and `sloped`, or what computes the same."""

    sums: Callable[[jax.Array, jax.Array, Terms, int], Sums] = summed
    slope: Callable[..., Slopes] = sloped


_BY_XLA = Passes()


def at_once(hidden: Any, weight: Any, labels: Any, *, terms: Terms) -> Any:
    """Losses of tokens from all logits at once: the obvious way."""
    logits = terms.logits(hidden, weight)
    return terms.losses(summed(logits, labels, terms), logits.shape[1])


def by_tokens(
    hidden: Any,
    weight: Any,
    labels: Any,
    scales: Any,
    *,
    terms: Terms,
    chunk: int,
    gradients: bool,
    passes: Passes = _BY_XLA,
    padded: int | None = None,
    stacked: bool = False,
) -> tuple[jax.Array, Any]:
    """Losses of tokens, and, if asked for, the gradients of their sum weighted by `scales`: each chunk's at once.

    Gradients are float32, whatever the inputs are: a sum over tokens may be too large for them until it is divided.
    Words are `padded` to a multiple: products of odd sizes are slow. `stacked`: the derivatives of all tokens' logits
    are kept, in bfloat16, so that each gradient is one product and the weight's is not added up chunk by chunk.
    """
    tokens, words = hidden.shape[0], weight.shape[0 if terms.vocab_first else 1]
    given = (hidden, weight, labels, scales)
    losses = varying_like(jnp.zeros(tokens, jnp.float32), *given)
    common = terms.common(weight) if gradients else None
    weight = terms.padded(weight, padded)
    columns = weight.shape[0 if terms.vocab_first else 1]
    stacked = stacked and hidden.dtype == jnp.bfloat16
    grads: Any = None
    if gradients and stacked:
        # Every part is written before it is read.
        stack = jax.lax.empty((tokens, columns), hidden.dtype)
        grads = tuple(varying_like(x, *given) for x in (stack, jnp.zeros(tokens, jnp.float32)))
    elif gradients:
        grads = tuple(varying_like(jnp.zeros(x.shape, jnp.float32), *given) for x in (hidden, weight))
    # Divided away after the last chunk: inside the loop that would cost a pass over the weight's gradient.
    lift = terms.lift(scales, hidden.dtype)

    def step(state: Any, number: Any) -> tuple[Any, None]:
        losses, grads = state
        # The last chunk begins early enough to be whole; what it does again counts once.
        start = jnp.minimum(number * chunk, tokens - chunk)
        mine, label, scale = (jax.lax.dynamic_slice_in_dim(x, start, chunk) for x in (hidden, labels, scales))
        logits = terms.logits(mine, weight)
        sums = passes.sums(logits, label, terms, words)
        losses = jax.lax.dynamic_update_slice_in_dim(losses, terms.losses(sums, words), start, 0)
        if grads is not None and stacked:
            into = Stack(grads[0], start)
            made = passes.slope(logits, label, sums, scale * lift, hidden.dtype, terms, words, into)
            lost: Any = made.lost
            grads = (made.values, jax.lax.dynamic_update_slice_in_dim(grads[1], lost, start, 0))
        elif grads is not None:
            slopes = passes.slope(logits, label, sums, scale * lift, hidden.dtype, terms, words)
            d_hidden = terms.of_hidden(slopes, weight, common)
            d_hidden = jax.lax.dynamic_update_slice_in_dim(grads[0], d_hidden, start, 0)
            once = jnp.where((start + jnp.arange(chunk) >= number * chunk)[:, None], mine, 0)
            grads = (d_hidden, grads[1] + terms.of_weight(slopes, once))
        return (losses, grads), None

    # One chunk needs no loop.
    count = -(-tokens // chunk)
    state = (losses, grads)
    (losses, grads), _ = step(state, 0) if count == 1 else jax.lax.scan(step, state, jnp.arange(count))
    if grads is None:
        return losses, None
    if stacked:
        slopes = Slopes(*grads)
        grads = (terms.of_hidden(slopes, weight, common), terms.of_weight(slopes, hidden))
    return losses, tuple(grad / lift for grad in (grads[0], terms.of_words(grads[1], words)))


def by_words(hidden: Any, weight: Any, labels: Any, *, terms: Terms, chunk: int) -> tuple[jax.Array, Sums]:
    """Losses of tokens and what they are made of, from a running sum of exponentials over chunks of words."""
    axis = 0 if terms.vocab_first else 1
    words = weight.shape[axis]
    zeros = varying_like(jnp.zeros(hidden.shape[0], jnp.float32), hidden, weight, labels)

    def step(state: Any, number: jax.Array) -> tuple[Any, None]:
        top, norm, at_label, total = state
        word, fresh, part = _chunk_of_words(weight, axis, number, chunk)
        logits = terms.logits(hidden, part)
        is_label = fresh & (word[None, :] == labels[:, None])
        seen = jnp.where(fresh, logits, -jnp.inf)
        new = jnp.maximum(top, jnp.max(seen, axis=1))
        norm = norm * jnp.exp(top - new) + jnp.sum(jnp.exp(seen - new[:, None]), axis=1)
        at_label = at_label + jnp.sum(jnp.where(is_label, logits, 0), axis=1)
        total = total + jnp.sum(jnp.where(fresh, logits, 0), axis=1) if terms.smoothing else total
        return (new, norm, at_label, total), None

    state = (zeros - jnp.inf, zeros, zeros, zeros)
    made, _ = jax.lax.scan(step, state, jnp.arange(-(-words // chunk)))
    sums = Sums(*made)
    return terms.losses(sums, words), sums


def gradients_by_words(
    hidden: Any, weight: Any, labels: Any, scales: Any, factor: Any, sums: Sums, *, terms: Terms, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """The gradients of the losses weighted by `scales`, times a factor: logits are computed again, by some words."""
    axis = 0 if terms.vocab_first else 1
    words, shares = weight.shape[axis], terms.shares(sums)
    lift = terms.lift(scales, hidden.dtype)
    given = (hidden, weight, labels, scales, factor, *sums)
    zeros = [varying_like(jnp.zeros(x.shape, t), *given) for x, t in ((hidden, jnp.float32), (weight, weight.dtype))]

    def step(state: Any, number: jax.Array) -> tuple[Any, None]:
        word, fresh, part = _chunk_of_words(weight, axis, number, chunk)
        is_label = word[None, :] == labels[:, None]
        wide = terms.slopes(terms.logits(hidden, part), sums.top[:, None], shares[:, None], is_label, words)
        slopes = narrowed(wide, sums, scales * lift, hidden.dtype, terms)
        d_weight = (terms.of_weight(slopes, hidden) * (factor / lift)).astype(weight.dtype)
        d_weight = jax.lax.dynamic_update_slice_in_dim(state[1], d_weight, word[0], axis)
        slopes = narrowed(jnp.where(fresh, wide, 0), sums, scales * lift, hidden.dtype, terms)
        return (state[0] + terms.of_hidden(slopes, part, terms.common(part)), d_weight), None

    (d_hidden, d_weight), _ = jax.lax.scan(step, tuple(zeros), jnp.arange(-(-words // chunk)))
    return d_hidden * (factor / lift), d_weight


def _chunk_of_words(weight: Any, axis: int, number: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Numbers of a chunk's words, which of them are new, and their part of the weight."""
    # The last chunk begins early enough to be whole, so some of its words were there before.
    start = jnp.minimum(number * chunk, weight.shape[axis] - chunk)
    word = start + jnp.arange(chunk)
    return word, (word >= number * chunk)[None, :], jax.lax.dynamic_slice_in_dim(weight, start, chunk, axis)
