"""The call of a library function to its kernel."""

from __future__ import annotations

from typing import Any

from ..ops import Executor, Kernel, default_executor
from .providers import with_providers


def call(
    kernel: Kernel[Any, Any], *args: Any, cfg: Any = None, executor: Executor[Any, Any] | None = None, **kwargs: Any
) -> Any:
    """Calls a kernel through the given executor or the default one."""
    # `cfg=None` would do, but a call with a keyword of the executor's own does not take its short way.
    if cfg is not None:
        kwargs["cfg"] = cfg
    return (executor or default_executor())(with_providers(kernel), *args, **kwargs)
