"""Calls of the operations for serving and experts, as `library_accuracy_cases.py` has those of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import library

Values = Mapping[str, tuple[tuple[np.ndarray, ...], np.ndarray]]


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _residual_norm(x: Any, residual: Any, weight: Any) -> Any:
    summed = x + residual
    wide = _wide(summed)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return jnp.stack([(normed * _wide(weight)).astype(x.dtype), summed])


def _residual_values(rng: np.random.Generator) -> Values:
    x, residual, weight, dy = (rng.standard_normal(shape) for shape in ((40, 96), (40, 96), (96,), (2, 40, 96)))
    return {
        "normal": ((x, residual, weight), dy),
        "large": ((x * 100, residual * 100, weight), dy),
        "small": ((x / 64, residual / 64, weight), dy / 64),
        "common": ((x + 8, residual + 8, weight + 2), dy + 4),
        "cancelling": ((x + 8, residual / 16 - 8, weight), dy),
    }


def _residual() -> dict[str, Any]:
    config = library.ResidualNormConfig
    ways = {way: config(way) for way in ("xla", "recompute")}
    ways |= {"lanes": config("lanes", lanes=16), "triton": config("triton", rows=4, num_warps=1)}

    def call(*arrays: Any, **how: Any) -> Any:
        return jnp.stack(library.residual_norm(*arrays, **how))

    outputs = ("out", "dx", "dresidual", "dweight")
    return _case("residual_norm", call, _residual_norm, outputs, ways, _residual_values)


def _delta(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
    arrays = [jnp.moveaxis(_wide(x), 1, 0) for x in (q, k, v, g, beta)]

    def step(state: Any, now: Any) -> Any:
        q, k, v, g, beta = now
        state = state * jnp.exp(g)[..., None, None]
        error = (v - jnp.sum(state * k[..., None], axis=-2)) * beta[..., None]
        state = state + k[..., None] * error[..., None, :]
        return state, jnp.sum(state * q[..., None], axis=-2)

    return jnp.moveaxis(jax.lax.scan(step, _wide(state), tuple(arrays))[1], 0, 1).astype(v.dtype)


def _delta_values(rng: np.random.Generator) -> Values:
    normal, shape = rng.standard_normal, (1, 70, 2, 16)
    q, k, v, dy = (normal(shape) for _ in range(4))
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -np.abs(normal(shape[:3])) / 4, 1 / (1 + np.exp(-normal(shape[:3])))
    state = normal((1, 2, 16, 16)) / 4
    alike = unit + 4 * unit[:, :1]
    alike = alike / np.linalg.norm(alike, axis=-1, keepdims=True)
    return {
        "normal": ((q, unit, v, g, beta, state), dy),
        "large": ((q * 8, unit, v * 100, g, beta, state), dy * 8),
        "small": ((q / 64, unit, v / 64, g, beta, state / 64), dy),
        "strong decay": ((q, unit, v, g * 100, beta, state), dy),
        "like keys": ((q, alike, v, g / 16, beta, state), dy),
    }


def _gated_delta_rule() -> dict[str, Any]:
    config = library.GatedDeltaRuleConfig
    ways = {"scan": config("scan"), "chunked": config("chunked", 32), "levels": config("levels", 16)}

    def call(*arrays: Any, **how: Any) -> Any:
        return library.gated_delta_rule(*arrays[:5], initial_state=arrays[5], **how)[0]

    outputs = ("out", "dq", "dk", "dv", "dg", "dbeta", "dstate")
    return _case("gated_delta_rule", call, _delta, outputs, ways, _delta_values)


def _linear(q: Any, k: Any, v: Any, g: Any, state: Any) -> Any:
    arrays = [jnp.moveaxis(_wide(x), 1, 0) for x in (q, k, v, g)]

    def step(state: Any, now: Any) -> Any:
        q, k, v, g = now
        decay = jnp.exp(g)[..., None] if g.ndim == q.ndim else jnp.exp(g)[..., None, None]
        state = state * decay + k[..., None] * v[..., None, :]
        return state, jnp.sum(state * q[..., None], axis=-2)

    return jnp.moveaxis(jax.lax.scan(step, _wide(state), tuple(arrays))[1], 0, 1).astype(v.dtype)


def _linear_values(rng: np.random.Generator, rank: int) -> Values:
    normal, shape = rng.standard_normal, (1, 70, 2, 16)
    q, k, v, dy = (normal(shape) for _ in range(4))
    g, state = -np.abs(normal(shape[:rank])) / 4, normal((1, 2, 16, 16)) / 4
    return {
        "normal": ((q, k / 4, v, g, state), dy),
        "large": ((q * 4, k, v * 16, g, state), dy * 4),
        "small": ((q / 64, k, v / 64, g, state / 64), dy),
        "strong decay": ((q, k, v, g * 100, state), dy),
        "cancelling": ((q, k, v * np.where(np.arange(70) % 2, -1, 1)[:, None, None], g / 64, state), dy),
    }


def _gated_linear_attention(name: str, rank: int) -> dict[str, Any]:
    config = library.GatedDeltaRuleConfig
    ways = {"scan": config("scan"), "chunked": config("chunked", 16), "levels": config("levels", 16)}

    def call(*arrays: Any, **how: Any) -> Any:
        return library.gated_linear_attention(*arrays[:4], initial_state=arrays[4], **how)[0]

    def values(rng: np.random.Generator) -> Values:
        return _linear_values(rng, rank)

    outputs = ("out", "dq", "dk", "dv", "dg", "dstate")
    return _case("gated_linear_attention", call, _linear, outputs, ways, values) | {"name": name}


def _decode(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> Any:
    k, v = (x[table].reshape(table.shape[0], -1, *x.shape[2:]) for x in (k, v))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqhd,bshd->bhqs", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
    seen = jnp.arange(k.shape[1]) < lengths[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqs,bshd->bqhd", weights.astype(v.dtype), v, preferred_element_type=wide).astype(q.dtype)


def _decode_values(rng: np.random.Generator) -> Values:
    normal, table = rng.standard_normal, rng.permutation(16).reshape(2, 8).astype(np.int32)
    q, k, v, dy = normal((2, 1, 4, 16)), normal((16, 16, 2, 16)), normal((16, 16, 2, 16)), normal((2, 1, 4, 16))
    rest = (np.array([128, 77], np.int32), table)
    return {
        "normal": ((q, k, v, *rest), dy),
        "large": ((8 * q, 8 * k, 100 * v, *rest), 100 * dy),
        "small": ((q / 64, k / 64, v / 256, *rest), dy / 256),
        "common value": ((q, k, v + 16, *rest), dy + 1),
        "common key": ((q, k + 16, v, *rest), dy),
    }


def _decode_attention() -> dict[str, Any]:
    config = library.DecodeAttentionConfig
    ways = {"gather": config("gather"), "fused": config("fused"), "split": config("split", parts=4)}
    ways |= {"loop": config("loop", block=32), "triton": config("triton", 2, 32, 1, 1), "cudnn": config("cudnn")}

    def call(q: Any, k: Any, v: Any, lengths: Any, table: Any, **how: Any) -> Any:
        return library.decode_attention(q, k, v, table, lengths, **how)

    return _case("decode_attention", call, _decode, ("out", "dq", "dk", "dv"), ways, _decode_values)


def _quantized(x: Any, q: Any, scales: Any) -> Any:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (jnp.matmul(x, q.astype(x.dtype), preferred_element_type=wide) * scales.astype(wide)).astype(x.dtype)


def _quantized_values(rng: np.random.Generator) -> Values:
    normal, q = rng.standard_normal, rng.integers(-127, 128, (128, 64)).astype(np.int8)
    x, dy, scales = normal((12, 128)), normal((12, 64)), rng.uniform(0.5, 1.5, 64) / 400
    return {
        "normal": ((x, q, scales), dy),
        "large": ((x * 4, q, scales * 8), dy),
        "small": ((x / 64, q, scales / 8), dy / 8),
        "common": ((x + 1, q, scales), dy + 1),
    }


def _quantized_matmul() -> dict[str, Any]:
    config = library.QuantizedMatmulConfig
    ways = {way: config(way) for way in ("dequantize", "scaled", "summed")} | {"triton": config("triton", 32, 32, 1, 1)}
    return _case(
        "quantized_matmul", library.quantized_matmul, _quantized, ("out", "dx", "dscales"), ways, _quantized_values
    )


def _in_groups(x: Any, q: Any, scales: Any) -> Any:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    weights = q.astype(wide) * jnp.repeat(scales.astype(wide), q.shape[0] // scales.shape[0], axis=0)
    return jnp.matmul(x, weights.astype(x.dtype), preferred_element_type=wide).astype(x.dtype)


def _grouped_matmul() -> dict[str, Any]:
    def call(*arrays: Any, **how: Any) -> Any:
        return library.quantized_matmul(*arrays, group=32, **how)

    def values(rng: np.random.Generator) -> Values:
        of_groups = rng.uniform(0.5, 1.5, (4, 1))
        return {kind: ((x, q, scales * of_groups), dy) for kind, ((x, q, scales), dy) in _quantized_values(rng).items()}

    return _quantized_matmul() | {
        "name": "groups",
        "call": call,
        "plain": _in_groups,
        "exact": _in_groups,
        "values": values,
    }


def _sent(x: Any, logits: Any) -> Any:
    experts = jax.lax.top_k(logits, 2)[1].reshape(-1)
    return x[jnp.argsort(experts, stable=True) // 2]


def _dispatch_values(rng: np.random.Generator) -> Values:
    x, logits, dy = (rng.standard_normal(shape) for shape in ((24, 32), (24, 6), (48, 32)))
    given = {"normal": (x, dy), "large": (x * 100, dy * 1000), "small": (x / 256, dy / 256), "common": (x + 8, dy + 8)}
    # Both copies of a token, wherever they are, pull against each other.
    given["cancelling"] = (x, dy * 16 * np.where(np.arange(48) % 2, -1, 1)[:, None])
    return {kind: ((x, logits), dy) for kind, (x, dy) in given.items()}


def _moe_dispatch() -> dict[str, Any]:
    ways = {way: library.MoeDispatchConfig(way) for way in ("count", "sort")}

    def call(x: Any, logits: Any, **how: Any) -> Any:
        return library.moe_dispatch(x, logits, k=2, **how).rows

    return _case("moe_dispatch", call, _sent, ("out", "dx", "dlogits"), ways, _dispatch_values)


def _combined(rows: Any, weights: Any, places: Any) -> Any:
    return jnp.sum(_wide(rows)[places] * _wide(weights)[..., None], axis=1).astype(rows.dtype)


def _combine_values(rng: np.random.Generator) -> Values:
    normal, places = rng.standard_normal, rng.permutation(80).reshape(20, 4).astype(np.int32)
    rows, weights, dy = normal((80, 32)), rng.dirichlet(np.ones(4), 20), normal((20, 32))
    return {
        "normal": ((rows, weights, places), dy),
        "large": ((rows * 100, weights, places), dy * 32),
        "small": ((rows / 64, weights, places), dy / 64),
        "common": ((rows + 8, weights, places), dy + 4),
    }


def _moe_combine() -> dict[str, Any]:
    ways = {way: library.MoeCombineConfig(way) for way in ("unrolled", "reduce", "scatter")}
    return _case("moe_combine", library.moe_combine, _combined, ("out", "drows", "dweights"), ways, _combine_values)


def _case(operation: str, call: Any, plain: Any, outputs: tuple[str, ...], ways: Any, values: Any) -> dict[str, Any]:
    given = {"operation": operation, "name": "", "call": call, "plain": plain, "exact": plain}
    return given | {"outputs": outputs, "ways": ways, "values": values}


CASES = [
    _residual(),
    _gated_delta_rule(),
    _gated_linear_attention("", 3),
    _gated_linear_attention("by rows", 4),
    _decode_attention(),
    _quantized_matmul(),
    _grouped_matmul(),
    _moe_dispatch(),
    _moe_combine(),
]
