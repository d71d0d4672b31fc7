"""What tests of the library share: calls that are never tuned, and results in float64."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor

UNTUNED: Executor[Any, Any] = Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False)))

DTYPES = ("float32", "bfloat16", "float16")
# Largest error over the largest value: a few units in the last place, and sums in another order.
LIMITS = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    """Random values."""
    # Narrowed here: JAX compiles a program for each shape that it narrows.
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def wide(x: Any) -> np.ndarray:
    """The values in float64."""
    return np.asarray(x).astype(np.float64)


def assert_near(found: Any, expected: Any, dtype: str, slack: float = 1.0) -> None:
    """Equal as far as the dtype allows."""
    found, expected = wide(found), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    scale = max(float(np.max(np.abs(expected), initial=0.0)), 1e-30)
    off = float(np.max(np.abs(found - expected), initial=0.0)) / scale
    assert off <= slack * LIMITS[dtype], f"off by {off:.2g} of the largest value"


def pull(fn: Callable[..., Any], args: tuple[Any, ...], dy: Any) -> tuple[Any, ...]:
    """Gradients for a cotangent."""
    return jax.jit(lambda *a: jax.vjp(fn, *a)[1](dy))(*args)


def value_and_pull(fn: Callable[..., Any], args: tuple[Any, ...], dy: Any) -> tuple[Any, ...]:
    """The value and its gradients for a cotangent, as one program: one by one they are dozens."""

    def both(*given: Any) -> tuple[Any, ...]:
        out, back = jax.vjp(fn, *given)
        return out, *back(dy)

    return jax.jit(both)(*args)


def numeric_pull(fn: Callable[..., np.ndarray], args: tuple[Any, ...], dy: Any, at: int, step: float = 1e-6) -> Any:
    """The gradient of one argument by central differences, in float64."""
    given = [wide(a) for a in args]
    found = np.zeros_like(given[at])
    for place in np.ndindex(found.shape):
        moved = []
        for sign in (1, -1):
            other = [a.copy() for a in given]
            other[at][place] += sign * step
            moved.append(np.sum(fn(*other) * wide(dy)))
        found[place] = (moved[0] - moved[1]) / (2 * step)
    return found


def lowered_for_a_gpu(fn: Callable[..., Any], *shapes: Any) -> str:
    """The program as it would be handed to a GPU, Triton's part included, made without one."""
    kind = jax.sharding.AbstractDevice
    platform = {"platform": "gpu"} if "platform" in inspect.signature(kind).parameters else {}
    device = kind(device_kind="NVIDIA H200", num_cores=132, **platform)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        # JAX 0.12 still has it.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def selects(jaxpr: Any, size: int) -> int:
    """Selects of arrays of so many elements, in the program and in those that it calls."""
    found = 0
    for eqn in jaxpr.eqns:
        found += eqn.primitive.name == "select_n" and math.prod(eqn.outvars[0].aval.shape) == size
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
            inner = getattr(value, "jaxpr", value)
            found += selects(inner, size) if hasattr(inner, "eqns") else 0
    return found
