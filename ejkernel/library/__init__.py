"""Kernels to call: functions, and kernel classes to build on."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..ops._lazy import lazy

if TYPE_CHECKING:
    from .attention import Attention as Attention
    from .attention import AttentionConfig as AttentionConfig
    from .attention import attention as attention
    from .decode_attention import DecodeAttention as DecodeAttention
    from .decode_attention import DecodeAttentionConfig as DecodeAttentionConfig
    from .decode_attention import append_to_pages as append_to_pages
    from .decode_attention import decode_attention as decode_attention
    from .gated_delta_rule import GatedDeltaRule as GatedDeltaRule
    from .gated_delta_rule import GatedDeltaRuleConfig as GatedDeltaRuleConfig
    from .gated_delta_rule import GatedLinearAttention as GatedLinearAttention
    from .gated_delta_rule import gated_delta_rule as gated_delta_rule
    from .gated_delta_rule import gated_linear_attention as gated_linear_attention
    from .gated_delta_rule import linear_attention as linear_attention
    from .layer_norm import LayerNorm as LayerNorm
    from .layer_norm import LayerNormConfig as LayerNormConfig
    from .layer_norm import layer_norm as layer_norm
    from .linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
    from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .linear_cross_entropy_ways import LinearCrossEntropyConfig as LinearCrossEntropyConfig
    from .matmul import Matmul as Matmul
    from .matmul import MatmulConfig as MatmulConfig
    from .matmul import matmul as matmul
    from .moe import MoeConfig as MoeConfig
    from .moe import moe as moe
    from .moe_combine import MoeCombine as MoeCombine
    from .moe_combine import MoeCombineConfig as MoeCombineConfig
    from .moe_combine import moe_combine as moe_combine
    from .moe_dispatch import Dispatched as Dispatched
    from .moe_dispatch import MoeDispatch as MoeDispatch
    from .moe_dispatch import MoeDispatchConfig as MoeDispatchConfig
    from .moe_dispatch import moe_dispatch as moe_dispatch
    from .providers import Provider as Provider
    from .providers import ProviderError as ProviderError
    from .providers import providers as providers
    from .providers import register_provider as register_provider
    from .providers import unregister_provider as unregister_provider
    from .quantize import dequantize as dequantize
    from .quantize import quantize as quantize
    from .quantized_matmul import QuantizedMatmul as QuantizedMatmul
    from .quantized_matmul import QuantizedMatmulConfig as QuantizedMatmulConfig
    from .quantized_matmul import quantized_matmul as quantized_matmul
    from .ragged_dot import RaggedDot as RaggedDot
    from .ragged_dot import RaggedDotConfig as RaggedDotConfig
    from .ragged_dot import ragged_dot as ragged_dot
    from .residual_norm import ResidualNorm as ResidualNorm
    from .residual_norm import ResidualNormConfig as ResidualNormConfig
    from .residual_norm import residual_norm as residual_norm
    from .rms_norm import RmsNorm as RmsNorm
    from .rms_norm import RmsNormConfig as RmsNormConfig
    from .rms_norm import rms_norm as rms_norm
    from .sample import Sample as Sample
    from .sample import SampleConfig as SampleConfig
    from .sample import sample as sample
    from .scaled_matmul import ScaledMatmul as ScaledMatmul
    from .scaled_matmul import ScaledMatmulConfig as ScaledMatmulConfig
    from .scaled_matmul import float8_matmul as float8_matmul
    from .scaled_matmul import scaled_matmul as scaled_matmul
    from .softmax import Softmax as Softmax
    from .softmax import SoftmaxConfig as SoftmaxConfig
    from .softmax import softmax as softmax
    from .top_k import TopK as TopK
    from .top_k import TopKConfig as TopKConfig
    from .top_k import top_k as top_k

_NAMES = {
    "attention": "Attention AttentionConfig attention",
    "decode_attention": "DecodeAttention DecodeAttentionConfig append_to_pages decode_attention",
    "gated_delta_rule": "GatedDeltaRule GatedDeltaRuleConfig GatedLinearAttention gated_delta_rule "
    "gated_linear_attention linear_attention",
    "layer_norm": "LayerNorm LayerNormConfig layer_norm",
    "linear_cross_entropy": "LinearCrossEntropy linear_cross_entropy",
    "linear_cross_entropy_ways": "LinearCrossEntropyConfig",
    "matmul": "Matmul MatmulConfig matmul",
    "moe": "MoeConfig moe",
    "moe_combine": "MoeCombine MoeCombineConfig moe_combine",
    "moe_dispatch": "Dispatched MoeDispatch MoeDispatchConfig moe_dispatch",
    "providers": "Provider ProviderError providers register_provider unregister_provider",
    "quantize": "dequantize quantize",
    "quantized_matmul": "QuantizedMatmul QuantizedMatmulConfig quantized_matmul",
    "ragged_dot": "RaggedDot RaggedDotConfig ragged_dot",
    "residual_norm": "ResidualNorm ResidualNormConfig residual_norm",
    "rms_norm": "RmsNorm RmsNormConfig rms_norm",
    "sample": "Sample SampleConfig sample",
    "scaled_matmul": "ScaledMatmul ScaledMatmulConfig float8_matmul scaled_matmul",
    "softmax": "Softmax SoftmaxConfig softmax",
    "top_k": "TopK TopKConfig top_k",
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
