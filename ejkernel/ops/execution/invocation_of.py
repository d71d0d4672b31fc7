"""The invocation of a kernel: its call, once `prepare` has normalised it."""

from __future__ import annotations

from typing import Any

import jax

from .. import _jax
from ..core.batch import BatchAxes, array_leaves, batched_leaves, find_batch, over_batch
from ..core.errors import KernelError
from ..core.invocation import Invocation
from ..core.kernel import Kernel, versioned
from .arguments import Options, take


def invocation_of(
    kernel: Kernel[Any, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    batch: BatchAxes | None = None,
) -> Invocation[Any, Any]:
    """The invocation that a call makes, once the kernel has normalised it."""
    ready, keywords = _prepared(kernel, args, kwargs)
    if batch is None and not keywords and all(type(arg) is _jax.JaxprTracer for arg in ready):
        # A value of the program that is being written shows no batch.
        pass
    elif batch is None:
        leaves = array_leaves(ready, keywords)
        batch = find_batch(leaves) if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves) else None
    elif type(kernel).prepare is not Kernel.prepare:
        batch = _batch_after_prepare(kernel, args, kwargs, batch)
    return Invocation(
        op_id=kernel.op_id,
        args=ready,
        kwargs=keywords,
        batch_axes=batch,
        override_cfg=options.cfg,
        stamp=options.stamp,
        method=options.method,
        mesh=options.mesh,
        in_specs=options.in_specs,
        out_specs=options.out_specs,
        check_vma=options.check_vma,
    )


def _prepared(kernel: Kernel[Any, Any], args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made = kernel.prepare(*args, **kwargs)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
        return tuple(made[0]), made[1]
    raise KernelError(
        f"prepare of kernel {versioned(kernel)} must return (args, kwargs), a tuple and a dict; got {made!r}"
    )


def _batch_after_prepare(kernel: Kernel[Any, Any], args: Any, kwargs: Any, batch: BatchAxes) -> BatchAxes | None:
    """The batch's axes once `prepare` has moved the arrays around: asked of JAX, on shapes."""
    taken = take(kernel, args, kwargs)
    found: list[BatchAxes | None] = []

    def look(*leaves: Any) -> int:
        found.append(find_batch(array_leaves(*_prepared(kernel, *taken.rebuild(leaves)))))
        return 0

    with _jax.clean_room():
        jax.eval_shape(over_batch(look, batch), *batched_leaves(taken.leaves, batch))
    return found[0]
