"""Programs of the benchmark: sizes, arguments, and a step over a set of operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

# Small enough that values stay numbers over a few hundred steps in bfloat16.
RATE = 1e-3


@dataclass(frozen=True)
class Program:
    """`make(sizes)` gives the arguments, `build(ops, sizes)` the step that takes them."""

    name: str
    # As on a GPU, and small enough for a CPU.
    sizes: Mapping[str, int]
    tiny: Mapping[str, int]
    make: Callable[[SimpleNamespace], tuple[Any, ...]]
    build: Callable[[Any, SimpleNamespace], Callable[..., Any]]
    # The number that all forms must agree on, out of what the step gives.
    value: Callable[[Any], jax.Array]
    # Arguments that the step may overwrite, and the next arguments out of these and what the step gave.
    donated: tuple[int, ...] = ()
    following: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = lambda args, out: args

    def sized(self, *, tiny: bool = False, changes: Mapping[str, int] | None = None) -> SimpleNamespace:
        """The sizes as attributes, some of them changed; one that the program has not is ignored."""
        base = {**self.sizes, **(self.tiny if tiny else {})}
        return SimpleNamespace(**{name: (changes or {}).get(name, value) for name, value in base.items()})


class Draw:
    """Random weights, drawn on the device."""

    def __init__(self, seed: int, dtype: Any = jnp.bfloat16) -> None:
        self._key = jax.random.key(seed)
        self.dtype = dtype

    def _next(self) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return key

    def weight(self, *shape: int) -> jax.Array:
        """Normal values that keep the scale of what they are multiplied with."""
        made = jax.random.normal(self._next(), shape, jnp.float32) * shape[-2] ** -0.5
        return made.astype(self.dtype)

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        """Normal values of this scale."""
        return (jax.random.normal(self._next(), shape, jnp.float32) * scale).astype(self.dtype)

    def ones(self, *shape: int) -> jax.Array:
        """The weights of a norm."""
        return jnp.ones(shape, self.dtype)

    def zeros(self, *shape: int) -> jax.Array:
        """Biases."""
        return jnp.zeros(shape, self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> jax.Array:
        """Whole numbers of at least `low` and under `high`."""
        return jax.random.randint(self._next(), shape, low, high, jnp.int32)


def updated(params: Any, grads: Any) -> Any:
    """A step against the gradient, in the dtype of the weights."""
    return jax.tree_util.tree_map(lambda p, g: (p - RATE * g.astype(jnp.float32)).astype(p.dtype), params, grads)


def trained(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The training step of a loss: new weights and the loss."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return updated(params, grads), value

    return step


def rotated(x: jax.Array, places: jax.Array) -> jax.Array:
    """Rotary positions of (batch, length, heads, depth), with places of (batch or 1, length)."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = places[..., None].astype(jnp.float32) * rates
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
