"""Ready-made kernels: functions to call, and kernel classes to build on."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..ops._lazy import lazy

if TYPE_CHECKING:
    from .attention import Attention as Attention
    from .attention import AttentionConfig as AttentionConfig
    from .attention import attention as attention
    from .layer_norm import LayerNorm as LayerNorm
    from .layer_norm import LayerNormConfig as LayerNormConfig
    from .layer_norm import layer_norm as layer_norm
    from .linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
    from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .linear_cross_entropy_ways import LinearCrossEntropyConfig as LinearCrossEntropyConfig
    from .matmul import Matmul as Matmul
    from .matmul import MatmulConfig as MatmulConfig
    from .matmul import matmul as matmul
    from .providers import Provider as Provider
    from .providers import ProviderError as ProviderError
    from .providers import providers as providers
    from .providers import register_provider as register_provider
    from .providers import unregister_provider as unregister_provider
    from .ragged_dot import RaggedDot as RaggedDot
    from .ragged_dot import RaggedDotConfig as RaggedDotConfig
    from .ragged_dot import ragged_dot as ragged_dot
    from .rms_norm import RmsNorm as RmsNorm
    from .rms_norm import RmsNormConfig as RmsNormConfig
    from .rms_norm import rms_norm as rms_norm
    from .softmax import Softmax as Softmax
    from .softmax import SoftmaxConfig as SoftmaxConfig
    from .softmax import softmax as softmax

_NAMES = {
    "attention": "Attention AttentionConfig attention",
    "layer_norm": "LayerNorm LayerNormConfig layer_norm",
    "linear_cross_entropy": "LinearCrossEntropy linear_cross_entropy",
    "linear_cross_entropy_ways": "LinearCrossEntropyConfig",
    "matmul": "Matmul MatmulConfig matmul",
    "providers": "Provider ProviderError providers register_provider unregister_provider",
    "ragged_dot": "RaggedDot RaggedDotConfig ragged_dot",
    "rms_norm": "RmsNorm RmsNormConfig rms_norm",
    "softmax": "Softmax SoftmaxConfig softmax",
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
