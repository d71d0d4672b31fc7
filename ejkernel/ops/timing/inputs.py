"""What a tuning runs on: real random values of the right shapes, made outside any trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .. import _jax
from ..core.stable import is_array, jax_dtype

# One byte or less is data (quantised values), any value of it harmless; wider integers are mostly indices, lengths
# and labels, where 0 and 1 are the values that no kernel reads out of bounds with.
_WIDEST_DATA_INT = 1


@dataclass(frozen=True)
class FlatCall:
    """A call taken apart: its arrays, and how to put arrays like them back among its constants."""

    leaves: tuple[Any, ...]
    rebuild: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]


def flatten_call(args: Any, kwargs: Any) -> FlatCall:
    """Array leaves in order; everything else stays in place as a constant."""
    flat, tree = jax.tree_util.tree_flatten((tuple(args), dict(kwargs)))
    places = [i for i, leaf in enumerate(flat) if is_array(leaf)]
    constants = [None if is_array(leaf) else leaf for leaf in flat]

    def rebuild(leaves: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole = list(constants)
        for place, leaf in zip(places, leaves, strict=True):
            whole[place] = leaf
        return jax.tree_util.tree_unflatten(tree, whole)  # type: ignore[no-any-return]

    return FlatCall(tuple(flat[i] for i in places), rebuild)


def is_concrete(leaf: Any) -> bool:
    """Does this array have values that can be read now?"""
    if isinstance(leaf, (jax.ShapeDtypeStruct, jax.core.Tracer)):
        return False
    return not (isinstance(leaf, jax.Array) and leaf.is_deleted())


def is_float(leaf: Any) -> bool:
    """Can this array carry a gradient?"""
    return bool(jax.numpy.issubdtype(leaf.dtype, np.inexact))


def concrete(leaves: Any, rng: np.random.Generator, *, fresh_floats: bool = False) -> tuple[Any, ...]:
    """Arrays to run on: the given ones where they have values, else random ones; call this in a clean room."""
    return tuple(
        leaf if is_concrete(leaf) and not (fresh_floats and is_float(leaf)) else random_like(leaf, rng)
        for leaf in leaves
    )


def random_like(leaf: Any, rng: np.random.Generator) -> Any:
    """Random values of this array's shape, dtype and, where it has devices, sharding."""
    dtype = jax_dtype(leaf.dtype)
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        seeds = rng.integers(0, 2**31, size=int(np.prod(leaf.shape, dtype=np.int64)))
        impl = _jax.key_implementation(dtype)
        made = jax.vmap(lambda seed: jax.random.key(seed, impl=impl))(jax.numpy.asarray(seeds, dtype=np.uint32))
        return made.reshape(leaf.shape)
    values = _values(leaf.shape, dtype, rng)
    sharding = getattr(leaf, "sharding", None) if not isinstance(leaf, (np.ndarray, np.generic)) else None
    # An abstract mesh, such as a tracer's sharding has, is nothing that an array can be put on.
    abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
    if not isinstance(leaf, jax.core.Tracer) and isinstance(sharding, jax.sharding.Sharding) and not abstract:
        return jax.device_put(values, sharding) if _committed(leaf) else jax.device_put(values)
    return jax.device_put(values)


def _committed(leaf: Any) -> bool:
    return bool(leaf.committed) if isinstance(leaf, jax.Array) and not leaf.is_deleted() else True


# A prime: rows of an array never begin at the same place of the block.
_BLOCK = 1_048_573


def _values(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Random values; a large array repeats a block of them, since drawing every one would take longer than tuning."""
    count = math.prod(shape)
    if count <= _BLOCK:
        return _drawn(shape, np.dtype(dtype), rng)
    return np.resize(_drawn((_BLOCK,), np.dtype(dtype), rng), shape)


def _drawn(shape: tuple[int, ...], kind: np.dtype[Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if jax.numpy.issubdtype(kind, np.complexfloating):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(kind)
    if jax.numpy.issubdtype(kind, np.floating):
        normal = rng.standard_normal(shape, dtype=np.float32)
        made = normal.astype(kind)
        # Some narrow types have no sign.
        return made if np.isfinite(made.astype(np.float32)).all() else np.abs(normal).astype(kind)
    if kind == np.bool_:
        return rng.integers(0, 2, shape).astype(kind)
    if kind.itemsize <= _WIDEST_DATA_INT:
        bounds = jax.numpy.iinfo(kind)
        return rng.integers(int(bounds.min), int(bounds.max) + 1, shape).astype(kind)
    return rng.integers(0, 2, shape).astype(kind)
