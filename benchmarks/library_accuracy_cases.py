"""Calls of library operations with normal, large, small and cancelling values, beside what plain JAX computes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import library_accuracy_selecting
import library_accuracy_serving
import numpy as np

from ejkernel import library
from ejkernel.library.jax_pallas import gpu_kernels

# Of a kind of values: the floating-point arrays of a call in float64, and the gradient of its result.
Values = Mapping[str, tuple[tuple[np.ndarray, ...], np.ndarray]]


@dataclass(frozen=True)
class Case:
    """A call: `call(*arrays, cfg=, executor=)`, `plain(*arrays)` in JAX, and `exact`, the same for float64."""

    operation: str
    name: str
    call: Callable[..., Any]
    plain: Callable[..., Any]
    exact: Callable[..., Any]
    # Of the result and of each array's gradient.
    outputs: tuple[str, ...]
    ways: Mapping[str, Any]
    values: Callable[[np.random.Generator], Values]
    # What JAX has of a way's own name: such a way is as far off as JAX's kernel, and compared with that.
    ready: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _attention_values(rng: np.random.Generator, bias: tuple[int, ...] | None) -> Values:
    shape, normal = (2, 128, 4, 32), rng.standard_normal
    x, q, k, v, dy = (normal(shape) for _ in range(5))
    added = (normal(bias),) if bias else ()
    return {
        "normal": ((q, k, v, *added), dy),
        # A query's own key outweighs the others, and so does its share of the gradient.
        "one array": ((x, x, x, *added), x),
        "large": ((8 * q, 8 * k, 100 * v, *(10 * b for b in added)), 100 * dy),
        "small": ((q / 64, k / 64, v / 256, *(b / 256 for b in added)), dy / 256),
        "common value": ((q, k, v + 16, *added), dy + 1),
        "common key": ((q, k + 16, v, *added), dy),
    }


def _attention_exact(q: Any, k: Any, v: Any, bias: Any = 0.0) -> Any:
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v)


def _attention(name: str, bias: tuple[int, ...] | None = None) -> Case:
    config = library.AttentionConfig
    ways = {
        "xla": config("xla"),
        "sliced": config("sliced", block_q=48),
        "chunked": config("chunked", block_q=48, block_k=40),
        "cudnn": config("cudnn"),
        "pallas": config("pallas", block_q=32, block_k=32, block_back=32),
    }

    def call(q: Any, k: Any, v: Any, bias: Any = None, **how: Any) -> Any:
        return library.attention(q, k, v, bias=bias, **how)

    def pallas(q: Any, k: Any, v: Any) -> Any:
        ready = gpu_kernels("attention")
        how = {"num_warps": 4, "num_stages": 2, "interpret": jax.default_backend() != "gpu"}
        return ready.mha(q, k, v, None, q.shape[-1] ** -0.5, False, ready.BlockSizes(*[32] * 6), **how)

    def cudnn(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        # There a bias has all queries and keys.
        whole = bias if bias is None else jnp.broadcast_to(bias, (*bias.shape[:2], q.shape[1], k.shape[1]))
        return jax.nn.dot_product_attention(q, k, v, whole, implementation="cudnn")

    ready = {"pallas": pallas, "cudnn": cudnn}
    outputs = ("out", "dq", "dk", "dv", "dbias")[: 5 if bias else 4]
    values = functools.partial(_attention_values, bias=bias)
    plain = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    return Case("attention", name, call, plain, _attention_exact, outputs, ways, values, ready)


def _matmul_values(rng: np.random.Generator, arrays: int) -> Values:
    (m, k, n), normal = (60, 256, 70), rng.standard_normal
    a, b, bias, dy = normal((m, k)) / 16, normal((k, n)), normal((n,)), normal((m, n))
    half, other = a[:, : k // 2], b[: k // 2]
    pairs = np.concatenate([half, -half], 1), np.concatenate([other, other + normal(other.shape) / 32])
    found = {
        "normal": ((a, b, bias), dy),
        "large": ((a * 64, b * 64, bias * 64), dy * 64),
        "small": ((a / 64, b / 64, bias / 256), dy / 256),
        "cancelling": ((*pairs, bias / 32), dy + 4),
        "common": ((a + 1, b + 1, bias), dy + 4),
    }
    return {kind: (given[:arrays], pulled) for kind, (given, pulled) in found.items()}


def _matmul(name: str, plain: Any, exact: Any, arrays: int, **options: Any) -> Case:
    config = library.MatmulConfig
    ways = {way: config(way) for way in ("xla", "narrow", "wide", "upcast")}
    ways["triton"] = config("triton", 16, 32, 16, num_warps=2, num_stages=2)
    call = functools.partial(library.matmul, **options)
    values = functools.partial(_matmul_values, arrays=arrays)
    return Case("matmul", name, call, plain, exact, ("out", "da", "db", "dbias")[: arrays + 1], ways, values)


def _gelu(a: Any, b: Any, bias: Any) -> Any:
    return jax.nn.gelu(a @ b + bias)


def _product(a: Any, b: Any, **how: Any) -> Any:
    return jnp.matmul(a, b, **how)


def _norm_values(rng: np.random.Generator, vectors: int) -> Values:
    normal = rng.standard_normal
    x, dy, given = normal((64, 384)), normal((64, 384)), tuple(normal((384,)) for _ in range(vectors))
    return {
        "normal": ((x, *given), dy),
        "large": ((x * 100, *(v * 16 for v in given)), dy * 16),
        "small": ((x / 512, *(v / 16 for v in given)), dy / 256),
        "common": ((x + 16, *given), dy + 16),
        # The gradient of a row along itself cancels.
        "one array": ((x, *given), x * 4),
    }


def _rms_norm(x: Any, weight: Any) -> Any:
    normed = _wide(x) * jax.lax.rsqrt(jnp.mean(_wide(x) ** 2, -1, keepdims=True) + 1e-6)
    return (normed * _wide(weight)).astype(x.dtype)


def _layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    off = _wide(x) - jnp.mean(_wide(x), -1, keepdims=True)
    normed = off * jax.lax.rsqrt(jnp.mean(off * off, -1, keepdims=True) + 1e-6)
    return (normed * _wide(weight) + _wide(bias)).astype(x.dtype)


def _norm(operation: str, call: Any, config: Any, plain: Any, vectors: int, *more: str) -> Case:
    ways = {way: config(way) for way in ("xla", "recompute", *more)}
    ways |= {"lanes": config("lanes", lanes=16), "triton": config("triton", rows=2, num_warps=4)}
    outputs = ("out", "dx", "dweight", "dbias")[: vectors + 2]
    return Case(operation, "", call, plain, plain, outputs, ways, functools.partial(_norm_values, vectors=vectors))


def _softmax_values(rng: np.random.Generator) -> Values:
    x, dy = rng.standard_normal((64, 4096)), rng.standard_normal((64, 4096))
    return {
        "normal": ((x,), dy),
        "large": ((x * 30,), dy * 100),
        "small": ((x / 256,), dy / 16),
        "common": ((x + 100,), dy),
        "common gradient": ((x,), dy + 16),
    }


def _softmax() -> Case:
    config = library.SoftmaxConfig
    ways = {"xla": config("xla"), "jax": config("jax"), "lanes": config("lanes", lanes=16)}
    ways |= {"split": config("split", parts=4), "triton": config("triton", rows=2, num_warps=4)}
    return Case("softmax", "", library.softmax, jax.nn.softmax, jax.nn.softmax, ("out", "dx"), ways, _softmax_values)


# Rows of no group as well.
_GROUPS = (50, 0, 70, 20)


def _ragged_values(rng: np.random.Generator, wide: bool) -> Values:
    normal, sizes = rng.standard_normal, np.array(_GROUPS, np.int32)
    lhs, rhs, dy = normal((160, 128)), normal((4, 128, 128)) / 11, normal((160, 128))
    found = {
        "normal": ((lhs, rhs, sizes), dy),
        "large": ((lhs * 32, rhs * 32, sizes), dy * 32),
        "small": ((lhs / 64, rhs / 64, sizes), dy / 512),
        "common": ((lhs + 4, rhs + 1, sizes), dy + 4),
        "cancelling": ((lhs + 4, rhs + 1, sizes), dy - dy.mean(axis=1, keepdims=True)),
    }
    if wide:
        # Beyond what float16 has.
        found["large gradient"] = ((lhs / 1e4, rhs / 1e4, sizes), dy * 1e5)
        found["small gradient"] = ((lhs * 100, rhs * 100, sizes), dy / 1e6)
    return found


def _ragged_exact(lhs: Any, rhs: Any, sizes: Any) -> Any:
    stops = np.cumsum((0, *_GROUPS))
    parts = [lhs[low:high] @ rhs[group] for group, (low, high) in enumerate(itertools.pairwise(stops))]
    return jnp.concatenate([*parts, jnp.zeros((lhs.shape[0] - stops[-1], rhs.shape[2]), lhs.dtype)])


def _ragged_dot(name: str, **options: Any) -> Case:
    config = library.RaggedDotConfig
    ways = {"xla": config("xla"), "masked": config("masked"), "tiled": config("tiled", block_m=16)}
    ways |= {
        "triton": config("triton", 16, 64, 32),
        "mosaic": config("mosaic", 128, 128, 64, None, 4),
        "mosaic_jax": config("mosaic_jax"),
    }
    call, plain = (functools.partial(fn, **options) for fn in (library.ragged_dot, jax.lax.ragged_dot))
    values = functools.partial(_ragged_values, wide=bool(options))
    return Case("ragged_dot", name, call, plain, _ragged_exact, ("out", "dlhs", "drhs"), ways, values)


def _loss_values(rng: np.random.Generator, each: bool) -> Values:
    # XLA of JAX 0.10 adds up products of more words in another order than those of a chunk, and errs less by a third.
    (tokens, depth, words), normal = (96, 32, 64), rng.standard_normal
    hidden, weight = normal((tokens, depth)), normal((depth, words)) / 4
    labels = rng.integers(0, words, tokens).astype(np.int32)
    labels[::7] = -100
    dy = normal((tokens,)) if each else np.array(1.7)
    return {
        "normal": ((hidden, weight, labels), dy),
        "large": ((hidden * 32, weight * 4, labels), dy * 100),
        "small": ((hidden / 64, weight / 64, labels), dy / 16),
        "large gradient": ((hidden, weight, labels), dy * 2**12),
        "common word": ((hidden, weight + 2, labels), dy),
        "common token": ((hidden + 4, weight, labels), dy),
        "like tokens": ((hidden / 4 + 4 * normal((depth,)), weight, labels), dy),
    }


def _loss(reduction: str) -> Case:
    config = library.LinearCrossEntropyConfig
    ways = {
        "xla": config("xla"),
        "chunked_tokens": config("chunked_tokens", 24),
        "chunked_vocab": config("chunked_vocab", 20),
        "wide": config("chunked_tokens", 24, wide=True),
        "triton": config("triton", 24, block=32),
        "triton, whole": config("triton"),
    }

    def plain(hidden: Any, weight: Any, labels: Any) -> Any:
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        logits = jnp.einsum("td,dv->tv", hidden, weight, preferred_element_type=wide)
        at_label = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
        losses = jnp.where(labels >= 0, jax.nn.logsumexp(logits, axis=1) - at_label, 0)
        return {"none": losses, "sum": jnp.sum(losses), "mean": jnp.sum(losses) / jnp.sum(labels >= 0)}[reduction]

    call = functools.partial(library.linear_cross_entropy, reduction=reduction)
    values = functools.partial(_loss_values, each=reduction == "none")
    outputs = ("loss", "dhidden", "dweight")
    return Case("linear_cross_entropy", reduction, call, plain, plain, outputs, ways, values)


_FLOAT32 = {"preferred_element_type": jnp.float32}
CASES = [
    _attention("no bias"),
    _attention("bias", (2, 4, 128, 128)),
    _attention("shared bias", (1, 4, 1, 128)),
    _matmul("bias, gelu", _gelu, _gelu, 3, activation="gelu"),
    _matmul("", _product, _product, 2),
    _matmul("to float32", functools.partial(_product, **_FLOAT32), _product, 2, **_FLOAT32),
    _norm("rms_norm", library.rms_norm, library.RmsNormConfig, _rms_norm, 1),
    _norm("layer_norm", library.layer_norm, library.LayerNormConfig, _layer_norm, 2, "one_pass"),
    _softmax(),
    _ragged_dot(""),
    _ragged_dot("to float32", **_FLOAT32),
    *(_loss(reduction) for reduction in ("mean", "sum", "none")),
    *(Case(**case) for case in (*library_accuracy_serving.CASES, *library_accuracy_selecting.CASES)),
]
