"""The cases of `mosaic_gpu.py`: shapes, ways and the plain computation of each operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
from mosaic_gpu_gradients import NormGradient, launches

from ejkernel.library import (
    Attention,
    AttentionConfig,
    LayerNorm,
    LayerNormConfig,
    LinearCrossEntropy,
    LinearCrossEntropyConfig,
    Matmul,
    MatmulConfig,
    RaggedDot,
    RaggedDotConfig,
    RmsNorm,
    RmsNormConfig,
    Softmax,
    SoftmaxConfig,
)
from ejkernel.library.mosaic import shelf, spread


@dataclass(frozen=True)
class MosaicCase:
    """A call, its ways, and what the hardware needs for it at least."""

    name: str
    kernel: Callable[[], Any]
    cfgs: Sequence[Any]
    plain: Callable[..., Any]
    make: Callable[[Any], tuple[Any, ...]]
    bytes: float
    flops: float = 0.0
    backward: bool = False
    # Does the kernel pull gradients back itself on every device, rather than JAX?
    own_gradient: bool = False
    static: dict[str, Any] = field(default_factory=dict)


def narrow(rng: Any, *shape: int) -> Any:
    """Random values of bfloat16."""
    return rng.standard_normal(shape, dtype="float32").astype(ml_dtypes.bfloat16)


def rows_of(kind: Any, config: Any, shape: tuple[int, int], vectors: int, backward: bool, plain: Any) -> MosaicCase:
    """A case of an operation on rows."""
    rows, width = shape
    like = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    cfgs = [config("mosaic", num_warps=w, each=e) for w, e in spread.launches(like)]
    if kind is Softmax:
        cfgs = [*(config("mosaic", num_warps=w, each=e, shared=True) for w, e in shelf.launches(like)), *cfgs]
    if width <= 32768:
        warps = min(max((1 << (width - 1).bit_length()) // 1024, 1), 16)
        cfgs.append(config("triton", rows=1, num_warps=warps))
    if kind is Softmax:
        cfgs.append(config("online"))

    def make(rng: Any) -> tuple[Any, ...]:
        return (narrow(rng, *shape), *(rng.standard_normal(width, dtype="float32") for _ in range(vectors)))

    moved = rows * width * 2 * (3 + 2 if backward else 2)
    name = f"{kind.op_id} {rows}x{width}{' with gradient' if backward else ''}"
    return MosaicCase(name, kind, cfgs, plain, make, moved, backward=backward)


def plain_softmax(x: Any) -> Any:
    """Plain JAX."""
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


def plain_rms(x: Any, weight: Any) -> Any:
    """Plain JAX."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * weight).astype(x.dtype)


def plain_layer(x: Any, weight: Any, bias: Any) -> Any:
    """Plain JAX."""
    wide = x.astype(jnp.float32)
    off = wide - jnp.mean(wide, -1, keepdims=True)
    return (off * jax.lax.rsqrt(jnp.mean(off * off, -1, keepdims=True) + 1e-6) * weight + bias).astype(x.dtype)


def softmax_cases() -> list[MosaicCase]:
    """Wide and odd rows, and narrow ones."""
    shapes = [(4096, 32000), (2048, 50257), (512, 128256), (8192, 2048)]
    return [rows_of(Softmax, SoftmaxConfig, shape, 0, False, plain_softmax) for shape in shapes]


def rms_cases() -> list[MosaicCase]:
    """Cases of rms_norm, with gradient and forward."""
    cases = [((4096, 4096), True), ((8192, 7168), True), ((4096, 4096), False), ((65536, 1024), False)]
    return [rows_of(RmsNorm, RmsNormConfig, shape, 1, back, plain_rms) for shape, back in cases]


def layer_cases() -> list[MosaicCase]:
    """Cases of layer_norm, with gradient and forward."""
    cases = [((8192, 4096), True), ((32768, 1024), True), ((8192, 4096), False)]
    return [rows_of(LayerNorm, LayerNormConfig, shape, 2, back, plain_layer) for shape, back in cases]


