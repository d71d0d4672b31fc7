"""The outcome of a function's checks: all that is left to compute."""

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


@dataclass(frozen=True)
class Program:
    """A computation of several kernels, or of none; `compute` calls them through the executor that it is given."""

    name: str
    compute: Callable[[Executor[Any, Any] | None], Any]
    executor: Executor[Any, Any] | None = None

    @property
    def kernel(self) -> Kernel[Any, Any]:
        """Stands for the whole where a message names a kernel."""
        return _Whole(self.name)


class _Whole(Kernel[Any, Any]):
    """A name; never called."""

    def run(self, *args: Any, cfg: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def heuristic_cfg(self, inv: Any) -> Any:
        raise NotImplementedError
