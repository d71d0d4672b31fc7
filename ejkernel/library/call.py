"""The call of a library function to its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ops import Executor, Kernel, default_executor
from ..ops.execution.plan import Plan
from ..ops.execution.planned import planned as planned
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
    kernel = with_providers(kernel)
    made = Plan(kernel, args, kwargs, cfg, executor)
    return made if then is None else Plan(kernel, args, kwargs, cfg, executor, then)


def call(
    kernel: Kernel[Any, Any], *args: Any, cfg: Any = None, executor: Executor[Any, Any] | None = None, **kwargs: Any
) -> Any:
    """Calls a kernel through the given executor or the default one."""
    # `cfg=None` would do, but a call with a keyword of the executor's own does not take its short way.
    if cfg is not None:
        kwargs["cfg"] = cfg
    return (executor or default_executor())(with_providers(kernel), *args, **kwargs)
