"""Turns a request into a tuning job: the candidates of a call, and the tuning of them as a value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._jax import clean_room
from ..core.bind import bind
from ..core.errors import KernelError, KeyPartError
from ..core.invocation import BatchAxes, Invocation, batched_leaves
from ..core.kernel import Kernel, has_any, kernel_path, versioned
from ..core.request import Request
from ..timing.inputs import flatten_call, is_concrete
from ..timing.transforms import explicit_mesh, in_batch, local_mesh, on_local_devices, per_shard, placing, whole_batch
from ..tuning.job import TuningJob


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
