"""The terms of a token's loss and its derivatives by logits, as products of narrow numbers take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .narrow import lifting, rounded

# So many words tell what all of them share.
_SAMPLE = 256


class Sums(NamedTuple):
    """Numbers of the logits: maximum, the sum of exponentials once that is taken off, the label's logit, the sum.

    Maximum and sum of exponentials are kept apart: the logarithm of both is too coarse for gradients of large logits.
    The label's logit may be any for a label out of range; the sum is there where all words share the label.
    """

    top: jax.Array
    norm: jax.Array
    label: jax.Array
    total: jax.Array | float

    @property
    def normaliser(self) -> jax.Array:
        """The logarithm of the sum of exponentials."""
        return self.top + jnp.log(self.norm)


class Slopes(NamedTuple):
    """Derivatives as a product takes them: times a power of two, with what rounding took from each token's sum."""

    values: jax.Array
    lost: jax.Array | None = None
    lift: jax.Array | float = 1.0


class Stack(NamedTuple):
    """An array of all tokens' derivatives, and the first token of those that are computed."""

    array: jax.Array
    start: jax.Array

    def written(self, values: jax.Array) -> jax.Array:
        """The array with these derivatives."""
        return jax.lax.dynamic_update_slice_in_dim(self.array, values, self.start, 0)


@dataclass(frozen=True)
class Terms:
    """A weight on the squared normaliser, a share of the label for all words, and which way the weight lies."""

    z_loss: float
    smoothing: float
    vocab_first: bool

    def losses(self, sums: Sums, words: int) -> Any:
        """Losses of tokens."""
        target = (1 - self.smoothing) * sums.label + (self.smoothing / words) * sums.total
        return (sums.top - target) + jnp.log(sums.norm) + self.z_loss * sums.normaliser**2

    def shares(self, sums: Sums) -> jax.Array:
        """The factors that make derivatives of a token's exponentials."""
        return self.steepness(sums) / sums.norm

    def slopes(self, logits: jax.Array, top: Any, share: Any, is_label: jax.Array, words: int) -> jax.Array:
        """The derivatives of losses by these logits."""
        made: jax.Array = jnp.exp(logits - top) * share
        return made - jnp.where(is_label, 1 - self.smoothing, 0.0) - self.smoothing / words

    def steepness(self, sums: Sums) -> jax.Array:
        """The derivatives of losses by their normalisers."""
        return 1 + 2 * self.z_loss * sums.normaliser

    def lift(self, scales: jax.Array, dtype: Any) -> jax.Array | float:
        """The power of two that derivatives times these scales are multiplied with, the same for all tokens."""
        # Shares of a large vocabulary are too small for float16, so they are lifted above its smallest numbers. A
        # derivative is at most 1 by its label, and as much once more by its share.
        return lifting(2 * jnp.max(jnp.abs(scales))) if dtype == jnp.float16 else 1.0

    def lowering(self, sums: Sums, dtype: Any) -> jax.Array | float:
        """The power of two that they are multiplied with besides: a price on the normaliser may make them larger."""
        if dtype != jnp.float16 or not self.z_loss:
            return 1.0
        steepest = jnp.max(jnp.abs(self.steepness(sums)))
        return jnp.minimum(lifting(steepest) / lifting(jnp.float32(1)), 1.0)

    def logits(self, hidden: Any, weight: Any) -> jax.Array:
        """Logits in float32."""
        form = "td,vd->tv" if self.vocab_first else "td,dv->tv"
        return jnp.einsum(form, hidden, weight, preferred_element_type=jnp.float32)

    def of_hidden(self, slopes: Slopes, weight: Any, common: Any) -> jax.Array:
        """The gradient of hidden states from that of logits; `common` is what the words of this weight share."""
        form = "tv,vd->td" if self.vocab_first else "tv,dv->td"
        made = jnp.einsum(form, slopes.values, weight, preferred_element_type=jnp.float32)
        # A token's slopes add up to nothing, so what all words share cancels. Rounded slopes leave some of it, which
        # may be more than all the rest; it is put right here.
        return (made if slopes.lost is None else made + slopes.lost[:, None] * common[None, :]) / slopes.lift

    def of_weight(self, slopes: Slopes, hidden: Any, dtype: Any = jnp.float32) -> jax.Array:
        """The gradient of the weight from that of logits, added up in float32 whatever its dtype is."""
        form = "tv,td->vd" if self.vocab_first else "tv,td->dv"
        return jnp.einsum(form, slopes.values, hidden, preferred_element_type=dtype) / slopes.lift

    def padded(self, weight: Any, multiple: int | None) -> Any:
        """The weight with zeros for as many words more as make their number a multiple of this one."""
        axis = 0 if self.vocab_first else 1
        missing = -weight.shape[axis] % (multiple or 1)
        sides = [(0, 0), (0, 0)]
        sides[axis] = (0, missing)
        return jnp.pad(weight, sides) if missing else weight

    def of_words(self, weight: Any, words: int) -> Any:
        """The part of a padded weight, or of its gradient, that so many words have."""
        return jax.lax.slice_in_dim(weight, 0, words, axis=0 if self.vocab_first else 1)

    def common(self, weight: Any) -> jax.Array | None:
        """A mean of words' weights for rounding, of some alone since reading all takes time; None in float32."""
        if weight.dtype == jnp.float32:
            return None
        return jnp.mean(self.sampled(weight), axis=0 if self.vocab_first else 1, dtype=jnp.float32)

    def sampled(self, weight: Any) -> jax.Array:
        """The part of the weight that some words have, from all over it."""
        axis = 0 if self.vocab_first else 1
        words = weight.shape[axis]
        return jax.lax.slice_in_dim(weight, 0, words, -(-words // _SAMPLE), axis)


def summed(logits: jax.Array, labels: jax.Array, terms: Terms, words: int | None = None) -> Sums:
    """The sums as JAX computes them; columns beyond so many words are none."""
    is_word = _is_word(logits, words)
    total = 0.0 if not terms.smoothing else jnp.sum(_where(is_word, logits, 0), axis=1)
    logits = _where(is_word, logits, -jnp.inf)
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=1))
    top = jnp.where(jnp.isfinite(highest), highest, 0)
    norm = jnp.sum(jnp.exp(logits - top[:, None]), axis=1)
    labels = labels if is_word is None else jnp.minimum(labels, jnp.sum(is_word) - 1)
    at_label = jnp.take_along_axis(logits, labels[:, None], axis=1, mode="clip")[:, 0]
    return Sums(top, norm, at_label, total)


