"""Calls of the operations that select or multiply float8, as `library_accuracy_cases.py` has those of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ejkernel import library

Values = Mapping[str, tuple[tuple[np.ndarray, ...], np.ndarray]]

_FLOAT8 = ml_dtypes.float8_e4m3fn
_KEPT, _SHARE, _DEGREES = 8, 0.75, 0.7


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _top_k_values(rng: np.random.Generator) -> Values:
    x, dy = rng.standard_normal((12, 512)), rng.standard_normal((12, 5))
    return {
        "normal": ((x,), dy),
        "large": ((x * 1e4,), dy * 100),
        "small": ((x / 4096,), dy / 256),
        "common": ((x / 64 + 8,), dy),
        # Few values, so that most are equal, and all below zero.
        "equal": ((np.round(x) - 9,), dy),
    }


def _top_k() -> dict[str, Any]:
    config = library.TopKConfig
    ways = {"xla": config("xla"), "parts, sorted": config("parts", 16, "sort"), "parts": config("parts", 32, "count")}
    ways |= {"bits": config("bits", bits=4), "triton": config("triton", rows=4, num_warps=1)}
    ways |= {"triton, lists": config("triton_lists", rows=4, num_warps=4)}

    def call(x: Any, **how: Any) -> Any:
        return library.top_k(x, 5, **how)[0]

    return _case("top_k", "", call, lambda x: jax.lax.top_k(x, 5)[0], ("out", "dx"), ways, _top_k_values)


def _noise(shape: Any) -> Any:
    # The same in every precision.
    return jax.random.gumbel(jax.random.key(0), shape, jnp.float32)


def _score(logits: Any, words: Any) -> Any:
    """The noisy logit of each drawn word: the largest of its row where the right word was drawn."""
    wide = _wide(logits)
    kept = jnp.take_along_axis(wide / _DEGREES + _noise(logits.shape), words[:, None], axis=1)[:, 0]
    return kept.astype(logits.dtype)


def _drawn(logits: Any) -> Any:
    wide = _wide(logits) / _DEGREES
    # Words as likely as the last one that is kept are kept, too.
    near = jnp.where(wide >= jax.lax.top_k(wide, _KEPT)[0][:, -1:], wide, -jnp.inf)
    in_order = -jnp.sort(-near, axis=-1)
    shares = jax.nn.softmax(in_order, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    least = jnp.min(jnp.where(before < _SHARE, in_order, jnp.inf), axis=-1, keepdims=True)
    noisy = jnp.where(near >= least, wide + _noise(logits.shape), -jnp.inf)
    return _score(logits, jnp.argmax(noisy, axis=-1))


def _sample_values(rng: np.random.Generator) -> Values:
    logits, dy = rng.standard_normal((16, 512)), rng.standard_normal(16)
    return {
        "normal": ((logits,), dy),
        "large": ((logits * 100,), dy * 100),
        "small": ((logits / 256,), dy / 256),
        "common": ((logits + 16,), dy),
    }


def _sample() -> dict[str, Any]:
    config = library.SampleConfig
    ways = {"sort": config("sort"), "parts": config("parts"), "bits": config("bits", 1), "4 bits": config("bits", 4)}
    ways["recompute"] = config("recompute", 2)

    def call(logits: Any, **how: Any) -> Any:
        given = {"temperature": _DEGREES, "top_k": _KEPT, "top_p": _SHARE}
        return _score(logits, library.sample(jax.random.key(0), logits, **given, **how))

    return _case("sample", "", call, _drawn, ("out", "dlogits"), ways, _sample_values)


def _float8(bits: Any) -> Any:
    return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)


def _spread(scales: Any, shape: Any) -> Any:
    for axis in (0, 1):
        scales = scales if scales.ndim < 2 else jnp.repeat(scales, shape[axis] // scales.shape[axis], axis=axis)
    return scales


def _scaled(a: Any, b: Any, a_scales: Any, b_scales: Any) -> Any:
    """Computes in the dtype of the result, as a program would."""
    kind = a_scales.dtype
    sides = [
        (x.astype(_wide(s).dtype) * _spread(_wide(s), x.shape))
        for x, s in ((_float8(a), a_scales), (_float8(b), b_scales))
    ]
    made = jnp.matmul(*(x.astype(kind) for x in sides), preferred_element_type=_wide(a_scales).dtype)
    return made.astype(kind)


def _scaled_values(rng: np.random.Generator, blocks: bool) -> Values:
    normal = rng.standard_normal
    a, b, dy = normal((24, 256)) * 16, normal((256, 32)) * 16, normal((24, 32))
    shapes = ((24, 2), (2, 16)) if blocks else ((24, 1), (1, 32))
    first, second = (rng.uniform(0.5, 1.5, shape) / 16 for shape in shapes)

    def of(a: Any, b: Any, one: float, dy: Any) -> Any:
        bits = [np.asarray(x).astype(_FLOAT8).view(np.uint8) for x in (a, b)]
        return (*bits, np.asarray(first * one), np.asarray(second * one)), dy

    half = np.concatenate([b[:128], -b[:128] + normal((128, 32))])
    return {
        "normal": of(a, b, 1.0, dy),
        "large": of(a * 4, b * 4, 2.0, dy),
        "small": of(a / 8, b / 8, 1 / 64, dy / 8),
        "common": of(a + 32, b, 1.0, dy + 4),
        "cancelling": of(np.concatenate([a[:, :128]] * 2, axis=1), half, 1.0, dy),
    }


def _scaled_matmul(name: str, blocks: bool) -> dict[str, Any]:
    ways = {way: library.ScaledMatmulConfig(way) for way in ("float32", "bfloat16", "float8", "blocks")}

    def call(a: Any, b: Any, a_scales: Any, b_scales: Any, **how: Any) -> Any:
        kind = {"preferred_element_type": a_scales.dtype}
        return library.scaled_matmul(_float8(a), _float8(b), a_scales, b_scales, **kind, **how)

    def values(rng: np.random.Generator) -> Values:
        return _scaled_values(rng, blocks)

    return _case("scaled_matmul", name, call, _scaled, ("out", "da_scales", "db_scales"), ways, values)


def _case(
    operation: str, name: str, call: Any, plain: Any, outputs: tuple[str, ...], ways: Any, values: Any
) -> dict[str, Any]:
    given = {"operation": operation, "name": name, "call": call, "plain": plain, "exact": plain}
    return given | {"outputs": outputs, "ways": ways, "values": values}


CASES = [_top_k(), _sample(), _scaled_matmul("rows, columns", False), _scaled_matmul("blocks", True)]
