"""Calls for which guesses were measured: on Hopper GPUs, by JAX 0.11 or later, on one device.

XLA cannot divide a kernel of ours among devices: where it shards arrays by itself, it would gather them, and each
device would compute everything. Inside `shard_map` each device has its own part; where a call is given a mesh and
specs, its sizes are those of all parts.
"""

from __future__ import annotations

from typing import Any

import jax

from ...ops import Invocation
from ...ops.core.device import device_of
from . import served
from .tiles import PROCESSORS


def is_measured(inv: Invocation[Any, Any], *sizes: int) -> bool:
    """Does a call with arrays of so many elements run where Mosaic kernels were measured?"""
    if jax.__version_info__ < (0, 11) or inv.method is not None or served.refuses(inv, *sizes, hopper=True):
        return False
    return not any(map(_may_be_divided, jax.tree_util.tree_leaves((inv.args, inv.kwargs))))


def runs_at_once(inv: Invocation[Any, Any]) -> bool:
    """Has the device as many multiprocessors as those that were measured, so that all blocks that stay run at once?

    On fewer some blocks would follow the others, and a launch would take twice as long.
    """
    return bool(getattr(device_of(inv), "core_count", PROCESSORS) >= PROCESSORS)


def _may_be_divided(leaf: Any) -> bool:
    """May XLA have to divide this array among devices?"""
    if isinstance(leaf, jax.core.Tracer):
        # Shardings that a jit is given are not seen here.
        return jax.device_count() > 1 and not _is_manual()
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, jax.sharding.Sharding) and sharding.num_devices > 1


def _is_manual() -> bool:
    """Are all axes of the mesh around divided by hand, as inside `shard_map`?"""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and len(mesh.manual_axes) == len(mesh.axis_names)
