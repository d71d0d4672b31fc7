"""Inputs of a tuning: real random values of the right shapes, made outside any trace."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
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
    # The leaves that are no arrays.
    constants: tuple[Any, ...] = ()


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

    others = tuple(leaf for leaf in flat if not is_array(leaf))
    return FlatCall(tuple(flat[i] for i in places), rebuild, others)


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
    wanted = [i for i, leaf in enumerate(leaves) if not is_concrete(leaf) or (fresh_floats and is_float(leaf))]
    drawn = dict(zip(wanted, draw([leaves[i] for i in wanted], int(rng.integers(2**31))), strict=True))
    return tuple(drawn.get(i, leaf) for i, leaf in enumerate(leaves))


def shapes_of_drawn(leaves: Any, *, fresh_floats: bool = False) -> tuple[Any, ...]:
    """The arrays to run on in another process: the given ones where they have values, else shapes to draw there."""
    return tuple(
        jax.ShapeDtypeStruct(leaf.shape, jax_dtype(leaf.dtype))
        if not is_concrete(leaf) or (fresh_floats and is_float(leaf))
        else leaf
        for leaf in leaves
    )


def random_like(leaf: Any, rng: np.random.Generator) -> Any:
    """Random values of this array's shape, dtype and, where it has devices, sharding."""
    return draw([leaf], int(rng.integers(2**31)))[0]


def draw(leaves: Sequence[Any], seed: int) -> tuple[Any, ...]:
    """Random arrays like these on the default device; equal shapes, dtypes and seeds give equal values.

    An accelerator makes them itself, out of one block of numbers: copying large arrays there, or drawing every number
    of them, would take longer than tuning does.
    """
    rng = np.random.default_rng(seed)
    specs = [(tuple(leaf.shape), jax_dtype(leaf.dtype)) for leaf in leaves]
    keys = [i for i, (_, dtype) in enumerate(specs) if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)]
    made: dict[int, Any] = {i: _keys(*specs[i], rng) for i in keys}
    plain = [i for i in range(len(specs)) if i not in made]
    if _jax.default_platform() == "cpu":
        made |= {i: jax.device_put(_values(*specs[i], rng)) for i in plain}
    elif plain:
        starts = rng.integers(0, _BLOCK, len(plain), dtype=np.int32)
        block = rng.standard_normal(_BLOCK, dtype=np.float32)
        made |= dict(zip(plain, _spread(tuple(specs[i] for i in plain), block, starts), strict=True))
    return tuple(_placed(made[i], leaf) for i, leaf in enumerate(leaves))


def _keys(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Any:
    seeds = rng.integers(0, 2**31, size=math.prod(shape))
    impl = _jax.key_implementation(dtype)
    made = jax.vmap(lambda seed: jax.random.key(seed, impl=impl))(jax.numpy.asarray(seeds, dtype=np.uint32))
    return made.reshape(shape)


def _placed(values: Any, leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None) if not isinstance(leaf, (np.ndarray, np.generic)) else None
    # An abstract mesh, such as a tracer's sharding has, is nothing that an array can be put on.
    abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
    if not isinstance(leaf, jax.core.Tracer) and isinstance(sharding, jax.sharding.Sharding) and not abstract:
        return jax.device_put(values, sharding) if _committed(leaf) else values
    return values


def _committed(leaf: Any) -> bool:
    return bool(leaf.committed) if isinstance(leaf, jax.Array) and not leaf.is_deleted() else True


def compile_draw(shapes: Sequence[Any]) -> None:
    """Compiles the program that draws such arrays; on a CPU there is none."""
    specs = tuple((tuple(leaf.shape), jax_dtype(leaf.dtype)) for leaf in shapes)
    plain = tuple(spec for spec in specs if not jax.numpy.issubdtype(spec[1], jax.dtypes.prng_key))
    if plain and _jax.default_platform() != "cpu":
        block, starts = jax.ShapeDtypeStruct((_BLOCK,), np.float32), jax.ShapeDtypeStruct((len(plain),), np.int32)
        # JAX keeps it, and finds it when the function is called.
        _spread.lower(plain, block, starts).compile()


# A prime: rows of an array never begin at the same place of the block.
_BLOCK = 1_048_573


@functools.partial(jax.jit, static_argnums=0)
def _spread(specs: tuple[tuple[tuple[int, ...], Any], ...], block: Any, starts: Any) -> tuple[Any, ...]:
    """Arrays of these shapes and dtypes, each filled with the block from its own start on, again and again."""
    twice = jax.numpy.concatenate([block, block])
    return tuple(
        _as_dtype(_filled(jax.lax.dynamic_slice(twice, (starts[i],), (_BLOCK,)), math.prod(shape)), dtype).reshape(
            shape
        )
        for i, (shape, dtype) in enumerate(specs)
    )


def _filled(block: Any, count: int) -> Any:
    return jax.numpy.tile(block, -(-count // _BLOCK))[:count]


def _as_dtype(normal: Any, dtype: Any) -> Any:
    """Normal values as data of a dtype: integers of a byte take any value, wider ones 0 and 1."""
    if jax.numpy.issubdtype(dtype, np.complexfloating):
        return jax.lax.complex(normal, jax.numpy.roll(normal, 1)).astype(dtype)
    if jax.numpy.issubdtype(dtype, np.floating):
        # Some narrow types have no sign.
        return (normal if float(jax.numpy.finfo(dtype).min) < 0 else jax.numpy.abs(normal)).astype(dtype)
    if dtype != np.bool_ and np.dtype(dtype).itemsize <= _WIDEST_DATA_INT:
        bounds = jax.numpy.iinfo(dtype)
        bits = jax.lax.bitcast_convert_type(normal, np.uint32)
        return (bits % (int(bounds.max) - int(bounds.min) + 1)).astype(np.int32).astype(dtype) + dtype.type(bounds.min)
    return (normal > 0).astype(dtype)


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
