"""The order of attention's blocks of queries: long ones first, and heads that share keys together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .tiles import PROCESSORS

# Keys and values that blocks read again and again stay in the cache of 50 MB while they take no more.
_CACHED_BYTES = 24 << 20


@dataclass(frozen=True)
class Order:
    """Tiles of (batch, head, block of queries), over so many blocks of threads."""

    heads: int
    # The number of a head's blocks of queries, and of heads with keys in the cache together.
    length: int
    together: int
    tiles: int
    # Blocks of threads: as many as tiles, or those that run at once.
    blocks: int
    causal: bool

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """Batch, head and block of queries of this block of threads' so-manieth tile."""
        at = self._tile(number)
        section, rest = _divided(at, self.together * self.length)
        block, beside = _divided(rest, self.together)
        batch, head = _divided(section * self.together + beside, self.heads)
        # Under a causal mask the last block sees most keys.
        return batch, head, self.length - 1 - block if self.causal else block

    def walk(self, tile: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        """Calls this for each tile of the block of threads, with a count from zero on; that count, and the tiles'."""
        if self.blocks == self.tiles:
            return tile(0, 0), 1
        rounds = jnp.int32(self.tiles // self.blocks)
        if self.tiles % self.blocks:
            rounds = rounds + (self._tile(rounds) < self.tiles).astype(jnp.int32)
        return jax.lax.fori_loop(jnp.int32(0), rounds, tile, jnp.int32(0)), rounds

    def _tile(self, number: Any) -> Any:
        first = jax.lax.axis_index("tile")
        if self.blocks == self.tiles:
            return first
        # To and fro: the block of threads with the longest tile of one round has the shortest of the next.
        back = jax.lax.rem(number, jnp.int32(2))
        return number * self.blocks + first + back * (self.blocks - 1 - 2 * first)


def order_of(q: Any, k: Any, v: Any, *, block_q: int, persistent: bool, causal: bool) -> Order:
    """The order for arrays of these shapes."""
    (batch, queries, heads, _), key_heads = q.shape, k.shape[2]
    shared = _heads_together(k, v)
    length = -(-queries // block_q)
    tiles = batch * heads * length
    blocks = min(tiles, PROCESSORS) if persistent else tiles
    return Order(heads, length, shared * heads // key_heads, tiles, blocks, causal)


def is_even(k: Any, v: Any, *, causal: bool) -> bool:
    """Have blocks of threads that stay as much to do as each other?

    Under a causal mask tiles get shorter from the first to the last where all heads' keys are in the cache together.
    Where they are not, heads follow each other in sections, and those that stay wait for the longest: 1.65 times as
    long on an H200 with 16 heads of 16,384 keys.
    """
    return not causal or _heads_together(k, v) == k.shape[0] * k.shape[2]


def _heads_together(k: Any, v: Any) -> int:
    """Heads of keys that are in the cache together: a divisor of their number."""
    each = k.shape[1] * (k.shape[3] + v.shape[3]) * k.dtype.itemsize
    fitting, count = max(1, _CACHED_BYTES // each), k.shape[0] * k.shape[2]
    return max(number for number in range(1, min(count, fitting) + 1) if count % number == 0)


def _divided(number: Any, by: int) -> tuple[Any, Any]:
    return jax.lax.div(number, jnp.int32(by)), jax.lax.rem(number, jnp.int32(by))
