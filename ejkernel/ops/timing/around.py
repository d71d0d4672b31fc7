"""What is around a call while it is measured: the batch of a vmap, the mesh of a shard_map."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..core.batch import BatchAxes, batched_leaves, over_batch
from .inputs import take_apart

OfLeaves = Callable[..., Any]


def on_leaves(fn: Callable[..., Any], wrap: Callable[[OfLeaves], OfLeaves]) -> Callable[..., Any]:
    """The function of a call's arguments with a transformation around its arrays."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = take_apart(args, kwargs)

        def of_leaves(*leaves: Any) -> Any:
            inner, keywords = call.rebuild(leaves)
            return fn(*inner, **keywords)

        return wrap(of_leaves)(*call.leaves)

    return wrapped


def in_batch(fn: Callable[..., Any], batch: BatchAxes | None) -> Callable[..., Any]:
    """The function of the whole batch's arguments."""
    return fn if not batch else on_leaves(fn, lambda of_leaves: over_batch(of_leaves, batch))


def whole_batch(args: Any, kwargs: Any, batch: BatchAxes | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the whole batch, as shapes."""
    call = take_apart(args, kwargs)
    return call.rebuild(batched_leaves(call.leaves, batch))


def local_mesh(platform: str) -> jax.sharding.Mesh | None:
    """The manual axes around the caller over this process's devices, so that collectives can run; None without any."""
    around = jax.sharding.get_abstract_mesh()
    manual = [(name, around.shape[name]) for name in around.axis_names if name in around.manual_axes]
    if not manual:
        return None
    count = math.prod(size for _, size in manual)
    devices = jax.local_devices(backend=platform)[:count]
    # Fewer devices than shards: the call is measured without the mesh, which is right as long as nothing is exchanged.
    if len(devices) < count:
        return None
    shape = [size for _, size in manual]
    return jax.sharding.Mesh(np.array(devices).reshape(shape), [name for name, _ in manual])


def per_shard(fn: Callable[..., Any], mesh: jax.sharding.Mesh | None) -> Callable[..., Any]:
    """The function run by every shard at once, each on arrays of the local shapes."""
    if mesh is None:
        return fn

    def wrap(of_leaves: OfLeaves) -> OfLeaves:
        everywhere = PartitionSpec()
        mapped: OfLeaves = jax.shard_map(
            of_leaves, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
        )
        return mapped

    return on_leaves(fn, wrap)


def placing(inv: Any, mesh: jax.sharding.Mesh | None) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Puts arrays where the measured program wants them, so that no run pays for moving them."""
    if inv.method == "shard_map" and isinstance(inv.mesh, jax.sharding.Mesh):
        shardings = _of_specs(inv)
    elif mesh is not None:
        return lambda leaves: tuple(jax.device_put(leaf, _everywhere(mesh)) for leaf in leaves)
    else:
        return tuple
    if shardings is None:
        return tuple
    return lambda leaves: tuple(jax.device_put(x, s) for x, s in zip(leaves, shardings, strict=True))


def _is_spec(part: Any) -> bool:
    return isinstance(part, PartitionSpec)


def _everywhere(mesh: Any) -> Any:
    return NamedSharding(mesh, PartitionSpec())


def _of_specs(inv: Any) -> list[NamedSharding] | None:
    """One sharding per array, from specs that may stand for whole arguments."""
    specs = inv.in_specs if isinstance(inv.in_specs, tuple) and not _is_spec(inv.in_specs) else None
    if specs is None and not _is_spec(inv.in_specs):
        return None
    if specs is not None and len(specs) != len(inv.args):
        return None
    found = []
    for i, arg in enumerate(inv.args):
        spec = inv.in_specs if specs is None else specs[i]
        count = len(take_apart((arg,), {}).leaves)
        leaves = jax.tree_util.tree_leaves(spec, is_leaf=_is_spec)
        found += leaves * count if len(leaves) == 1 else leaves
    found += [PartitionSpec()] * len(take_apart((), inv.kwargs).leaves)
    if len(found) != len(take_apart(inv.args, inv.kwargs).leaves):
        return None
    return [NamedSharding(inv.mesh, spec) for spec in found]
