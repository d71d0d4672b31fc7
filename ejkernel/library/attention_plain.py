"""The attention of plain JAX: XLA's own, blocks of queries and a running softmax; few queries copy no keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from .attention_blocks import chunked, sliced
from .attention_jax import by_jax
from .attention_sight import Sight, without_hidden

PLAIN = ("xla", "sliced", "chunked")
# With fewer queries than this, reading keys and values is most of the work, and so would copying them be.
FEW = 16


def by_plain(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    bias: Any,
    sinks: Any,
    *,
    sight: Sight,
    scale: float,
    cap: float | None,
    implementation: str,
    block_q: int | None,
    block_k: int | None,
) -> jax.Array:
    """One of `PLAIN`, with zeros for what is hidden and would be seen all the same."""
    queries, keys = q.shape[1], k.shape[1]

    def attend(*arrays: Any, lean: bool = False) -> jax.Array:
        q, k, v, mask, bias, sinks, query_lengths, key_value_lengths = arrays
        place = replace(sight, query_lengths=query_lengths, key_value_lengths=key_value_lengths)
        q, k, v = without_hidden(q, k, v, mask, place, of_keys=not lean)
        if implementation == "xla":
            return by_jax(q, k, v, mask, bias, sight=place, scale=scale, implementation="xla")
        how: dict[str, Any] = {"sight": place, "scale": scale, "cap": cap}
        if implementation == "chunked":
            blocks = {"block_q": min(block_q or 256, queries), "block_k": min(block_k or 512, keys)}
            return chunked(q, k, v, mask, bias, sinks, **how, **blocks)
        return sliced(q, k, v, mask, bias, sinks, **how, block_q=block_q or queries)

    arrays = (q, k, v, mask, bias, sinks, sight.query_lengths, sight.key_value_lengths)
    if queries >= FEW or not hides(mask, sight):
        return attend(*arrays)
    # Scores of hidden keys are replaced, whatever they are, so that a result needs no copy of keys. A gradient does: it
    # multiplies them by zero. Both modes of differentiation have this rule, and its own derivatives.
    made = jax.custom_jvp(functools.partial(attend, lean=True))
    made.defjvp(functools.partial(_moved, attend), symbolic_zeros=True)
    return made(*arrays)


def _moved(attend: Callable[..., jax.Array], primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The derivative along the arrays that have a tangent: the others cost nothing."""
    values, tree = jax.tree_util.tree_flatten(primals)
    ways = jax.tree_util.tree_leaves(tangents)
    moving = [not isinstance(way, jax.custom_derivatives.SymbolicZero) for way in ways]

    def of_moving(*given: Any) -> jax.Array:
        left = iter(given)
        leaves = [next(left) if is_one else x for x, is_one in zip(values, moving, strict=True)]
        return attend(*jax.tree_util.tree_unflatten(tree, leaves))

    some, along = ([x for x, is_one in zip(xs, moving, strict=True) if is_one] for xs in (values, ways))
    return jax.jvp(of_moving, tuple(some), tuple(along))


def hides(mask: Any, sight: Sight) -> bool:
    """May there be keys that no query sees?"""
    return mask is not None or sight.key_value_lengths is not None
