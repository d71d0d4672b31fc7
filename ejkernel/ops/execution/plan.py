"""The call of a kernel that a function comes down to, before it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.kernel import Kernel

if TYPE_CHECKING:
    from .executor import Executor


def _same(out: Any) -> Any:
    return out


@dataclass(frozen=True)
class Plan:
    """The call of a kernel that a function comes down to, and what is done with its result."""

    kernel: Kernel[Any, Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    cfg: Any = None
    executor: Executor[Any, Any] | None = None
    then: Callable[[Any], Any] = _same
