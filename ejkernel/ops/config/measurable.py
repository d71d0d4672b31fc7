"""May this call be measured? Known from shapes, before anything is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..core.batch import batched_leaves
from ..core.bind import bind
from ..core.device import device_fingerprint
from ..core.stable import is_array
from ..core.variants import has_any
from ..timing.inputs import is_concrete
from .request import Request

# A tuning holds inputs, outputs and a reference at once; beyond this share of what is free it would compete with
# the program that it serves.
_MEMORY_SHARE = 0.25


def unmeasurable(request: Request, cfg: Any) -> str:
    """Why this call must not be measured, known from shapes alone; empty where it may be."""
    leaves = [x for x in jax.tree_util.tree_leaves((request.inv.args, dict(request.inv.kwargs))) if is_array(x)]
    if any(not isinstance(size, int) for leaf in leaves for size in np.shape(leaf)):
        return "its shapes are symbolic"
    if request.device not in jax.local_devices(backend=request.device.client.platform):
        return f"{device_fingerprint(request.device)} is not attached to this process"
    has_example = has_any(type(request.kernel), "example_inputs") and not request.inv.batch_axes
    abstract = [leaf for leaf in leaves if not is_concrete(leaf)]
    if any(_is_integer(leaf) for leaf in abstract) and not has_example:
        return "it is traced with integer arrays, and the kernel has no example_inputs to take their values from"
    if any(_auto_sharded(leaf) for leaf in abstract):
        return "it is traced with arrays that JAX shards automatically; call it inside shard_map to have it tuned"
    if _spans_processes(request.inv.mesh):
        return "its mesh spans processes; tune it offline, or call it inside shard_map"
    return _too_large(request, cfg, leaves)


def _is_integer(leaf: Any) -> bool:
    return not jax.numpy.issubdtype(leaf.dtype, np.inexact) and not jax.numpy.issubdtype(
        leaf.dtype, jax.dtypes.extended
    )


def _auto_sharded(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        return False
    mesh = getattr(leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf).sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return False
    auto = jax.sharding.AxisType.Auto
    return any(k == auto and n > 1 for k, n in zip(mesh.axis_types, mesh.shape.values(), strict=True))


def _spans_processes(mesh: Any) -> bool:
    return isinstance(mesh, jax.sharding.Mesh) and len({d.process_index for d in mesh.devices.flat}) > 1


def _too_large(request: Request, cfg: Any, leaves: Sequence[Any]) -> str:
    free = free_memory(request.device)
    if free is None:
        return ""
    needed = sum(_bytes(leaf) for leaf in batched_leaves(leaves, request.inv.batch_axes))
    # The outputs are asked for only where the inputs are not too much already and might be with them.
    if needed <= free * _MEMORY_SHARE:
        needed += _output_bytes(request, cfg) * math.prod(size for size, _ in request.inv.batch_axes or ())
    if needed <= free * _MEMORY_SHARE:
        return ""
    return f"its inputs and outputs take {needed / 2**20:,.0f} MiB, over {_MEMORY_SHARE:.0%} of the free device memory"


def _output_bytes(request: Request, cfg: Any) -> int:
    fn = bind(request.kernel, cfg, request.inv, request.platform)
    try:
        outs = jax.eval_shape(lambda: fn(*request.inv.args, **request.inv.kwargs))
    # A computation that can't be traced, or whose heuristic cfg fails: the tuning itself will say so.
    except Exception:
        return 0
    return sum(_bytes(leaf) for leaf in jax.tree_util.tree_leaves(outs))


def _bytes(leaf: Any) -> int:
    # Extended dtypes (keys) know their size as well.
    return math.prod(int(size) for size in leaf.shape) * int(getattr(leaf.dtype, "itemsize", 4))


def free_memory(device: jax.Device) -> int | None:
    """Bytes that can still be used on a device, or None where that is not known."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return _host_memory() if device.platform == "cpu" else None


def _host_memory() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = {line.split(":")[0]: line.split()[1] for line in file}
        return int(found["MemAvailable"]) * 1024
    # Not Linux: nothing is known, so nothing is refused.
    except (OSError, KeyError):
        return None
