"""Row kernels in Triton's own language, a provider for GPUs that Mosaic does not serve once Pallas has no Triton."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from ..reverse import recomputed
from ..varying import all_alike

_WIDEST = 1 << 15
# A thread holds about so many elements of a row.
_EACH = 32


def softmax(x: Any, *, axis: int = -1) -> Any:
    """Softmax as the library's `Softmax.run` takes it."""

    def plain(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)

    # A cfg that is given by hand may have another axis than `supports_softmax` takes.
    rows = jnp.moveaxis(x, axis, -1)
    return jnp.moveaxis(recomputed(functools.partial(_by_rows, "softmax", 0.0), plain)(rows), -1, axis)


def rms_norm(x: Any, weight: Any = None, *, eps: float = 1e-6) -> Any:
    """The norm as the library's `RmsNorm.run` takes it."""

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return (normed * _over(weight, x)).astype(x.dtype)

    return recomputed(functools.partial(_by_rows, "rms", eps), plain)(x, _vector(weight, 1.0, x))


def layer_norm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-6) -> Any:
    """The norm as the library's `LayerNorm.run` takes it."""

    def plain(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        off = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = off * jax.lax.rsqrt(jnp.mean(off * off, axis=-1, keepdims=True) + eps)
        return (normed * _over(weight, x) + _over(bias, x)).astype(x.dtype)

    vectors = _vector(weight, 1.0, x), _vector(bias, 0.0, x)
    return recomputed(functools.partial(_by_rows, "layer", eps), plain)(x, *vectors)


def supports_softmax(x: Any, *, axis: int = -1, **static: Any) -> bool | str:
    """Rows along the last axis."""
    return _supports(x) if axis in (-1, x.ndim - 1) else f"axis={axis} is not the last one"


def supports_rms_norm(x: Any, *args: Any, **static: Any) -> bool | str:
    """Rows that one block holds."""
    return _supports(x)


supports_layer_norm = supports_rms_norm


def _supports(x: Any) -> bool | str:
    for name in ("jax_triton", "triton"):
        if find_spec(name) is None:
            return f"{name} is not installed: pip install 'ejkernel-ops[triton]'"
    if not 0 < x.shape[-1] <= _WIDEST or not x.size:
        return f"rows of {x.shape[-1]} are none that one block holds, 1 to {_WIDEST}"
    if x.dtype == jnp.float64:
        return "it computes in float32"
    return True


def _vector(given: Any, absent: float, x: Any) -> jax.Array:
    made: jax.Array = jnp.full(x.shape[-1:], absent, jnp.float32) if given is None else given
    return made


def _over(vector: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.expand_dims(vector.astype(jnp.float32), range(x.ndim - 1))


def _by_rows(kind: str, eps: float, x: jax.Array, *vectors: jax.Array) -> jax.Array:
    """The operation on every row, one block each; under vmap there are more rows."""

    @jax.custom_batching.custom_vmap
    def computed(x: jax.Array, *vectors: jax.Array) -> jax.Array:
        return _called(kind, eps, x, *vectors)

    @computed.def_vmap
    def rule(size: int, batched: Any, x: jax.Array, *vectors: jax.Array) -> tuple[jax.Array, bool]:
        if batched[0] and not any(batched[1:]):
            return computed(x, *vectors), True
        # Vectors of their own for each: one call after the other.
        whole = [
            one if has else jnp.broadcast_to(one, (size, *one.shape))
            for one, has in zip((x, *vectors), batched, strict=True)
        ]
        return jax.lax.map(lambda some: computed(*some), tuple(whole)), True

    made: jax.Array = computed(x, *vectors)
    return made


def _called(kind: str, eps: float, x: jax.Array, *vectors: jax.Array) -> jax.Array:
    calls = importlib.import_module("jax_triton").triton_call
    kernels = importlib.import_module(".jax_triton_kernels", __package__)
    (out,), operands = all_alike([jax.ShapeDtypeStruct(x.shape, x.dtype)], [x, *vectors])
    width = x.shape[-1]
    block = 1 << (width - 1).bit_length()
    # Its name changed with 0.4.
    made_like = "out_type" if "out_type" in inspect.signature(calls).parameters else "out_shape"
    sizes: dict[str, Any] = {"width": width, "block": block}
    if kind != "softmax":
        sizes["eps"] = eps
    made: jax.Array = calls(
        *operands,
        kernel=getattr(kernels, f"{kind}_rows"),
        grid=(math.prod(x.shape[:-1]),),
        name=f"library_{kind}_rows",
        num_warps=min(max(block // (32 * _EACH), 1), 16),
        **{made_like: out},
        **sizes,
    )
    return made
