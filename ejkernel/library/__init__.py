"""Kernels to call: functions, and kernel classes to build on."""

import dis
import sys
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from ..ops._lazy import lazy

# The list of what the library has: one import a file, for type checkers and, through `_listed`, for the names below.
# isort: off
if TYPE_CHECKING:
    from .attention import Attention as Attention, AttentionConfig as AttentionConfig, attention as attention
    from .decode_attention import (
        DecodeAttention as DecodeAttention,
        DecodeAttentionConfig as DecodeAttentionConfig,
        append_to_pages as append_to_pages,
        decode_attention as decode_attention,
    )
    from .gated_delta_rule import (
        GatedDeltaRule as GatedDeltaRule,
        GatedDeltaRuleConfig as GatedDeltaRuleConfig,
        GatedLinearAttention as GatedLinearAttention,
        gated_delta_rule as gated_delta_rule,
        gated_linear_attention as gated_linear_attention,
        linear_attention as linear_attention,
    )
    from .layer_norm import LayerNorm as LayerNorm, LayerNormConfig as LayerNormConfig, layer_norm as layer_norm
    from .linear_cross_entropy import (
        LinearCrossEntropy as LinearCrossEntropy,
        linear_cross_entropy as linear_cross_entropy,
    )
    from .linear_cross_entropy_ways import LinearCrossEntropyConfig as LinearCrossEntropyConfig
    from .matmul import Matmul as Matmul, MatmulConfig as MatmulConfig, matmul as matmul
    from .moe import MoeConfig as MoeConfig, moe as moe
    from .moe_combine import MoeCombine as MoeCombine, MoeCombineConfig as MoeCombineConfig, moe_combine as moe_combine
    from .moe_dispatch import (
        Dispatched as Dispatched,
        MoeDispatch as MoeDispatch,
        MoeDispatchConfig as MoeDispatchConfig,
        moe_dispatch as moe_dispatch,
    )
    from .providers import (
        Provider as Provider,
        ProviderError as ProviderError,
        providers as providers,
        register_provider as register_provider,
        unregister_provider as unregister_provider,
    )
    from .quantize import dequantize as dequantize, quantize as quantize
    from .quantized_matmul import (
        QuantizedMatmul as QuantizedMatmul,
        QuantizedMatmulConfig as QuantizedMatmulConfig,
        quantized_matmul as quantized_matmul,
    )
    from .ragged_dot import RaggedDot as RaggedDot, RaggedDotConfig as RaggedDotConfig, ragged_dot as ragged_dot
    from .residual_norm import (
        ResidualNorm as ResidualNorm,
        ResidualNormConfig as ResidualNormConfig,
        residual_norm as residual_norm,
    )
    from .rms_norm import RmsNorm as RmsNorm, RmsNormConfig as RmsNormConfig, rms_norm as rms_norm
    from .sample import Sample as Sample, SampleConfig as SampleConfig, sample as sample
    from .scaled_matmul import (
        ScaledMatmul as ScaledMatmul,
        ScaledMatmulConfig as ScaledMatmulConfig,
        float8_matmul as float8_matmul,
        scaled_matmul as scaled_matmul,
    )
    from .softmax import Softmax as Softmax, SoftmaxConfig as SoftmaxConfig, softmax as softmax
    from .top_k import TopK as TopK, TopKConfig as TopKConfig, top_k as top_k
# isort: on


def _listed(code: CodeType) -> dict[str, str]:
    """The names that a module imports from the files beside it, each with its file: read from its code, not run.

    The code is there also where no source is.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    found: dict[str, str] = {}
    for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME" and level.argval == 1:
            found |= dict.fromkeys(names.argval, f"{__name__}.{step.argval}")
    return found


_FILES = _listed(sys._getframe().f_code)


class _Package(ModuleType):
    """A function goes by its file's name, and importing the file would put the module in the function's place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _FILES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

__getattr__, __dir__, __all__ = lazy(__name__, _FILES)
