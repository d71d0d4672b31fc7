"""Attention in blocks of queries: each against the keys it can see, or with a running softmax over blocks of keys."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .attention_sight import Sight, all_of
from .narrow import exp_in, product_in
from .varying import varying_like

# The lowest score. A hidden one is this where JAX may compute the scores by themselves, as in an eager gradient: an
# infinity would be an error there under `jax.debug_infs`.
_LOWEST = float(jnp.finfo(jnp.float32).min)

# Inputs are widened outside a block and narrowed inside its products: the compiler takes both away, and the gradients
# of keys, values and bias, which every block adds to, are then summed in float32.


def sliced(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    bias: Any,
    sinks: Any = None,
    *,
    sight: Sight,
    scale: float,
    cap: float | None = None,
    block_q: int,
) -> jax.Array:
    """Unrolled blocks of queries, each against the keys that it can see; weights are computed again for gradients."""
    queries, keys = q.shape[1], k.shape[1]
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    bias = bias if bias is None else bias.astype(jnp.float32)
    parts = []
    for start in range(0, queries, block_q):
        stop = min(start + block_q, queries)
        low, high = sight.key_range(start, stop, keys)
        rows, columns = jnp.arange(start, stop), jnp.arange(low, high)
        cut = [_static(_static(x, 2, start, stop), 3, low, high) for x in (mask, bias)]
        attend = jax.checkpoint(functools.partial(_whole, scale=scale, cap=cap, dtype=q.dtype))
        hidden = all_of(sight.allowed(rows, columns), cut[0])
        mine = wide[0][:, start:stop], wide[1][:, low:high], wide[2][:, low:high]
        parts.append(attend(*mine, hidden, cut[1], sinks))
    return jnp.concatenate(parts, axis=1) if parts else _nothing(q, v)


def chunked(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    bias: Any,
    sinks: Any = None,
    *,
    sight: Sight,
    scale: float,
    cap: float | None = None,
    block_q: int,
    block_k: int,
) -> jax.Array:
    """A running softmax over blocks of keys: holds one block of scores at a time, for gradients too."""
    (batch, queries, heads, _), depth = q.shape, v.shape[-1]
    keys = k.shape[1]
    if not queries or not keys:
        return _nothing(q, v)
    given = (q, k, v, mask, bias, sinks, sight.query_lengths, sight.key_value_lengths)
    rows, columns = -queries % block_q, -keys % block_k
    wide = [_padded(x.astype(jnp.float32), 1, n) for x, n in ((q, rows), (k, columns), (v, columns))]
    bias = bias if bias is None else bias.astype(jnp.float32)
    mask, bias = (_padded(_padded(x, 2, rows), 3, columns) for x in (mask, bias))
    column_blocks = jnp.arange(0, keys, block_k)

    def of_queries(start: jax.Array) -> jax.Array:
        row = start + jnp.arange(block_q)
        mine = _moving(wide[0], 1, start, block_q)

        def step(state: Any, low: jax.Array) -> tuple[Any, None]:
            column = low + jnp.arange(block_k)
            cut = [_moving(_moving(x, 2, start, block_q), 3, low, block_k) for x in (mask, bias)]
            seen = all_of(sight.allowed(row, column), cut[0], (column < keys)[None, None, None])
            block = [_moving(x, 1, low, block_k) for x in wide[1:]]
            how: dict[str, Any] = {"scale": scale, "cap": cap, "dtype": q.dtype}
            return _online(state, mine, block[0], block[1], seen, cut[1], **how), None

        def if_seen(state: Any, low: jax.Array) -> tuple[Any, None]:
            # Whole blocks out of sight, known from places, are passed over.
            near = None if sight.left is None else low + block_k > start - sight.left
            early = None if sight.right is None else low < start + block_q + sight.right
            some = all_of(near, early)
            return step(state, low) if some is None else jax.lax.cond(some, step, lambda s, _: (s, None), state, low)

        zero = varying_like(jnp.zeros((batch, k.shape[2], heads // k.shape[2], block_q, 1), jnp.float32), *given)
        state = (jnp.broadcast_to(zero, (*zero.shape[:-1], depth)), zero[..., 0] - jnp.inf, zero[..., 0])
        (total, top, norm), _ = jax.lax.scan(jax.checkpoint(if_seen), state, column_blocks)
        if sinks is not None:
            sink = _by_heads(sinks, k.shape[2])
            base = jax.lax.stop_gradient(jnp.maximum(top, sink))
            kept = jnp.exp(top - base)
            total, norm = total * kept[..., None], norm * kept + exp_in(q.dtype, sink - base)
        return _merged(total, norm).astype(q.dtype)

    outs = jax.lax.map(jax.checkpoint(of_queries), jnp.arange(0, queries, block_q))
    return jnp.moveaxis(outs, 0, 1).reshape(batch, -1, heads, depth)[:, :queries]


def _scores(q: Any, k: Any, bias: Any, *, scale: float, cap: float | None, dtype: Any) -> jax.Array:
    """Scores in float32, of shape (batch, key heads, queries' heads of each, queries, keys)."""
    batch, queries, heads, depth = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], heads // k.shape[2], depth)
    scores = product_in(dtype, "btkgh,bskh->bkgts", grouped, k) * scale
    scores = scores if bias is None else scores + _grouped(bias, scores.shape)
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def _nothing(q: Any, v: Any) -> jax.Array:
    return jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype)


