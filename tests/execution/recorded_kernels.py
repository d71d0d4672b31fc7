"""Kernels that another process can import, for recordings."""

from __future__ import annotations

from fakes_execution import Counting


class Plain(Counting):
    """Takes anything."""

    op_id = "recorded.plain"

    def __init__(self, scale=1.0, names=()):
        super().__init__()
        self.scale = scale
        self.names = names

    def run(self, x, *rest, cfg, **options):
        return x * self.scale


class Mean(Counting):
    """Talks to the other shards."""

    op_id = "recorded.mean"

    def run(self, x, *, cfg):
        import jax

        return jax.lax.pmean(x, "i")


class Rank(Plain):
    """Makes its own keys."""

    op_id = "recorded.rank"

    def key_builder(self, inv):
        return f"rank {inv.args[0].ndim}"


class Careful(Counting):
    """Its candidates agree on the integers that it gives itself, from 5 on, and on no others."""

    op_id = "recorded.careful"

    def run(self, x, i, *, cfg):
        import jax.numpy as jnp

        return x * jnp.where((i >= 5).all(), 1.0, cfg)

    def example_inputs(self, inv, rng):
        return inv.args[0], rng.integers(5, 9, inv.args[1].shape).astype("int32")


class Nested:
    """Holds a kernel."""

    class Inside(Plain):
        """Is found by its qualified name."""

        op_id = "recorded.inside"


NOT_A_KERNEL = Counting.fresh
