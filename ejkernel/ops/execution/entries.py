"""The functions that JAX jits for calls: each chooses a cfg while it is traced, and runs the kernel with it.

What a trace needs beyond its tracers, the arrays of the call or its plan, is at hand for the thread that makes the
call; a trace that comes without it raises `NeedsValues`, and the call takes the long way once.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import jax

from ..core.device import target_device
from ..core.invocation import BatchAxes
from ..core.kernel import Kernel
from ..core.stable import is_array
from ..registry import copied
from ..timing.inputs import is_concrete, is_float
from .arguments import PLAIN, Options, Taken
from .kernel_run import KernelRun
from .plan import Plan, Program
from .static_values import as_it_is_now
from .table import CompiledEntry, NeedsValues, Traced, signature, tracing, tree_signature


class _Now(threading.local):
    """The call that this thread is making, for the time that JAX may trace it: its arrays, or its plan."""

    given: Any = None


class EntryBuilder:
    """Makes the entries of one executor's table."""

    def __init__(self, run: KernelRun) -> None:
        self._run = run
        self.now = _Now()

    def of_call(
        self,
        kernel: Kernel[Any, Any],
        taken: Taken,
        options: Options,
        batch: BatchAxes | None,
        device: jax.Device,
    ) -> CompiledEntry:
        """The entry of calls with these static values and so many arrays."""
        rebuild = taken.settled()
        # As it is now: the caller may change its own, and other kernels with these attributes share the entry.
        kernel = snapshot(kernel)

        def body(*leaves: Any) -> Any:
            concrete, self.now.given = self.now.given, None
            if concrete is None and not all(map(_serves_as_shape, leaves)):
                raise NeedsValues
            own = None if concrete is None else rebuild(concrete)
            with target_device(device), tracing(Traced(entry, signature(leaves))):
                return self._run(kernel, *rebuild(leaves), options, batch=batch, concrete=own)

        body.__name__ = body.__qualname__ = kernel.op_id
        entry = CompiledEntry(kernel, body)
        return entry

    def of_trees(
        self, kernel: Kernel[Any, Any], names: tuple[str, ...], count: int, device: jax.Device
    ) -> CompiledEntry:
        """The entry of calls with trees of arrays alone, whatever their structure: so many by position, and by name."""
        kept = snapshot(kernel)

        def body(*parts: Any) -> Any:
            given, self.now.given = self.now.given, None
            leaves = jax.tree_util.tree_leaves(parts)
            if given is None and not all(is_array(leaf) and is_concrete(leaf) for leaf in leaves):
                raise NeedsValues
            own = None if given is None else (given[:count], dict(zip(names, given[count:], strict=True)))
            with target_device(device), tracing(Traced(made, tree_signature(parts))):
                keywords = dict(zip(names, parts[count:], strict=True))
                return self._run(kept, parts[:count], keywords, PLAIN, concrete=own)

        body.__name__ = body.__qualname__ = kernel.op_id
        made = CompiledEntry(kept, body, tree_signature)
        return made

    def of_plan(
        self, executor: Any, front: Callable[..., Any], kernel: Kernel[Any, Any], taken: Taken, device: jax.Device
    ) -> CompiledEntry:
        """The entry of a function that plans its calls, which holds the function itself."""
        rebuild = taken.settled()

        def body(*leaves: Any) -> Any:
            plan, self.now.given = self.now.given, None
            if plan is None and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                raise NeedsValues
            own = (plan.args, dict(plan.kwargs)) if type(plan) is Plan else None
            with target_device(device), tracing(Traced(entry, signature(leaves))):
                args, kwargs = rebuild(leaves)
                inside = front(*args, **kwargs, executor=executor)
                if type(inside) is Program:
                    return inside.compute(executor)
                return inside.then(self._run(inside.kernel, inside.args, dict(inside.kwargs), PLAIN, concrete=own))

        body.__name__ = body.__qualname__ = kernel.op_id
        entry = CompiledEntry(kernel, body)
        return entry


def _serves_as_shape(leaf: Any) -> bool:
    """Does a random array serve as well as this tracer? Arrays themselves have their values with them."""
    if not isinstance(leaf, jax.core.Tracer):
        return True
    return is_float(leaf) and jax.typeof(leaf).sharding.mesh.empty


def snapshot(kernel: Kernel[Any, Any]) -> Kernel[Any, Any]:
    """The kernel with its attributes as they are now."""
    same = copy.copy(kernel)
    vars(same).update({name: as_it_is_now(copied(value)) for name, value in vars(kernel).items()})
    return same