def gradient_cases() -> list[MosaicCase]:
    """The gradients of rms_norm, layer_norm and residual_norm alone."""
    found = []
    shapes = ((4096, 4096, plain_rms), (8192, 7168, plain_rms), (8192, 4096, plain_layer), (32768, 1024, plain_layer))
    for rows, width, forward in shapes:
        count = 2 if forward is plain_layer else 1

        def make(rng: Any, rows: int = rows, width: int = width, count: int = count) -> tuple[Any, ...]:
            vectors = (rng.standard_normal(width, dtype="float32") for _ in range(count))
            return narrow(rng, rows, width), narrow(rng, rows, width), *vectors

        def plain(x: Any, dy: Any, *vectors: Any, forward: Any = forward) -> Any:
            return jax.vjp(forward, x, *vectors)[1](dy)

        name = f"gradient of {forward.__name__.removeprefix('plain_')}_norm {rows}x{width}"
        found.append(MosaicCase(name, NormGradient, launches(width), plain, make, rows * width * 6.0))

    def make_sum(rng: Any) -> tuple[Any, ...]:
        return *(narrow(rng, 8192, 4096) for _ in range(3)), rng.standard_normal(4096, dtype="float32")

    def plain_sum(x: Any, dy: Any, other: Any, weight: Any) -> Any:
        back, of_weight = jax.vjp(plain_rms, x, weight)[1](dy)
        return back + other, of_weight

    name, static = "gradient of residual_norm 8192x4096", {"added": True}
    cfgs = launches(4096, 1)
    found.append(MosaicCase(name, NormGradient, cfgs, plain_sum, make_sum, 8192 * 4096 * 8.0, static=static))
    return found


