"""The keys that a query of attention sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Sight:
    """Rules that hide keys by their place: the order, a window of keys around the query's own place, and lengths."""

    causal: bool = False
    # So many keys to the left and to the right; None: all.
    window: tuple[int, int] | None = None
    query_lengths: jax.Array | None = None
    key_value_lengths: jax.Array | None = None

    @property
    def right(self) -> int | None:
        """The number of keys after its own place that a query sees; None: all."""
        return 0 if self.causal else self.window and self.window[1]

    @property
    def left(self) -> int | None:
        """The number of keys before its own place that a query sees; None: all."""
        return self.window and self.window[0]

    def key_range(self, start: int, stop: int, keys: int) -> tuple[int, int]:
        """The keys that any query from `start` to before `stop` may see, known from places alone."""
        low = 0 if self.left is None else min(max(0, start - self.left), keys)
        high = keys if self.right is None else min(keys, stop + self.right)
        return low, max(low, high)

    def allowed(self, rows: Any, columns: Any) -> jax.Array | None:
        """Tells which keys at `columns` queries at `rows` see, as (batch or 1, 1, rows, columns); None: all."""
        rows, columns = jnp.reshape(rows, (1, 1, -1, 1)), jnp.reshape(columns, (1, 1, 1, -1))
        conditions = []
        if self.right is not None:
            conditions.append(columns <= rows + self.right)
        if self.left is not None:
            conditions.append(columns >= rows - self.left)
        if self.query_lengths is not None:
            conditions.append(rows < self.query_lengths[:, None, None, None])
        if self.key_value_lengths is not None:
            conditions.append(columns < self.key_value_lengths[:, None, None, None])
        return all_of(*conditions)

    def sighted(self, mask: jax.Array | None, queries: int, keys: int) -> jax.Array | None:
        """A mask of the queries that see any key, (batch or 1, queries, heads or 1, 1); None where all surely do."""
        rows = np.arange(queries)
        low = rows * 0 if self.left is None else np.maximum(rows - self.left, 0)
        high = np.full(queries, keys) if self.right is None else np.minimum(rows + self.right + 1, keys)
        if mask is not None:
            places = self.allowed(rows, np.arange(keys))
            seen = jnp.any(mask if places is None else mask & places, axis=-1)
            return jnp.swapaxes(jnp.broadcast_to(seen, (*seen.shape[:2], queries)), 1, 2)[..., None]
        conditions: list[Any] = [] if np.all(low < high) else [jnp.asarray(low < high)[None]]
        if self.query_lengths is not None:
            conditions.append(rows[None] < self.query_lengths[:, None])
        if self.key_value_lengths is not None:
            conditions.append(low[None] < self.key_value_lengths[:, None])
        found = all_of(*conditions)
        return None if found is None else found[..., None, None]


def without_hidden(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    sight: Sight,
    *,
    of_queries: bool = True,
    of_keys: bool = True,
    of_values: bool = True,
) -> tuple[Any, Any, Any]:
    """Zeros for queries that see nothing and for keys and values that a mask or lengths hide from every query.

    They may hold anything, and a weight of zero times what is no number would be none. For few queries the copies are
    most of the traffic: `of_queries`, `of_keys` and `of_values` say which are needed.
    """
    keys, heads = k.shape[1], k.shape[2]
    conditions: list[Any] = []
    if mask is not None:
        seen = jnp.any(mask, axis=2)
        if seen.shape[1] > 1:
            seen = jnp.any(seen.reshape(seen.shape[0], heads, -1, seen.shape[2]), axis=2)
        conditions.append(jnp.swapaxes(jnp.broadcast_to(seen, (*seen.shape[:2], keys)), 1, 2))
    if sight.key_value_lengths is not None:
        conditions.append((jnp.arange(keys)[None] < sight.key_value_lengths[:, None])[..., None])
    shown = all_of(*conditions)
    if shown is not None:
        k, v = (
            jnp.where(shown[..., None], x, jnp.zeros_like(x)) if wanted else x
            for x, wanted in ((k, of_keys), (v, of_values))
        )
    if not of_queries or (mask is None and sight.query_lengths is None and sight.key_value_lengths is None):
        return q, k, v
    sighted = sight.sighted(mask, q.shape[1], keys)
    return (q if sighted is None else jnp.where(sighted, q, jnp.zeros_like(q))), k, v


def all_of(*conditions: jax.Array | None) -> jax.Array | None:
    """All conditions in one; None stands for a condition that always holds."""
    met = None
    for condition in conditions:
        if condition is not None:
            met = condition if met is None else met & condition
    return met
