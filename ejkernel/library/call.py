"""The call of a library function to its kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from ..ops import Executor, Kernel
from ..ops.execution.plan import Plan, Program
from ..ops.execution.planned import planned as planned
from .arguments import ArgumentError
from .providers import with_providers


def plan(
    kernel: Kernel[Any, Any],
    *args: Any,
    cfg: Any = None,
    executor: Executor[Any, Any] | None = None,
    then: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Makes the answer of a function under `planned`: its kernel and arguments, and what is done with the result."""
    if cfg is not None:
        check_sizes(cfg)
    kernel = with_providers(kernel)
    made = Plan(kernel, args, kwargs, cfg, executor)
    return made if then is None else Plan(kernel, args, kwargs, cfg, executor, then)


def check_sizes(cfg: Any) -> None:
    """Raises where a cfg given by hand has a block, a part or a count below one; another type is refused later."""
    for field in fields(cfg) if is_dataclass(cfg) else ():
        value = getattr(cfg, field.name)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ArgumentError(f"{cfg} has {field.name}={value}; give a size from 1 on, or None")


def program(
    name: str, compute: Callable[[Executor[Any, Any] | None], Any], executor: Executor[Any, Any] | None = None
) -> Any:
    """The plan of a function of several kernels, or of none; `compute` is given the executor to call them through."""
    return Program(name, compute, executor)