def sloped(
    logits: jax.Array,
    labels: jax.Array,
    sums: Sums,
    scales: Any,
    dtype: Any,
    terms: Terms,
    words: int | None = None,
    into: Stack | None = None,
) -> Slopes:
    """Derivatives of all words' logits times their tokens' scales, as factors of products in this dtype.

    With a stack they are written there, and the array that they are a part of is returned.
    """
    is_label = jnp.arange(logits.shape[1])[None, :] == labels[:, None]
    share = terms.shares(sums)[:, None]
    wide = terms.slopes(logits, sums.top[:, None], share, is_label, words or logits.shape[1])
    made = narrowed(_where(_is_word(logits, words), wide, 0), sums, scales, dtype, terms)
    return made if into is None else made._replace(values=into.written(made.values))


def _is_word(logits: jax.Array, words: int | None) -> jax.Array | None:
    columns = logits.shape[1]
    return None if words in (None, columns) else jnp.arange(columns)[None, :] < words


def _where(mask: jax.Array | None, values: jax.Array, other: float) -> jax.Array:
    return values if mask is None else jnp.where(mask, values, other)


def narrowed(slopes: jax.Array, sums: Sums, scales: Any, dtype: Any, terms: Terms) -> Slopes:
    """The derivatives times their tokens' scales, as factors of products in this dtype."""
    if dtype == jnp.float32:
        return Slopes(slopes * scales[:, None])
    lift = terms.lowering(sums, dtype)
    wide = slopes * (scales * lift)[:, None]
    near = rounded(wide, dtype)
    return Slopes(near.astype(dtype), jnp.sum(wide - near, axis=1), lift)
