"""Cross entropy of a linear layer in chunks of tokens or of words, and its gradients, without all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .varying import varying_like


@dataclass(frozen=True)
class Terms:
    """What a token's loss is made of: a weight on the squared normaliser, and a share of the label for all words."""

    z_loss: float
    smoothing: float
    vocab_first: bool

    def losses(self, normaliser: jax.Array, label: jax.Array, total: Any, words: int) -> Any:
        """Losses of tokens from the logarithm of their sum of exponentials, the label's logit and all logits' sum."""
        target = (1 - self.smoothing) * label + (self.smoothing / words) * total
        return normaliser - target + self.z_loss * normaliser**2

    def slopes(self, logits: jax.Array, normaliser: jax.Array, is_label: jax.Array, words: int) -> jax.Array:
        """The derivatives of tokens' losses by these logits."""
        share = jnp.exp(logits - normaliser[:, None]) * (1 + 2 * self.z_loss * normaliser)[:, None]
        return share - jnp.where(is_label, 1 - self.smoothing, 0) - self.smoothing / words

    def logits(self, hidden: Any, weight: Any) -> jax.Array:
        """Logits in float32."""
        form = "td,vd->tv" if self.vocab_first else "td,dv->tv"
        return jnp.einsum(form, hidden, weight, preferred_element_type=jnp.float32)

    def of_hidden(self, slopes: Any, weight: Any) -> jax.Array:
        """The gradient of hidden states from that of logits."""
        form = "tv,vd->td" if self.vocab_first else "tv,dv->td"
        return _lifted(form, slopes, weight)

    def of_weight(self, slopes: Any, hidden: Any) -> jax.Array:
        """The gradient of the weight from that of logits."""
        form = "tv,td->vd" if self.vocab_first else "tv,td->dv"
        return _lifted(form, slopes, hidden)


# What a token's loss needs of its logits: their normaliser, the label's, whatever it is for a label out of range, and
# the sum of all where they share the label.
Sums = tuple[jax.Array, jax.Array, jax.Array | float]
Look = Callable[[jax.Array, jax.Array, Terms], Sums]


def _lifted(form: str, slopes: Any, other: Any) -> jax.Array:
    # Shares of a large vocabulary are too small for float16, so they are lifted above its smallest numbers.
    lift = 1024.0 if other.dtype == jnp.float16 else 1.0
    product = jnp.einsum(form, (slopes * lift).astype(other.dtype), other, preferred_element_type=jnp.float32)
    return product / lift


def looked_up(logits: jax.Array, labels: jax.Array, terms: Terms) -> Sums:
    normaliser = jax.nn.logsumexp(logits, axis=1)
    at_label = jnp.take_along_axis(logits, labels[:, None], axis=1, mode="clip")[:, 0]
    return normaliser, at_label, jnp.sum(logits, axis=1) if terms.smoothing else 0.0


def at_once(hidden: Any, weight: Any, labels: Any, *, terms: Terms) -> Any:
    """Losses of tokens from all logits, as anybody would write it."""
    logits = terms.logits(hidden, weight)
    return terms.losses(*looked_up(logits, labels, terms), logits.shape[1])


def by_tokens(
    hidden: Any,
    weight: Any,
    labels: Any,
    scales: Any,
    *,
    terms: Terms,
    chunk: int,
    gradients: bool,
    look: Look = looked_up,
) -> tuple[jax.Array, Any]:
    """Losses of tokens, and, if asked for, the gradients of their sum weighted by `scales`: each chunk's at once."""
    tokens, words = hidden.shape[0], weight.shape[0 if terms.vocab_first else 1]
    given = (hidden, weight, labels, scales)
    losses = varying_like(jnp.zeros(tokens, jnp.float32), *given)
    grads: Any = None
    if gradients:
        shapes = ((hidden.shape, hidden.dtype), (weight.shape, jnp.float32))
        grads = tuple(varying_like(jnp.zeros(*shape), *given) for shape in shapes)

    def step(state: Any, number: Any) -> tuple[Any, None]:
        losses, grads = state
        # The last chunk begins early enough to be whole; what it does again counts once.
        start = jnp.minimum(number * chunk, tokens - chunk)
        mine, label, scale = (jax.lax.dynamic_slice_in_dim(x, start, chunk) for x in (hidden, labels, scales))
        logits = terms.logits(mine, weight)
        normaliser, at_label, total = look(logits, label, terms)
        part = terms.losses(normaliser, at_label, total, words)
        losses = jax.lax.dynamic_update_slice_in_dim(losses, part, start, 0)
        if grads is not None:
            slopes = terms.slopes(logits, normaliser, jnp.arange(words)[None, :] == label[:, None], words)
            d_hidden = (terms.of_hidden(slopes, weight) * scale[:, None]).astype(hidden.dtype)
            d_hidden = jax.lax.dynamic_update_slice_in_dim(grads[0], d_hidden, start, 0)
            once = jnp.where(start + jnp.arange(chunk) >= number * chunk, scale, 0)[:, None]
            grads = (d_hidden, grads[1] + terms.of_weight(slopes, (mine * once).astype(hidden.dtype)))
        return (losses, grads), None

    # One chunk needs no loop.
    count = -(-tokens // chunk)
    state = (losses, grads)
    (losses, grads), _ = step(state, 0) if count == 1 else jax.lax.scan(step, state, jnp.arange(count))
    return losses, None if grads is None else (grads[0], grads[1].astype(weight.dtype))


def by_words(hidden: Any, weight: Any, labels: Any, *, terms: Terms, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Losses and normalisers of tokens, from a running sum of exponentials over chunks of words."""
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
    (top, norm, at_label, total), _ = jax.lax.scan(step, state, jnp.arange(-(-words // chunk)))
    normaliser = top + jnp.log(norm)
    return terms.losses(normaliser, at_label, total, words), normaliser


def gradients_by_words(
    hidden: Any, weight: Any, labels: Any, scales: Any, normaliser: Any, *, terms: Terms, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """The gradients of the losses weighted by `scales`: logits are computed again, some words at a time."""
    axis = 0 if terms.vocab_first else 1
    words = weight.shape[axis]
    scaled = (hidden * scales[:, None]).astype(hidden.dtype)
    given = (hidden, weight, labels, scales, normaliser)
    zeros = [varying_like(jnp.zeros(x.shape, t), *given) for x, t in ((hidden, jnp.float32), (weight, weight.dtype))]

    def step(state: Any, number: jax.Array) -> tuple[Any, None]:
        word, fresh, part = _chunk_of_words(weight, axis, number, chunk)
        is_label = word[None, :] == labels[:, None]
        slopes = terms.slopes(terms.logits(hidden, part), normaliser, is_label, words)
        d_weight = terms.of_weight(slopes, scaled).astype(weight.dtype)
        d_weight = jax.lax.dynamic_update_slice_in_dim(state[1], d_weight, word[0], axis)
        return (state[0] + terms.of_hidden(jnp.where(fresh, slopes, 0), part), d_weight), None

    (d_hidden, d_weight), _ = jax.lax.scan(step, tuple(zeros), jnp.arange(-(-words // chunk)))
    return (d_hidden * scales[:, None]).astype(hidden.dtype), d_weight


def _chunk_of_words(weight: Any, axis: int, number: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Numbers of a chunk's words, which of them are new, and their part of the weight."""
    # The last chunk begins early enough to be whole, so some of its words were there before.
    start = jnp.minimum(number * chunk, weight.shape[axis] - chunk)
    word = start + jnp.arange(chunk)
    return word, (word >= number * chunk)[None, :], jax.lax.dynamic_slice_in_dim(weight, start, chunk, axis)
