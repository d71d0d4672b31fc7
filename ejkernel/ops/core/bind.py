"""A kernel with its cfg as a plain function of a call's arguments; a tuning times the same function that runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from .errors import KernelError, ShardingError
from .gradients import own_gradient, positional
from .invocation import Invocation
from .kernel import Kernel, gradient, has_any, variant, versioned


def bind(kernel: Kernel[Any, Any], cfg: Any, inv: Invocation[Any, Any], platform: str) -> Callable[..., Any]:
    """Makes the function: picks the variant, adds the own gradient and the sharding."""
    run = variant(kernel, "run", platform=platform, method=inv.method)
    own = gradient(kernel, platform=platform, method=inv.method)
    if own is not None:
        inner = own_gradient(versioned(kernel), run, *own, cfg)
    else:

        def inner(*args: Any, **kwargs: Any) -> Any:
            return run(*args, cfg=cfg, **kwargs)

    if inv.method is None:
        return inner
    if inv.method == "shard_map":
        return _sharded(kernel, cfg, inv, run, own, inner)
    raise KernelError(f"method={inv.method!r} is unknown for kernel {versioned(kernel)}; use 'shard_map' or None")


def _sharded(
    kernel: Kernel[Any, Any],
    cfg: Any,
    inv: Invocation[Any, Any],
    run: Callable[..., Any],
    own: tuple[Any, Any] | None,
    inner: Callable[..., Any],
) -> Callable[..., Any]:
    needed = {"mesh": inv.mesh, "in_specs": inv.in_specs, "out_specs": inv.out_specs}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ShardingError(f"kernel {versioned(kernel)} with method='shard_map' needs {', '.join(missing)} as well")

    def wrapped(args: Any, kwargs: Any) -> tuple[Any, ...]:
        made = kernel.create_shard_map_wrapper(*args, cfg=cfg, check_vma=inv.check_vma, **needed, **kwargs)
        if not isinstance(made, tuple) or len(made) not in (2, 3):
            raise KernelError(
                f"create_shard_map_wrapper of kernel {versioned(kernel)} must return (fn, args) or "
                f"(fn, args, callback), got {made!r}"
            )
        return made

    @functools.wraps(run)
    def sharded(*args: Any, cfg: Any, **kwargs: Any) -> Any:
        made = wrapped(args, kwargs)
        return made[0](*made[1])

    def own_way(*args: Any, **kwargs: Any) -> Any:
        made = wrapped(args, kwargs)
        # With an own gradient the wrapper computes the result alone, and the kernel's vjp its gradient.
        outs = (
            made[0](*made[1]) if own is None else own_gradient(versioned(kernel), sharded, *own, cfg)(*args, **kwargs)
        )
        return outs if len(made) == 2 else made[2](outs, cfg=cfg)

    def plain_way(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = positional(run, args, kwargs)
        mapped: Any = jax.shard_map(lambda *local: inner(*local, **kwargs), check_vma=inv.check_vma, **needed)
        return mapped(*args)

    return own_way if has_any(type(kernel), "create_shard_map_wrapper") else plain_way
