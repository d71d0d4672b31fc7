"""Sums over the last axis, by ways that a processor takes differently."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .arguments import ArgumentError

Reduce = Callable[..., jax.Array]


def along(x: jax.Array, reduce: Reduce, lanes: int | None = None) -> jax.Array:
    """`reduce` over the last axis, which stays with size one; so many lanes are reduced side by side first."""
    if lanes is None:
        return reduce(x, axis=-1, keepdims=True)
    refused = refuses_lanes(x.shape[-1], lanes)
    if refused:
        raise ArgumentError(refused)
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // lanes, lanes)
    return reduce(reduce(parts, axis=-2), axis=-1, keepdims=True)


def mean(x: jax.Array, lanes: int | None = None) -> jax.Array:
    """The mean over the last axis."""
    return along(x, jnp.sum, lanes) / x.shape[-1]


def refuses_lanes(width: int, lanes: int | None) -> str:
    """The reason that rows of this width have no such lanes; empty where they have."""
    if not lanes or lanes < 2:
        return "lanes must be given, at least 2"
    return "" if width % lanes == 0 and width > lanes else f"{lanes} lanes do not divide rows of {width}"
