"""Arrays made inside shard_map that vary over the same mesh axes as the arguments they are made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..ops import _jax


def varying_like(made: jax.Array, *arrays: Any) -> jax.Array:
    """The array, varying as these together do: JAX asks that of what a loop carries."""
    axes = frozenset[str]().union(*(_jax.varying_axes(x) for x in arrays if x is not None))
    missing = axes - _jax.varying_axes(made)
    return jax.lax.pcast(made, tuple(sorted(missing)), to="varying") if missing else made


def all_alike(shape: tuple[int, ...], dtype: Any, arrays: Sequence[jax.Array]) -> tuple[Any, list[jax.Array]]:
    """What a Pallas call makes of these arrays, and they, all varying alike: JAX asks that of such calls."""
    same = [varying_like(x, *arrays) for x in arrays]
    varies = any(_jax.varying_axes(x) for x in same)
    about = {"manual_axis_type": jax.typeof(same[0]).manual_axis_type} if varies else {}
    return jax.ShapeDtypeStruct(shape, dtype, **about), same
