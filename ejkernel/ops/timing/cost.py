"""Cost of a function: bytes and operations, counted in its trace, and memory that it needs and that a device has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from .inputs import flatten_call
from .program import forward


def traffic_and_operations(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[float, float]:
    """Bytes and operations of a call; what cannot be traced counts by its arguments alone."""
    call = flatten_call(args, kwargs)
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in call.leaves]
    try:
        traced = jax.jit(forward(fn, call)).trace(*leaves)
    # Whatever the computation raises: its arguments still say how large it is.
    except Exception:
        return _bytes(leaves), 0.0
    return _bytes(leaves) + _bytes(jax.tree_util.tree_leaves(traced.out_info)), _operations(traced.jaxpr.jaxpr)


# Each read costs about a millisecond, and most programs of a tuning count alike.
_MOST_READ = 4


def least_cost(executables: Iterable[Any]) -> dict[str, float]:
    """Cost of programs of one computation: bytes in and out, and operations as XLA's cost analysis counts them.

    It counts the body of a loop once, and nothing of a kernel in another language, so the largest count is taken.
    """
    found: dict[str, float] = {}
    for executable in itertools.islice((e for e in executables if e is not None), _MOST_READ):
        try:
            memory, counted = executable.memory_analysis(), executable.cost_analysis()
        # Not every backend tells, and a figure for a page is no reason to fail.
        except (RuntimeError, NotImplementedError, AttributeError):
            continue
        if memory is not None:
            found["bytes"] = float(memory.argument_size_in_bytes + memory.output_size_in_bytes)
        operations = float((counted or {}).get("flops", 0.0))
        if operations > 0:
            found["operations"] = max(operations, found.get("operations", 0.0))
    return found


def _bytes(leaves: Sequence[Any]) -> float:
    return float(sum(math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 4) for leaf in leaves))


def _operations(jaxpr: Any) -> float:
    """Operations of all products; those in a scan as often as it has steps, those in a while loop once."""
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (one, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[axis] for axis in one)
        elif name.startswith("ragged_dot"):
            left, right = (value.aval.shape for value in eqn.invars[:2])
            total += 2.0 * math.prod(left) * right[-1]
        inner = [_operations(part) for part in _programs(eqn.params.values())]
        times = eqn.params["length"] if name == "scan" else 1
        # One branch of several runs.
        total += times * (max(inner, default=0.0) if name == "cond" else sum(inner))
    return total


def _programs(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _programs(value)
        elif hasattr(value, "eqns"):
            yield getattr(value, "jaxpr", value)


def free_memory(device: jax.Device) -> int | None:
    """Bytes that can still be used on a device, or None where that is not known."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return host_memory() if device.platform == "cpu" else None


def host_memory() -> int | None:
    """Bytes of host memory that are still free, or None where that is not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = {line.split(":")[0]: line.split()[1] for line in file}
        return int(found["MemAvailable"]) * 1024
    # Not Linux: nothing is known, so nothing is refused.
    except (OSError, KeyError):
        return None


def needed_memory(executable: Any) -> int:
    """Bytes that a run of a compiled program takes beyond its arguments; 0 where the compiler does not say."""
    analysis = executable.memory_analysis()
    if analysis is None:
        return 0
    return int(analysis.temp_size_in_bytes) + int(analysis.output_size_in_bytes)
