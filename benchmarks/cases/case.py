"""One call of a library operation, as the benchmarks measure it beside what JAX alone gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Executor, Kernel


@dataclass(frozen=True)
class Case:
    """`make(rng)` gives the arguments, which the kernel, `plain` and every ready-made function take alike.

    A function of several kernels may stand in place of the kernel; it takes `executor=` besides.
    """

    op: str
    name: str
    platform: str
    make: Callable[[np.random.Generator], tuple[tuple[Any, ...], dict[str, Any]]]
    kernel: type[Kernel[Any, Any]] | Callable[..., Any]
    plain: Callable[..., Any]
    # Of what is measured: forward, or forward and backward.
    flops: float
    bytes: float
    backward: bool = False
    ready: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def is_kernel(self) -> bool:
        """Is it one kernel, with one cfg?"""
        return isinstance(self.kernel, type)

    def ours(self, executor: Executor[Any, Any]) -> Callable[..., Any]:
        """The library's computation through an executor."""
        if self.is_kernel:
            return functools.partial(executor, self.kernel())
        return functools.partial(self.kernel, executor=executor)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    """Random values; large arrays are drawn on the device."""
    key = jax.random.key(int(rng.integers(1 << 31)))
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)
