"""Gated ragged products: rows in groups, each group times two matrices of its own, joined as `silu(gate) * up`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel
from .call import plan, planned
from .mosaic.guess import is_measured
from .ragged_dot import RaggedDot, RaggedDotConfig
from .ragged_dot_tiles import masked
from .ragged_dot_ways import mosaic_tile, outer, product
from .reverse import recomputed

# With three stages there is room for all columns of a result, with four for half of them. By a lead of two steps the
# tensor cores have products while either warpgroup joins its sums.
_FUSED = [RaggedDotConfig("mosaic_gated", 128, 256, 64, None, *how) for how in ((4,), (3,), (4, 2))]
# Rows of a group on average from which products are what takes the time.
_LONG = 512


class RaggedGated(Kernel[RaggedDotConfig, jax.Array]):
    """`silu(lhs @ gate) * (lhs @ up)` for `lhs` (m, k) in groups of `group_sizes`, `gate` and `up` (groups, k, n).

    Implementations: those of `RaggedDot`, each for two products with a pass over both results, and "mosaic_gated" (one
    kernel for Hopper GPUs, which reads the rows once and writes the result alone; with a gradient "mosaic_rolling").
    """

    op_id = "library.ragged_gated"
    version = "1"
    cfg_type = RaggedDotConfig

    def run(
        self,
        lhs: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        group_sizes: jax.Array,
        *,
        cfg: RaggedDotConfig,
        interpret: bool = False,
    ) -> jax.Array:
        """The result by the cfg's implementation."""
        if cfg.implementation != "mosaic_gated":
            return _plain(lhs, gate, up, group_sizes, dot=product(cfg, interpret))[0]
        from .mosaic import ragged_rolling

        way = functools.partial(ragged_rolling.gated, tile=mosaic_tile(cfg), interpret=interpret)
        return recomputed(way, lambda *a: _plain(*a)[0])(lhs, gate, up, group_sizes)  # type: ignore[no-any-return]

    def run_cpu(self, *args: Any, cfg: RaggedDotConfig, **kwargs: Any) -> jax.Array:
        """The result on a CPU, where a Pallas kernel is interpreted, for tests alone."""
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    def fwd_with_residuals(
        self, *args: Any, cfg: RaggedDotConfig, interpret: bool = False
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The result, and both products: to compute them again would take five times as long as to write and read.

        One kernel that wrote all three took 439 us on an H200 where two products and a pass over them take 368.
        """
        out, *products = _plain(*args, dot=product(_rolling(cfg), interpret))
        return out, tuple(products)

    def fwd_with_residuals_cpu(self, *args: Any, cfg: RaggedDotConfig, **kwargs: Any) -> tuple[jax.Array, Any]:
        """The result and both products on a CPU."""
        return self.fwd_with_residuals(*args, cfg=cfg, interpret=True, **kwargs)

    def vjp(
        self,
        residuals: tuple[jax.Array, ...],
        y: jax.Array,
        dy: jax.Array,
        lhs: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        group_sizes: jax.Array,
        *,
        cfg: RaggedDotConfig,
        interpret: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array, None]:
        """Gradients of both products in one pass, and from them two products of rows and one sum of two products."""
        opened, raised, towards = (x.astype(jnp.float32) for x in (*residuals, dy))
        share = jax.nn.sigmoid(opened)
        d_raised = (towards * opened * share).astype(lhs.dtype)
        d_opened = (towards * raised * share * (1 + opened * (1 - share))).astype(lhs.dtype)
        across = outer(_rolling(cfg), interpret)
        d_gate, d_up = (across(lhs, d, group_sizes, dtype=gate.dtype) for d in (d_opened, d_raised))
        return _back(cfg, interpret)(d_opened, d_raised, gate, up, group_sizes), d_gate, d_up, None

    def vjp_cpu(self, *args: Any, cfg: RaggedDotConfig, **kwargs: Any) -> tuple[jax.Array, jax.Array, jax.Array, None]:
        """The gradients on a CPU, where a Pallas kernel is interpreted."""
        return self.vjp(*args, cfg=cfg, interpret=True, **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> RaggedDotConfig:
        """That of one product."""
        return RaggedDot().heuristic_cfg(_one(inv))

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> RaggedDotConfig:
        """That of one product; where groups are long both at once, 0.84 of the time on an H200."""
        lhs, gate, *_ = inv.args
        is_long = lhs.shape[0] > _LONG * gate.shape[0]
        if is_long and is_measured(inv, lhs.size, gate.size) and self.valid_cfg(inv, _FUSED[0]) is True:
            return _FUSED[0]
        return RaggedDot().heuristic_cfg_gpu(_one(inv))

    def heuristic_cfg_cpu(self, inv: Invocation[Any, Any]) -> RaggedDotConfig:
        """That of one product."""
        return RaggedDot().heuristic_cfg_cpu(_one(inv))

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[RaggedDotConfig]:
        """Those of one product."""
        return RaggedDot().candidate_cfgs(_one(inv))

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[RaggedDotConfig]:
        """Those of one product, and both at once."""
        return [*_FUSED, *RaggedDot().candidate_cfgs_gpu(_one(inv))]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: RaggedDotConfig) -> bool | str:
        """As of one product; both at once takes what rolling products take, the gradient being one of those."""
        return RaggedDot().valid_cfg(_one(inv), _rolling(cfg))

    def operations(self, inv: Invocation[Any, Any]) -> float:
        """Those of both products."""
        return 2.0 * RaggedDot().operations(_one(inv))

    def example_inputs(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """Groups as a router makes them, where a trace hides the real sizes."""
        (lhs, gate, sizes), rest = RaggedDot().example_inputs(_one(inv), rng)
        return (lhs, gate, inv.args[2], sizes), rest

    def reference(self, lhs: Any, gate: Any, up: Any, group_sizes: Any) -> jax.Array:
        """Group by group in float32."""
        with jax.default_matmul_precision("highest"):
            rows, one, other = (x.astype(jnp.float32) for x in (lhs, gate, up))
            return _plain(rows, one, other, group_sizes)[0].astype(lhs.dtype)


@planned()
def ragged_gated(
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    group_sizes: jax.Array,
    *,
    cfg: RaggedDotConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """`silu(lhs @ gate) * (lhs @ up)` of arrays as `moe` has checked them; rows beyond the last group give zeros."""
    if not lhs.size or not gate.size:
        return jnp.zeros((lhs.shape[0], gate.shape[2]), lhs.dtype)
    return plan(RaggedGated(), lhs, gate, up, group_sizes, cfg=cfg, executor=executor)  # type: ignore[no-any-return]


def _one(inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    """The call of one of both products."""
    lhs, gate, _, sizes = inv.args
    return replace(inv, op_id=RaggedDot.op_id, args=(lhs, gate, sizes))


def _rolling(cfg: RaggedDotConfig) -> RaggedDotConfig:
    if cfg.implementation != "mosaic_gated":
        return cfg
    return replace(cfg, implementation="mosaic_rolling")


def _plain(lhs: Any, gate: Any, up: Any, sizes: Any, *, dot: Any = masked) -> tuple[jax.Array, ...]:
    opened, raised = (dot(lhs, one, sizes, transposed=False, dtype=lhs.dtype) for one in (gate, up))
    joined = jax.nn.silu(opened.astype(jnp.float32)) * raised.astype(jnp.float32)
    return joined.astype(lhs.dtype), opened, raised


def _back(cfg: RaggedDotConfig, interpret: bool) -> Any:
    """`f(d_opened, d_raised, gate, up, sizes)`: the gradient of the rows."""

    def plain(d_opened: Any, d_raised: Any, gate: Any, up: Any, sizes: Any, dot: Any = masked) -> jax.Array:
        how = {"transposed": True, "dtype": d_opened.dtype}
        one: jax.Array = dot(d_opened, gate, sizes, **how) + dot(d_raised, up, sizes, **how)
        return one

    if cfg.implementation != "mosaic_gated":
        return functools.partial(plain, dot=product(cfg, interpret))
    from .mosaic import ragged_rolling

    def by_mosaic(d_opened: Any, d_raised: Any, gate: Any, up: Any, sizes: Any) -> jax.Array:
        how: dict[str, Any] = {"tile": mosaic_tile(cfg), "dtype": d_opened.dtype, "interpret": interpret}
        return ragged_rolling.product([d_opened, d_raised], [gate, up], sizes, transposed=True, **how)

    return recomputed(by_mosaic, plain)
