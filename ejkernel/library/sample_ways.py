"""Thresholds of sampling: the least logit that top-k and top-p leave, by sorting, by bits, and from a few."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .order import largest_with, ordered
from .top_k_ways import by_parts

_Weigh = Callable[[jax.Array, jax.Array], jax.Array]


def weights_of(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Probabilities before they are divided by their sum, in float32."""
    wide = logits.astype(jnp.float32)
    largest = jnp.max(wide, axis=-1, keepdims=True)
    return jnp.exp((wide - largest) / temperature[:, None])


def by_sorting(logits: jax.Array, weights: jax.Array, k: int | None, top_p: jax.Array | None) -> jax.Array:
    """The least key that is kept, from a row in order."""
    keys = ordered(logits)
    order = jnp.argsort(keys, axis=-1, descending=True, stable=True)
    keys, weights = (jnp.take_along_axis(a, order, axis=-1) for a in (keys, weights))
    return _from_sorted(keys, weights, k, top_p, None)


def by_parts_of(logits: jax.Array, weights: jax.Array, k: int, top_p: jax.Array | None) -> jax.Array:
    """The least key that is kept, from the k largest alone: whatever top-p leaves is among them."""
    found = by_parts(logits, k, block=None, sorts=jax.default_backend() == "cpu")
    keys, near = (jnp.take_along_axis(a, found, axis=-1) for a in (ordered(logits), weights))
    total = None
    if top_p is not None:
        # Words as likely as the last of the k are kept as well, and count.
        total = jnp.sum(jnp.where(ordered(logits) >= keys[:, -1:], weights, 0), axis=-1)
    return _from_sorted(keys, near, k, top_p, total)


def _from_sorted(
    keys: jax.Array, weights: jax.Array, k: int | None, top_p: jax.Array | None, total: jax.Array | None
) -> jax.Array:
    least = keys[:, -1] if k is None else keys[:, k - 1]
    if top_p is None:
        return least
    weights = jnp.where(keys >= least[:, None], weights, 0)
    sums = jnp.cumsum(weights, axis=-1)
    wanted = top_p * (sums[:, -1] if total is None else total)
    # The first word at which the sum is enough; rounding may leave none.
    at = jnp.minimum(jnp.sum(sums < wanted[:, None], axis=-1), keys.shape[1] - 1)
    found = jnp.maximum(jnp.take_along_axis(keys, at[:, None], axis=-1)[:, 0], least)
    return jnp.where(top_p < 1, found, least)


def by_bits(logits: jax.Array, weights: jax.Array, k: int | None, top_p: jax.Array | None, bits: int) -> jax.Array:
    """The least key that is kept, digit by digit, from sums over the whole row."""
    keys = ordered(logits)
    least = jnp.full_like(keys[:, 0], jnp.iinfo(keys.dtype).min)
    if k is not None:

        def many(tried: jax.Array) -> jax.Array:
            ones = [jnp.sum(keys >= tried[:, at, None], axis=-1, dtype=jnp.int32) for at in range(tried.shape[1])]
            return jnp.stack(ones, axis=-1) >= k

        least = largest_with(many, keys, bits)
    if top_p is None:
        return least
    weights = jnp.where(keys >= least[:, None], weights, 0)
    wanted = top_p * jnp.sum(weights, axis=-1)

    def heavy(tried: jax.Array) -> jax.Array:
        sums = [jnp.sum(jnp.where(keys >= tried[:, at, None], weights, 0), axis=-1) for at in range(tried.shape[1])]
        return jnp.stack(sums, axis=-1) >= wanted[:, None]

    # The most likely word is always kept, also where no share is asked for.
    found = jnp.minimum(largest_with(heavy, keys, bits), jnp.max(keys, axis=-1))
    return jnp.where(top_p < 1, jnp.maximum(found, least), least)


def by_recomputing(
    logits: jax.Array, temperature: jax.Array, k: int | None, top_p: jax.Array | None, bits: int
) -> jax.Array:
    """The least key that is kept, digit by digit as by bits; keys and weights are computed again in each pass.

    A pass reads the logits alone, in place of keys and weights, which are twice as many bytes or three times as many.
    Rows are added up in parts, and the parts by the small program that finds the digit.
    """
    keys = ordered(logits)
    most, lowest = jnp.max(keys, axis=-1), jnp.full(logits.shape[:1], jnp.iinfo(keys.dtype).min, keys.dtype)
    largest = jnp.max(logits.astype(jnp.float32), axis=-1)
    # A product, since XLA writes quotients of 16 bits down and reads them again; finite for every temperature.
    slope = 1 / jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)
    whole = logits.reshape(logits.shape[0], _parts(logits.shape[1]), -1)

    def added(weigh: _Weigh, low: jax.Array, above: list[int]) -> list[jax.Array]:
        # Behind a barrier with what changes from pass to pass: else keys and weights are made once, and read again.
        here, start = jax.lax.optimization_barrier((whole, low))
        found = ordered(here)
        weights, tried = weigh(here, found), [start + _wrapped(far, start) for far in above]
        counted = [jnp.where(found >= one[:, None, None], weights, 0) for one in tried]
        parts = [jnp.sum(one, axis=-1, dtype=one.dtype) for one in counted]
        return [functools.reduce(operator.add, [part[:, at] for at in range(part.shape[1])]) for part in parts]

    def digit_by_digit(weigh: _Weigh, wanted: Callable[[jax.Array], Any]) -> jax.Array:
        low, left, enough = lowest, jnp.iinfo(keys.dtype).bits, None
        # One after the other, not in a loop, which has programs of its own for its counter and its digits.
        while left:
            digits, left = 1 << min(bits, left), left - min(bits, left)
            # The first pass adds up everything besides.
            sums = added(weigh, low, [digit << left for digit in range(int(enough is not None), digits)])
            enough = wanted(sums.pop(0)) if enough is None else enough
            reached = [(one >= enough).astype(low.dtype) for one in sums]
            low = low + functools.reduce(operator.add, reached) * _wrapped(1 << left, low)
        return low

    least = lowest if k is None else digit_by_digit(lambda x, found: jnp.int32(1), lambda everything: k)
    if top_p is None:
        return least

    def weigh(x: jax.Array, found: jax.Array) -> jax.Array:
        weights = jnp.exp((x.astype(jnp.float32) - largest[:, None, None]) * slope[:, None, None])
        return weights if k is None else jnp.where(found >= least[:, None, None], weights, 0)

    # The most likely word is always kept, also where no share is asked for.
    found = jnp.minimum(digit_by_digit(weigh, lambda everything: top_p * everything), most)
    return jnp.where(top_p < 1, jnp.maximum(found, least), least)


def _wrapped(number: int, like: jax.Array) -> jax.Array:
    """The number as one of the dtype that is equal to it but for what does not fit: sums from the least key on fit."""
    return jnp.asarray(np.asarray(number, np.int64).astype(like.dtype))


def _parts(words: int) -> int:
    """Parts of a row that are added up side by side: as many as divide it, none of them short."""
    return max(parts for parts in range(1, 33) if parts == 1 or (words % parts == 0 and words >= 1024 * parts))
