"""May this call be measured? Known from shapes, before anything is made.

And what makes tunings costly: a static float that changes from call to call should be an array.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..core.bind import bind
from ..core.description import readable
from ..core.device import device_fingerprint, is_attached
from ..core.errors import KeyPartError
from ..core.invocation import array_leaves, batched_leaves
from ..core.kernel import Kernel, has_any
from ..core.request import Request
from ..timing.cost import free_memory
from ..timing.inputs import is_concrete
from ..timing.transforms import explicit_mesh, on_local_devices
from .tuning_budget import TuningWarning

# A tuning holds inputs, outputs and a reference at once; beyond this share of what is free it would compete with
# the program that it serves.
_MEMORY_SHARE = 0.25


@dataclass(frozen=True)
class Obstacle:
    """A reason not to measure a call; `surprising` where the call's author can change that, and so is told once."""

    reason: str
    surprising: bool = False


def untunable_because(request: Request, cfg: Any) -> Obstacle | None:
    """The obstacle to measuring this call, known from shapes alone; None where there is none."""
    inv = request.inv
    leaves = array_leaves(inv.args, inv.kwargs)
    if any(not isinstance(size, int) for leaf in leaves for size in np.shape(leaf)):
        return Obstacle("its shapes are symbolic")
    if any(_spans_processes(leaf.sharding) for leaf in leaves if _has_place(leaf)):
        return Obstacle("its arrays span processes; call it inside shard_map to have each shard's part tuned", True)
    if not is_attached(request.device):
        return Obstacle(f"{device_fingerprint(request.device)} is not attached to this process")
    abstract = [leaf for leaf in leaves if not is_concrete(leaf)]
    has_example = has_any(type(request.kernel), "example_inputs")
    if any(_is_integer(leaf) for leaf in abstract) and not has_example:
        return Obstacle("it is traced with integer arrays, and the kernel has no example_inputs to take values from")
    return _sharding_obstacle(request, abstract) or _too_large(request, cfg, leaves)


def _sharding_obstacle(request: Request, abstract: Sequence[Any]) -> Obstacle | None:
    if any(_auto_sharded(leaf) for leaf in abstract):
        reason = "it is traced with arrays that JAX shards automatically; call it inside shard_map to have it tuned"
        return Obstacle(reason, surprising=True)
    mesh = explicit_mesh(abstract)
    too_few = mesh is not None and on_local_devices(mesh.shape, request.platform) is None
    if too_few or _spans_processes(request.inv.mesh):
        return Obstacle("its mesh spans processes; call it inside shard_map to have each shard's part tuned", True)
    if mesh is not None and request.inv.batch_axes:
        return Obstacle("it is mapped over arrays that are sharded; call it inside shard_map to have it tuned", True)
    return None


def _is_integer(leaf: Any) -> bool:
    return bool(jax.numpy.issubdtype(leaf.dtype, np.integer))


def _auto_sharded(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        return False
    mesh = getattr(leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf).sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return False
    auto = jax.sharding.AxisType.Auto
    return any(k == auto and n > 1 for k, n in zip(mesh.axis_types, mesh.shape.values(), strict=True))


def _has_place(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) and not isinstance(leaf, jax.core.Tracer)


def _spans_processes(place: Any) -> bool:
    if isinstance(place, jax.sharding.Mesh):
        return len({d.process_index for d in place.devices.flat}) > 1
    return isinstance(place, jax.sharding.Sharding) and len({d.process_index for d in _devices(place)}) > 1


def _devices(sharding: jax.sharding.Sharding) -> set[jax.Device]:
    # A sharding over an abstract mesh has no devices.
    abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
    return set() if abstract else sharding.device_set


def _too_large(request: Request, cfg: Any, leaves: Sequence[Any]) -> Obstacle | None:
    free = free_memory(request.device)
    if free is None:
        return None
    needed = sum(_bytes(leaf) for leaf in batched_leaves(leaves, request.inv.batch_axes))
    # The outputs are asked for only where the inputs are not too much already.
    if needed <= free * _MEMORY_SHARE:
        needed += _output_bytes(request, cfg) * math.prod(level[0] for level in request.inv.batch_axes or ())
    if needed <= free * _MEMORY_SHARE:
        return None
    size = f"{needed / 2**20:,.0f} MiB"
    return Obstacle(f"its inputs and outputs take {size}, over {_MEMORY_SHARE:.0%} of the free device memory")


def _output_bytes(request: Request, cfg: Any) -> int:
    fn = bind(request.kernel, cfg, request.inv, request.platform)
    try:
        outs = jax.eval_shape(lambda: fn(*request.inv.args, **request.inv.kwargs))
    # The computation can't be traced, or its heuristic cfg fails: the tuning itself will say so.
    except Exception:
        return 0
    return sum(_bytes(leaf) for leaf in jax.tree_util.tree_leaves(outs))


def _bytes(leaf: Any) -> int:
    # Extended dtypes (keys) know their size as well.
    return math.prod(int(size) for size in leaf.shape) * int(getattr(leaf.dtype, "itemsize", 4))


# Two values may be two uses, such as training and serving; a third is a number that changes.
_MOST = 2
_FLOAT = '["float",'


class StaticFloats:
    """The floats of the calls that were tuned, by operation and by the rest of the call."""

    def __init__(self) -> None:
        self._values: dict[tuple[Any, ...], set[str]] = {}
        self._said: set[tuple[str, str]] = set()

    def tuned(self, request: Request) -> None:
        """Counts the floats of a call that is about to be tuned, and warns of the argument with too many, once."""
        try:
            parts = request.inv.parts
        # A kernel with its own key builder may have arguments that no key can be made of.
        except KeyPartError:
            return
        floats = {name: text for name, text in parts.items() if text.startswith(_FLOAT)}
        # The scale of an attention goes with its width: only calls that are alike but for their floats count.
        rest = tuple((name, text) for name, text in parts.items() if name not in floats)
        for name, text in floats.items():
            values = self._values.setdefault((request.key.device, request.key.op_id, name, rest), set())
            values.add(text)
            said = (request.key.op_id, name)
            if len(values) > _MOST and said not in self._said:
                self._said.add(said)
                self._warn(request, name, values)

    def _warn(self, request: Request, name: str, values: set[str]) -> None:
        title = _argument(request.kernel, name)
        shown = ", ".join(sorted(map(readable, values), key=float))
        warnings.warn(
            f"{title} of kernel {request.key.op_id} is a static float, and each of its values costs a tuning: "
            f"{shown} so far. Pass an array, such as jnp.asarray(value), or name it in tunable(..., traced=(...))",
            TuningWarning,
            stacklevel=2,
        )


def _argument(kernel: Kernel[Any, Any], part: str) -> str:
    """A part of a key by the argument's name, where the kernel's `run` has one for it."""
    keyword = re.fullmatch(r"kwargs\['(\w+)'\](.*)", part)
    if keyword:
        return keyword[1] + keyword[2]
    place = re.fullmatch(r"args\[(\d+)\](.*)", part)
    names: list[str] = []
    with contextlib.suppress(TypeError, ValueError):
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(kernel.run).parameters
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, parameter in parameters.items() if parameter.kind in kinds]
    known = place is not None and int(place[1]) < len(names)
    return f"{names[int(place[1])]}{place[2]} ({part})" if known and place is not None else part
