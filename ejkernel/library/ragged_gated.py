"""Gated ragged products: rows in groups, each group times two matrices of its own, joined as `silu(gate) * up`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel
from .call import plan, planned
from .gate import joined, pulled
from .mosaic.guess import is_measured
from .mosaic.tiles import CHUNK
from .ragged_dot import RaggedDot, RaggedDotConfig
from .ragged_dot_tiles import masked
from .ragged_dot_ways import mosaic_tile, outer, product
from .reverse import recomputed

# With three stages there is room for all columns of a result, with four for half of them.
_FUSED = [RaggedDotConfig("mosaic_gated", 128, 256, 64, None, stages) for stages in (4, 3)]
# One kernel for both products, and with a gradient two: the second way joins the second product with the first.
_WHOLE = ("mosaic_gated", "mosaic_joined")
# Rows of a group on average from which products are what takes the time.
_LONG = 512


class RaggedGated(Kernel[RaggedDotConfig, jax.Array]):
    """`silu(lhs @ gate) * (lhs @ up)` for `lhs` (m, k) in groups of `group_sizes`, `gate` and `up` (groups, k, n).

    Implementations: those of `RaggedDot`, each for two products with a pass over both results, and "mosaic_gated" (one
    kernel for Hopper GPUs, which reads the rows once and writes the result alone; with a gradient "mosaic_rolling") and
    "mosaic_joined" (the same; with a gradient the second product reads the first, and there is no pass).
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
        if cfg.implementation not in _WHOLE:
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
        dot = product(_rolling(cfg), interpret)
        out, *products = _joined(cfg, interpret, dot)(*args) if _is_joined(cfg) else _plain(*args, dot=dot)
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
        towards = [x.astype(lhs.dtype) for x in pulled(*(x.astype(jnp.float32) for x in (*residuals, dy)))]
        return *from_products(towards, lhs, gate, up, group_sizes, cfg=cfg, interpret=interpret), None

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
        if _is_joined(cfg) and cfg.block_k != CHUNK:
            return f"mosaic_joined has steps of {CHUNK}, the columns that are handed over at a time, not {cfg.block_k}"
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


def from_products(
    towards: Sequence[jax.Array],
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    group_sizes: jax.Array,
    *,
    cfg: RaggedDotConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of rows and both matrices, from those of the two products."""
    across = outer(_rolling(cfg), interpret)
    d_gate, d_up = (across(lhs, d, group_sizes, dtype=gate.dtype) for d in towards)
    return _back(cfg, interpret)(*towards, gate, up, group_sizes), d_gate, d_up


def _one(inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    """The call of one of both products."""
    lhs, gate, _, sizes = inv.args
    return replace(inv, op_id=RaggedDot.op_id, args=(lhs, gate, sizes))


def _rolling(cfg: RaggedDotConfig) -> RaggedDotConfig:
    return replace(cfg, implementation="mosaic_rolling") if cfg.implementation in _WHOLE else cfg


def _is_joined(cfg: RaggedDotConfig) -> bool:
    return cfg.implementation == "mosaic_joined"


def _plain(lhs: Any, gate: Any, up: Any, sizes: Any, *, dot: Any = masked) -> tuple[jax.Array, ...]:
    opened, raised = (dot(lhs, one, sizes, transposed=False, dtype=lhs.dtype) for one in (gate, up))
    made = joined(opened.astype(jnp.float32), raised.astype(jnp.float32))
    return made.astype(lhs.dtype), opened, raised


def _joined(cfg: RaggedDotConfig, interpret: bool, dot: Any) -> Any:
    """`f(lhs, gate, up, sizes)`: the result and both products; the kernel of the second reads the first."""
    from .mosaic import ragged_joined

    def plain(lhs: Any, up: Any, opened: Any, sizes: Any) -> tuple[jax.Array, jax.Array]:
        raised = masked(lhs, up, sizes, transposed=False, dtype=lhs.dtype)
        return joined(opened.astype(jnp.float32), raised.astype(jnp.float32)).astype(lhs.dtype), raised

    def way(lhs: Any, gate: Any, up: Any, sizes: Any) -> tuple[jax.Array, ...]:
        opened = dot(lhs, gate, sizes, transposed=False, dtype=lhs.dtype)
        second = functools.partial(ragged_joined.gated_up, tile=mosaic_tile(cfg), interpret=interpret)
        out, raised = recomputed(second, plain)(lhs, up, opened, sizes)
        return out, opened, raised

    return way


def _back(cfg: RaggedDotConfig, interpret: bool) -> Any:
    """`f(d_opened, d_raised, gate, up, sizes)`: the gradient of the rows."""

    def plain(d_opened: Any, d_raised: Any, gate: Any, up: Any, sizes: Any, dot: Any = masked) -> jax.Array:
        how = {"transposed": True, "dtype": d_opened.dtype}
        one: jax.Array = dot(d_opened, gate, sizes, **how) + dot(d_raised, up, sizes, **how)
        return one

    if cfg.implementation not in _WHOLE:
        return functools.partial(plain, dot=product(cfg, interpret))
    from .mosaic import ragged_rolling

    def by_mosaic(d_opened: Any, d_raised: Any, gate: Any, up: Any, sizes: Any) -> jax.Array:
        how: dict[str, Any] = {"tile": mosaic_tile(cfg), "dtype": d_opened.dtype, "interpret": interpret}
        return ragged_rolling.product([d_opened, d_raised], [gate, up], sizes, transposed=True, **how)

    return recomputed(by_mosaic, plain)
