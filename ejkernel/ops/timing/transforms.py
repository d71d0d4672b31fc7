"""Transformations around a call while it is measured: the batch of a vmap, the mesh of a shard_map."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..core.invocation import BatchAxes, batched_leaves, over_batch
from .inputs import flatten_call

OfLeaves = Callable[..., Any]


def on_leaves(fn: Callable[..., Any], wrap: Callable[[OfLeaves], OfLeaves]) -> Callable[..., Any]:
    """The function of a call's arguments with a transformation around its arrays."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = flatten_call(args, kwargs)

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
    call = flatten_call(args, kwargs)
    return call.rebuild(batched_leaves(call.leaves, batch))


def manual_axes() -> dict[str, int]:
    """The axes of the shard_maps around the caller, with their sizes."""
    around = jax.sharding.get_abstract_mesh()
    return {name: around.shape[name] for name in around.axis_names if name in around.manual_axes}


def explicit_mesh(leaves: Sequence[Any]) -> Any:
    """The mesh that traced arrays are explicitly sharded over, as their types show it; None where there is none."""
    for leaf in leaves:
        mesh = getattr(_type_sharding(leaf), "mesh", None)
        if mesh is not None and not mesh.empty:
            kinds = zip(mesh.axis_types, mesh.shape.values(), strict=True)
            if any(kind == AxisType.Explicit and size > 1 for kind, size in kinds):
                return mesh
    return None


def _type_sharding(leaf: Any) -> Any:
    """The sharding that a tracer's type shows, or that a shape kept of it."""
    if isinstance(leaf, jax.core.Tracer):
        return jax.typeof(leaf).sharding
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def on_local_devices(axes: Mapping[str, int], platform: str, kinds: Any = None) -> Mesh | None:
    """A mesh of these axes over this process's devices; None where it has too few."""
    count = math.prod(axes.values())
    devices = jax.local_devices(backend=platform)[:count]
    if len(devices) < count:
        return None
    return Mesh(np.array(devices).reshape(list(axes.values())), list(axes), axis_types=kinds)


def local_mesh(platform: str) -> Mesh | None:
    """The manual axes around the caller over this process's devices, so that collectives can run.

    None without any, or with fewer devices than shards: then the call is measured without the mesh, which is right as
    long as nothing is exchanged.
    """
    axes = manual_axes()
    return on_local_devices(axes, platform) if axes else None


def per_shard(fn: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
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


def placing(inv: Any, local: Mesh | None, explicit: Mesh | None) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Puts arrays where the measured program wants them, so that no run pays for moving them."""
    leaves = flatten_call(inv.args, inv.kwargs).leaves
    shardings: list[Any] | None = None
    if inv.method == "shard_map" and isinstance(inv.mesh, Mesh):
        shardings = _of_specs(inv)
    elif explicit is not None:
        shardings = [NamedSharding(explicit, _type_spec(leaf)) for leaf in leaves]
    elif local is not None:
        shardings = [_everywhere(local)] * len(leaves)
    if shardings is None:
        return tuple
    return lambda made: tuple(jax.device_put(x, s) for x, s in zip(made, shardings, strict=True))


def _type_spec(leaf: Any) -> Any:
    # Arrays with values say for themselves.
    return getattr(_type_sharding(leaf) or jax.typeof(leaf).sharding, "spec", PartitionSpec())


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
        count = len(flatten_call((arg,), {}).leaves)
        leaves = jax.tree_util.tree_leaves(spec, is_leaf=_is_spec)
        found += leaves * count if len(leaves) == 1 else leaves
    found += [PartitionSpec()] * len(flatten_call((), inv.kwargs).leaves)
    if len(found) != len(flatten_call(inv.args, inv.kwargs).leaves):
        return None
    return [NamedSharding(inv.mesh, spec) for spec in found]
