"""Which keys a query of attention sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Sight:
    """What hides keys by their place: the order, a window of keys around the query's own place, and lengths."""

    causal: bool = False
    # So many keys to the left and to the right; None: all.
    window: tuple[int, int] | None = None
    query_lengths: jax.Array | None = None
    key_value_lengths: jax.Array | None = None

    @property
    def right(self) -> int | None:
        """How many keys after its own place a query sees; None: all."""
        return 0 if self.causal else self.window and self.window[1]

    @property
    def left(self) -> int | None:
        """How many keys before its own place a query sees; None: all."""
        return self.window and self.window[0]

    def key_range(self, start: int, stop: int, keys: int) -> tuple[int, int]:
        """The keys that any query from `start` to before `stop` may see, known from places alone."""
        low = 0 if self.left is None else min(max(0, start - self.left), keys)
        high = keys if self.right is None else min(keys, stop + self.right)
        return low, max(low, high)

    def allowed(self, rows: Any, columns: Any) -> jax.Array | None:
        """What queries at these places see of keys at these: of shape (batch or 1, 1, rows, columns); None: all."""
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
        """Which queries see any key: of shape (batch or 1, queries, heads or 1, 1); None where all surely do."""
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


def all_of(*conditions: jax.Array | None) -> jax.Array | None:
    """Where all of them hold; None stands for everywhere."""
    met = None
    for condition in conditions:
        if condition is not None:
            met = condition if met is None else met & condition
    return met
