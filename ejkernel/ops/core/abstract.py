"""A call without its values: shapes, dtypes and shardings."""

from __future__ import annotations

from typing import Any

import jax

from .stable import is_array, jax_dtype, short_hash, stable_json


def abstractify(tree: Any) -> Any:
    """A copy of a tree with a `jax.ShapeDtypeStruct` for each array; everything else stays."""
    return jax.tree_util.tree_map(lambda leaf: _abstract(leaf) if is_array(leaf) else leaf, tree)


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    sharding: Any = None
    if isinstance(leaf, jax.core.Tracer):
        # A tracer's sharding is part of the key where its mesh has axes: those of a shard_map, or explicit ones.
        sharding = jax.typeof(leaf).sharding
        sharding = None if sharding.mesh.empty else sharding
    # The sharding of an uncommitted array says only which device it happens to lie on.
    elif isinstance(leaf, jax.Array) and not leaf.is_deleted():
        sharding = leaf.sharding if leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, jax_dtype(leaf.dtype), sharding=sharding)


def sharding_fingerprint(value: Any) -> str:
    """A short name for the layout of an array, or of a sharding: mesh axes and spec, never device numbers."""
    sharding = value if isinstance(value, jax.sharding.Sharding) else getattr(value, "sharding", None)
    if sharding is None or isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return "unsharded"
    return short_hash(stable_json(sharding))
