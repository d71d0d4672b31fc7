"""Softmax and the norms for a row that is held in registers, and for one that is read twice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .rows import Numbers, Recipe, Row

# Where a running maximum begins: below every finite number, and a difference to it is a number.
_LOWEST = float(jnp.finfo(jnp.float32).min)


def softmax() -> Recipe:
    """`exp(x - top) / norm`; the numbers are top and the norm's inverse."""

    # Exponentials are what it costs most, so that each is made once here.
    def held(row: Row, chunks: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Numbers]:
        top = jnp.maximum(row.largest(functools.reduce(jnp.maximum, chunks)), _LOWEST)
        powers = [jnp.exp(values - top) for values in chunks]
        (norm,) = row.sums(powers)
        share = 1.0 / norm
        return [one * share for one in powers], (top, share)

    def begin(size: int) -> Numbers:
        return jnp.full(size, _LOWEST, jnp.float32), jnp.zeros(size, jnp.float32)

    def end(row: Row, state: Numbers, seen: Any) -> Numbers:
        top = row.largest(state[0])
        return top, 1.0 / row.total(state[1] * jnp.exp(state[0] - top))

    def made(numbers: Numbers, values: jax.Array) -> jax.Array:
        return jnp.exp(values - numbers[0]) * numbers[1]

    return Recipe(held, begin, running_norm, end, made, lambda values: values)


def running_norm(state: Numbers, values: jax.Array, counted: jax.Array | None, seen: Any) -> Numbers:
    """Each thread's maxima and norms with one more chunk: one exponential for each element, of what is smaller."""
    top, norm = state
    if counted is not None:
        values = jnp.where(counted, values, -jnp.inf)
    less = jnp.where(values == top, 1.0, jnp.exp(-jnp.abs(top - values)))
    return jnp.maximum(top, values), jnp.where(values > top, norm * less + 1.0, norm + less)


def rms_norm(width: int, eps: float) -> Recipe:
    """`x * over * weight`; the number is what is multiplied with."""

    def held(row: Row, chunks: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Numbers]:
        (total,) = row.sums([values * values for values in chunks])
        over = jax.lax.rsqrt(total / width + eps)
        return [values * over for values in chunks], (over,)

    def step(state: Numbers, values: jax.Array, counted: jax.Array | None, seen: Any) -> Numbers:
        square = values * values
        return (state[0] + (square if counted is None else jnp.where(counted, square, 0.0)),)

    return Recipe(
        held,
        lambda size: (jnp.zeros(size, jnp.float32),),
        step,
        lambda row, state, seen: (jax.lax.rsqrt(row.total(state[0]) / width + eps),),
        lambda numbers, values: values * numbers[0],
        lambda normed, *weights: normed * weights[0] if weights else normed,
    )


def layer_norm(width: int, eps: float, finished: Callable[..., jax.Array]) -> Recipe:
    """`(x - mean) * over`, with weight and bias as `finished(normed, vectors)` has them; the numbers are these two."""

    def held(row: Row, chunks: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Numbers]:
        (total,) = row.sums(chunks)
        mean = total / width
        off = [values - mean for values in chunks]
        (square,) = row.sums([one * one for one in off])
        over = jax.lax.rsqrt(square / width + eps)
        return [one * over for one in off], (mean, over)

    # Each thread keeps the mean of what it has seen and the squared distances from it: no large mean hurts.
    def step(state: Numbers, values: jax.Array, counted: jax.Array | None, seen: Any) -> Numbers:
        mean, square = state
        off = values - mean
        moved = mean + off * (1.0 / (seen + 1.0))
        more = square + off * (values - moved)
        if counted is None:
            return moved, more
        return jnp.where(counted, moved, mean), jnp.where(counted, more, square)

    def end(row: Row, state: Numbers, seen: Any) -> Numbers:
        means, squares = state
        mean = row.total(means * seen) / width
        off = means - mean
        square = row.total(squares + off * off * seen)
        return mean, jax.lax.rsqrt(square / width + eps)

    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    return Recipe(
        held,
        lambda size: (zeros(size), zeros(size)),
        step,
        end,
        lambda numbers, values: (values - numbers[0]) * numbers[1],
        lambda normed, *vectors: finished(normed, vectors),
    )
