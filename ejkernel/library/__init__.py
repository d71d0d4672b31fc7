"""Ready-made kernels: functions to call, and kernel classes to build on."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..ops._lazy import lazy

if TYPE_CHECKING:
    from .attention import Attention as Attention
    from .attention import AttentionConfig as AttentionConfig
    from .attention import attention as attention
    from .linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
    from .linear_cross_entropy import LinearCrossEntropyConfig as LinearCrossEntropyConfig
    from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .ragged_dot import RaggedDot as RaggedDot
    from .ragged_dot import RaggedDotConfig as RaggedDotConfig
    from .ragged_dot import ragged_dot as ragged_dot

_NAMES = {
    "attention": "Attention AttentionConfig attention",
    "linear_cross_entropy": "LinearCrossEntropy LinearCrossEntropyConfig linear_cross_entropy",
    "ragged_dot": "RaggedDot RaggedDotConfig ragged_dot",
}


class _Package(ModuleType):
    """A function goes by its file's name, and importing the file would put the module in the function's place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

__getattr__, __dir__, __all__ = lazy(
    __name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
)
