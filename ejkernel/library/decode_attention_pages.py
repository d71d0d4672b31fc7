"""The kernel for pages of keys: its arguments, its parts joined, and where it cannot run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .decode_attention_ways import CacheSight, finished, grouped
from .narrow import exp_in
from .triton.decode import parts_of_pages

# Keys that lie side by side are read as pages of so many.
_PAGE = 64


def by_pages(
    q: Any, k: Any, v: Any, table: Any, lengths: Any, sinks: Any, sight: CacheSight, *, cfg: Any, interpret: bool
) -> jax.Array:
    """Parts of the pages by the kernel, joined by XLA."""
    if table is None:
        each = k.shape[1] // _PAGE
        table = jnp.arange(k.shape[0] * each, dtype=jnp.int32).reshape(k.shape[0], each)
        k, v = (x.reshape(-1, _PAGE, *x.shape[2:]) for x in (k, v))
    near = grouped(q, k.shape[2])
    batch, queries, heads, group, size = near.shape
    rows = jnp.moveaxis(near, 1, 2).reshape(batch, heads, queries * group, size)
    static: dict[str, Any] = {"queries": queries, "window": sight.window, "soft_cap": sight.soft_cap}
    launch: dict[str, Any] = {"parts": cfg.parts or 1, "block": cfg.block or _PAGE, "interpret": interpret}
    launch |= {"num_warps": cfg.num_warps or 4, "num_stages": cfg.num_stages or 3, "scale": sight.scale}
    most, sums, mixed = parts_of_pages(rows, k, v, table, lengths, **static, **launch)
    largest = jnp.max(most, axis=2)
    factor = jnp.where(most == -jnp.inf, 0, jnp.exp(most - jnp.where(largest == -jnp.inf, 0, largest)[:, :, None]))
    # As `finished` has them.
    factor = factor * exp_in(q.dtype, jnp.zeros(()))
    whole = largest, jnp.sum(sums * factor, axis=2), jnp.sum(mixed * factor[..., None], axis=2)

    def back(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(batch, heads, queries, group, *x.shape[3:]), 2, 1)

    return finished(tuple(map(back, whole)), sinks, q.shape, q.dtype)


def pages_refuse(args: Any, keys: int, parts: int | None, block: int | None) -> str:
    """The reason that the kernel cannot compute a call; empty where it can."""
    q, k = args[:2]
    table = args[4] if len(args) > 4 else None
    if not parts or not block:
        return "parts, block, num_warps and num_stages must be given"
    page = k.shape[1] if table is not None else _PAGE
    if table is None and k.shape[1] % _PAGE:
        return f"{k.shape[1]} keys side by side are no pages of {_PAGE}"
    if any(size & (size - 1) for size in (page, block, k.shape[3])) or k.shape[3] < 16 or max(page, block) < 16:
        return f"pages of {page}, blocks of {block} and heads of {k.shape[3]} must be powers of two, and at least 16"
    if block < page:
        return f"a block of {block} is less than a page of {page}"
    if q.shape[1] * (q.shape[2] // k.shape[2]) > 64:
        return "the queries of a key head are more than 64"
    return "" if keys >= parts * block else f"{keys} keys are too few for {parts} parts of {block}"
