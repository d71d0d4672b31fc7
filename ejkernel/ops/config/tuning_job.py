"""From a request to a tuning job: the candidates of a call as they run, with its batch and its shards around them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._jax import clean_room
from ..core.bind import bind
from ..core.errors import KernelError, KeyPartError
from ..core.invocation import BatchAxes, Invocation, batched_leaves, over_batch
from ..core.kernel import Kernel, has_any, kernel_path, versioned
from ..core.request import Request
from ..timing.inputs import flatten_call, is_concrete
from ..tuning.job import TuningJob
from .policy import TuningWarning as TuningWarning


def job_for(request: Request, cfgs: Sequence[Any], refused: Sequence[tuple[Any, str]] = ()) -> TuningJob:
    """The tuning of one request: the call as it will run, batch and shards around it."""
    kernel, inv = request.kernel, request.inv
    mesh = local_mesh(request.platform) if inv.method is None else None
    sharded = explicit_mesh(flatten_call(inv.args, inv.kwargs).leaves)
    explicit = sharded and on_local_devices(sharded.shape, request.platform, sharded.axis_types)

    def make_fn(cfg: Any) -> Callable[..., Any]:
        return per_shard(in_batch(bind(kernel, cfg, inv, request.platform), inv.batch_axes), mesh)

    def reference(*args: Any, **kwargs: Any) -> Any:
        return per_shard(in_batch(kernel.reference, inv.batch_axes), mesh)(*args, **kwargs)

    args, kwargs = whole_batch(inv.args, inv.kwargs, inv.batch_axes)
    has_example = has_any(type(kernel), "example_inputs")
    return TuningJob(
        make_fn=make_fn,
        args=args,
        kwargs=kwargs,
        candidates=cfgs,
        refused=refused,
        objective=request.objective,
        reference=reference if has_any(type(kernel), "reference") else None,
        tolerance=kernel.tolerance,
        seeds=[hit.cfg for hit in request.seeds],
        heuristic_first=True,
        fresh_floats=True,
        example=(lambda rng: _examples(kernel, inv, rng)) if has_example else None,
        room=lambda: clean_room(explicit),
        place=placing(inv, mesh, explicit),
        about={
            "key": request.key._asdict() | call_parts(inv),
            "kernel": kernel_path(kernel),
            "environment": request.environment,
        },
    )


def call_parts(inv: Invocation[Any, Any]) -> dict[str, str]:
    """The named parts of a call as a record keeps them; none where no key can be made of its arguments."""
    try:
        return {f"call.{name}": text for name, text in inv.parts.items()}
    # A kernel with its own key builder may have arguments that no key can be made of.
    except KeyPartError:
        return {}


# So many examples of a batch are asked for; a larger batch repeats them.
_EXAMPLES = 16


def _examples(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], rng: Any) -> tuple[Any, Any]:
    """The kernel's own inputs; under vmap one call's after the other, stacked along the axes of the batch."""
    batch = inv.batch_axes
    if not batch:
        return _example(kernel, inv, rng)
    count = min(math.prod(level[0] for level in batch), _EXAMPLES)
    calls = [flatten_call(*_example(kernel, inv, rng)) for _ in range(count)]
    examples = zip(*(call.leaves for call in calls), strict=True)
    shapes = batched_leaves(calls[0].leaves, batch)
    return calls[0].rebuild([_stacked(i, own, batch, shapes[i]) for i, own in enumerate(examples)])


def _stacked(place: int, examples: Sequence[Any], batch: BatchAxes, shape: Any) -> Any:
    """One array of the whole batch out of those of some examples; a shape where its values are still to be drawn."""
    if not all(map(is_concrete, examples)):
        return shape
    order = itertools.cycle(examples)
    # NumPy has no random keys.
    stack = jax.numpy.stack if jax.numpy.issubdtype(shape.dtype, jax.dtypes.prng_key) else np.stack

    def stacked(level: int) -> Any:
        if level < 0:
            return next(order)
        size, axis = batch[level][0], batch[level][1][place]
        if axis is None:
            return stacked(level - 1)
        parts = [stacked(level - 1) for _ in range(min(size, len(examples)))]
        return stack([parts[k % len(parts)] for k in range(size)], axis)

    return stacked(len(batch) - 1)


def _example(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], rng: Any) -> tuple[Any, Any]:
    made = kernel.example_inputs(inv, rng)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
        return made
    if isinstance(made, (tuple, list)):
        return tuple(made), inv.kwargs
    raise KernelError(
        f"example_inputs of kernel {versioned(kernel)} must return (args, kwargs), or a tuple of args; got {made!r}"
    )


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
