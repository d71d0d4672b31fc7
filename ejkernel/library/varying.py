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


def all_alike(
    made: Sequence[jax.ShapeDtypeStruct], arrays: Sequence[jax.Array]
) -> tuple[list[jax.ShapeDtypeStruct], list[jax.Array]]:
    """Outputs of a Pallas call, and the arrays it takes, all varying alike: JAX asks that of such calls.

    Where nothing varies, that has to be said too.
    """
    same = [varying_like(x, *arrays) for x in arrays]
    varies = jax.typeof(same[0]).manual_axis_type
    return [jax.ShapeDtypeStruct(one.shape, one.dtype, manual_axis_type=varies) for one in made], same