def _by_heads(sinks: Any, key_heads: int) -> jax.Array:
    """A number for each query head, as scores without their keys have it."""
    return sinks.astype(jnp.float32).reshape(1, key_heads, -1, 1)  # type: ignore[no-any-return]


def _hidden(scores: jax.Array, seen: Any, by: float) -> jax.Array:
    return scores if seen is None else jnp.where(_grouped(seen, scores.shape), scores, by)


def _whole(
    q: Any, k: Any, v: Any, seen: Any, bias: Any, sinks: Any, *, scale: float, cap: float | None, dtype: Any
) -> jax.Array:
    if not k.shape[1]:
        return _nothing(q, v).astype(dtype)
    scores = _hidden(_scores(q, k, bias, scale=scale, cap=cap, dtype=dtype), seen, _LOWEST)
    highest = jnp.max(scores, axis=-1)
    sink = None if sinks is None else _by_heads(sinks, k.shape[2])
    highest = highest if sink is None else jnp.maximum(highest, sink)
    top = _finite(jax.lax.stop_gradient(highest))
    # Hidden once more, since a seen score may be the lowest as well: its weight is not nothing.
    weights = exp_in(dtype, _hidden(scores - top[..., None], seen, _LOWEST))
    norm = jnp.sum(weights, axis=-1)
    norm = norm if sink is None else norm + exp_in(dtype, sink - top)
    if jnp.dtype(dtype) == jnp.float32:
        # Divided before the product: in the gradient each row's weights are then weighed against their own sum, and
        # what all keys have in common cancels as in a softmax. Narrow weights are exact as they are, and stay so.
        shares = weights / jnp.where(norm == 0, 1.0, norm)[..., None]
        return _by_queries(product_in(dtype, "bkgts,bskh->bkgth", shares, v))
    return _merged(product_in(dtype, "bkgts,bskh->bkgth", weights, v), norm).astype(dtype)


def _online(
    state: Any, q: Any, k: Any, v: Any, seen: Any, bias: Any, *, scale: float, cap: float | None, dtype: Any
) -> Any:
    total, top, norm = state
    scores = _hidden(_scores(q, k, bias, scale=scale, cap=cap, dtype=dtype), seen, -jnp.inf)
    new = jnp.maximum(top, jax.lax.stop_gradient(jnp.max(scores, axis=-1)))
    # Any number does as long as both sides use it: its own gradient cancels.
    base = _finite(new)
    kept = jnp.exp(top - base)
    weights = exp_in(dtype, scores - base[..., None])
    part = product_in(dtype, "bkgts,bskh->bkgth", weights, v)
    return total * kept[..., None] + part, new, norm * kept + jnp.sum(weights, axis=-1)


def _finite(top: jax.Array) -> jax.Array:
    # Of a row that sees nothing: minus infinity less minus infinity is no number.
    return jnp.where(top == -jnp.inf, 0.0, top)


def _merged(total: jax.Array, norm: jax.Array) -> jax.Array:
    # A row that sees nothing gives zeros.
    return _by_queries(total / jnp.where(norm == 0, 1.0, norm)[..., None])


def _by_queries(out: jax.Array) -> jax.Array:
    batch, groups, each, queries, depth = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, queries, groups * each, depth)


def _grouped(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A mask or bias of shape (batch, heads, queries, keys), any of them 1, as one of the scores' shape."""
    heads = (shape[1], shape[2]) if array.shape[1] > 1 else (1, 1)
    return array.reshape(array.shape[0], *heads, *array.shape[2:])


def _static(array: Any, axis: int, start: int, stop: int) -> Any:
    if array is None or array.shape[axis] == 1:
        return array
    return jax.lax.slice_in_dim(array, start, stop, axis=axis)


def _moving(array: Any, axis: int, start: jax.Array, size: int) -> Any:
    if array is None or array.shape[axis] == 1:
        return array
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=axis)


def _padded(array: Any, axis: int, more: int) -> Any:
    if array is None or not more or (array.shape[axis] == 1 and axis > 1):
        return array
    return jnp.pad(array, [(0, more if i == axis else 0) for i in range(array.ndim)])