def cross_entropy_cases() -> list[MosaicCase]:
    """Cases with gradient: half of the tokens at a time, by either backend."""
    found = []
    for tokens, depth, words in ((2048, 1024, 151936), (4096, 1024, 50257)):

        def make(rng: Any, tokens: int = tokens, depth: int = depth, words: int = words) -> tuple[Any, ...]:
            weight = narrow(rng, depth, words) * ml_dtypes.bfloat16(0.05)
            return narrow(rng, tokens, depth), weight, rng.integers(0, words, tokens).astype("int32")

        def plain(hidden: Any, weight: Any, labels: Any) -> Any:
            logits = jnp.matmul(hidden, weight, preferred_element_type=jnp.float32)
            at = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
            return jnp.mean(jax.nn.logsumexp(logits, axis=1) - at)

        launches = ((2048, 8), (4096, 16), (1024, 4))
        cfgs = [LinearCrossEntropyConfig("mosaic", tokens // 2, block=b, num_warps=w) for b, w in launches]
        cfgs.append(LinearCrossEntropyConfig("triton", tokens // 2, block=2048, num_warps=8))
        name = f"cross entropy with gradient {tokens}x{depth}x{words}"
        work = 6.0 * tokens * depth * words
        found.append(
            MosaicCase(name, LinearCrossEntropy, cfgs, plain, make, 0.0, work, backward=True, own_gradient=True)
        )
    return found


def matmul_cases() -> list[MosaicCase]:
    """Products with bias and activation, and without."""
    found = []
    for m, k, n, activation in ((4096, 4096, 4096, None), (8192, 4096, 14336, "gelu"), (1000, 2048, 5632, "silu")):

        def make(rng: Any, m: int = m, k: int = k, n: int = n) -> tuple[Any, ...]:
            return narrow(rng, m, k), narrow(rng, k, n) * ml_dtypes.bfloat16(0.02), narrow(rng, n)

        def plain(a: Any, b: Any, bias: Any, activation: Any = activation) -> Any:
            total = jnp.matmul(a, b, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)
            return (total if activation is None else getattr(jax.nn, activation)(total)).astype(a.dtype)

        tiles = ((128, 256, 3), (128, 128, 4), (128, 128, 5), (256, 128, 3))
        cfgs = [MatmulConfig("mosaic", m_, n_, 64, num_stages=s) for m_, n_, s in tiles]
        cfgs.append(MatmulConfig("triton", 128, 256, 64, num_warps=8, num_stages=3))
        static = {} if activation is None else {"activation": activation}
        name = f"matmul {m}x{k}x{n} {activation}"
        found.append(MosaicCase(name, Matmul, cfgs, plain, make, 0.0, 2.0 * m * k * n, static=static))
    return found


def ragged_cases() -> list[MosaicCase]:
    """Grouped products, even and skewed, forward and with gradients."""
    found = []
    shapes = ((8192, 4096, 4096, 8, False), (32768, 2048, 768, 128, False), (8192, 4096, 4096, 8, True))
    for rows, depth, width, groups, backward in shapes:

        def make(rng: Any, rows: int = rows, depth: int = depth, width: int = width, groups: int = groups) -> Any:
            sizes = rng.multinomial(rows - 24, rng.dirichlet([2.0] * groups)).astype("int32")
            matrices = narrow(rng, groups, depth, width) * ml_dtypes.bfloat16(0.02)
            return narrow(rng, rows, depth), matrices, sizes

        def plain(lhs: Any, rhs: Any, sizes: Any, way: str = "masked" if groups <= 8 else "tiled") -> Any:
            return RaggedDot().run(lhs, rhs, sizes, cfg=RaggedDotConfig(way, 256))

        cfgs = [RaggedDotConfig("mosaic", 128, n, 64, None, s) for n, s in ((128, 4), (128, 5), (64, 6))]
        cfgs += [RaggedDotConfig("mosaic_jax", 128, 128, 64, None, 4), RaggedDotConfig("triton", 128, 128, 64, 4, 3)]
        name = f"ragged_dot {rows}x{depth} by {groups} of {width}{' with gradients' if backward else ''}"
        work = 2.0 * rows * depth * width * (3 if backward else 1)
        moved = 2.0 * (rows * depth + groups * depth * width + rows * width)
        own = {"backward": backward, "own_gradient": backward}
        found.append(MosaicCase(name, RaggedDot, cfgs, plain, make, moved, work, **own))
    return found


def attention_cases() -> list[MosaicCase]:
    """Causal attention, heads of 64, 128 and 256."""
    found = []
    shapes = ((1, 4096, 32, 8, 128), (2, 4096, 16, 8, 256), (4, 2048, 16, 16, 64))
    for batch, length, heads, key_heads, depth in shapes:

        def make(rng: Any, b: int = batch, t: int = length, h: int = heads, g: int = key_heads, d: int = depth) -> Any:
            return narrow(rng, b, t, h, d), narrow(rng, b, t, g, d), narrow(rng, b, t, g, d)

        def plain(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        tiles = ((128, 2), (64, 3), (64, 2), (128, 3)) if depth < 256 else ((64, 2),)
        cfgs = [AttentionConfig("mosaic", 128, k, num_stages=s) for k, s in tiles]
        cfgs.append(AttentionConfig("cudnn"))
        name = f"causal attention {batch}x{length}, {heads} heads on {key_heads} of {depth}"
        work = 2.0 * batch * heads * length * length * depth
        static = {"causal": True, "scale": depth**-0.5}
        found.append(MosaicCase(name, Attention, cfgs, plain, make, 0.0, work, static=static))
    return found


CASES: dict[str, Callable[[], list[MosaicCase]]] = {
    "softmax": softmax_cases,
    "rms_norm": rms_cases,
    "layer_norm": layer_cases,
    "norm_gradient": gradient_cases,
    "cross_entropy": cross_entropy_cases,
    "matmul": matmul_cases,
    "ragged_dot": ragged_cases,
    "attention": attention_cases,
}
