"""Calls of the library's operations at many shapes, for predictions: the same list on every machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.library import Attention, LayerNorm, LinearCrossEntropy, Matmul, RaggedDot, RmsNorm, Softmax
from ejkernel.ops import Kernel

Shape = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Call:
    """A kernel, its arguments as shapes, and whether the gradient is tuned along."""

    kernel: Kernel[Any, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    backward: bool = False


_BF16, _F32 = jnp.bfloat16, jnp.float32
# Sizes as models have them: powers of two and what lies between.
_WIDTHS = {
    "cpu": (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536),
    "gpu": (768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 7168, 8192),
}
_ROWS = {
    "cpu": (1, 4, 16, 48, 64, 128, 200, 256, 512, 1024),
    "gpu": (1, 8, 16, 64, 128, 512, 1024, 2048, 3000, 4096, 8192, 16384),
}
_HEADS = {"cpu": (1, 2, 4), "gpu": (8, 16, 32)}
_TOKENS = {"cpu": (32, 64, 96, 128, 192, 256, 384), "gpu": (256, 512, 1024, 2048, 4096)}
_WORDS = {"cpu": (512, 1000, 2048, 4096), "gpu": (8192, 16384, 32000, 50257)}
# The largest product of an operation's sizes, so that a call stays short.
_MOST = {"cpu": 1 << 23, "gpu": 1 << 36}


def _fits(platform: str, *sizes: int) -> bool:
    product = 1
    for size in sizes:
        product *= size
    return product <= _MOST[platform]


def _matmul(platform: str, draw: random.Random) -> Call | None:
    m, k, n = draw.choice(_ROWS[platform]), draw.choice(_WIDTHS[platform]), draw.choice(_WIDTHS[platform])
    if not _fits(platform, m, k, n):
        return None
    activation = draw.choice((None, None, "silu", "gelu"))
    arrays = (Shape((m, k), _BF16), Shape((k, n), _BF16))
    return Call(Matmul(), arrays, {"activation": activation} if activation else {})


def _rows_of(kernel: type[Kernel[Any, Any]], weights: int) -> Callable[[str, random.Random], Call | None]:
    def make(platform: str, draw: random.Random) -> Call | None:
        rows, width = draw.choice(_ROWS[platform]), draw.choice(_WIDTHS[platform])
        if rows * width > (1 << 19 if platform == "cpu" else 1 << 27) or rows * width < 1024:
            return None
        dtype = draw.choice((_BF16, _F32)) if platform == "cpu" else _BF16
        arrays = (Shape((rows, width), dtype), *(Shape((width,), dtype),) * weights)
        return Call(kernel(), arrays, backward=draw.random() < 0.4)

    return make


def _softmax(platform: str, draw: random.Random) -> Call | None:
    call = _rows_of(Softmax, 0)(platform, draw)
    if call is None or draw.random() < 0.5:
        return call
    rows = call.args[0].shape[0]
    return Call(Softmax(), (Shape((min(rows, 256), draw.choice(_WORDS[platform])), call.args[0].dtype),))


def _attention(platform: str, draw: random.Random) -> Call | None:
    tokens, heads, width = draw.choice(_TOKENS[platform]), draw.choice(_HEADS[platform]), draw.choice((32, 64, 128))
    batch = draw.choice((1, 2, 4))
    if (platform == "gpu" and width == 32) or not _fits(platform, batch, tokens, tokens, heads, width):
        return None
    kv = draw.choice((heads, max(1, heads // 4)))
    dtype = _F32 if platform == "cpu" else _BF16
    q, k = Shape((batch, tokens, heads, width), dtype), Shape((batch, tokens, kv, width), dtype)
    static = {"causal": draw.random() < 0.7, "scale": width**-0.5}
    # Its gradient takes many seconds to compile.
    return Call(Attention(), (q, k, k), static)


def _ragged(platform: str, draw: random.Random) -> Call | None:
    m, k, n = draw.choice(_ROWS[platform]), draw.choice(_WIDTHS[platform][:6]), draw.choice(_WIDTHS[platform][:6])
    groups = draw.choice((4, 8, 16) if platform == "cpu" else (8, 16, 32, 64))
    if m < 64 or not _fits(platform, m, k, n):
        return None
    dtype = _F32 if platform == "cpu" else _BF16
    return Call(RaggedDot(), (Shape((m, k), dtype), Shape((groups, k, n), dtype), Shape((groups,), jnp.int32)))


def _cross_entropy(platform: str, draw: random.Random) -> Call | None:
    tokens, width = draw.choice(_ROWS[platform]), draw.choice(_WIDTHS[platform][:6])
    words = draw.choice(_WORDS[platform])
    if tokens < 16 or not _fits(platform, tokens, width, words):
        return None
    dtype = _F32 if platform == "cpu" else _BF16
    arrays = (Shape((tokens, width), dtype), Shape((width, words), dtype), Shape((tokens,), jnp.int32))
    return Call(LinearCrossEntropy(), arrays, backward=draw.random() < 0.5)


_MAKERS: dict[str, Callable[[str, random.Random], Call | None]] = {
    "matmul": _matmul,
    "rms_norm": _rows_of(RmsNorm, 1),
    "softmax": _softmax,
    "attention": _attention,
    "layer_norm": _rows_of(LayerNorm, 2),
    "ragged_dot": _ragged,
    "linear_cross_entropy": _cross_entropy,
}


def calls(platform: str, each: int = 30, seed: str = "", only: str = "") -> Iterator[Call]:
    """Distinct calls of each operation, so many of each, in turn: a collection that is cut short has all operations.

    Another seed draws other calls; `only` is the name of one operation.
    """
    draws = {name: random.Random(f"{platform} {name}{seed}") for name in _MAKERS if only in ("", name)}
    seen: set[str] = set()
    for _ in range(each):
        for name in draws:
            make = _MAKERS[name]
            for _ in range(1000):
                call = make(platform, draws[name])
                text = "" if call is None else f"{name} {call.args} {sorted(call.kwargs.items())} {call.backward}"
                if call is not None and text not in seen:
                    seen.add(text)
                    yield call
                    break
