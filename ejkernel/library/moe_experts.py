"""Experts: rows in groups, each group through three matrices of its own, `(silu(rows @ gate) * (rows @ up)) @ down`."""

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
from .extent import are_known
from .gate import joined, pulled
from .mosaic.measured_calls import is_measured, runs_at_once
from .mosaic.tiles import CHUNK
from .ragged_dot import RaggedDot, RaggedDotConfig
from .ragged_dot_tiles import masked, masked_outer
from .ragged_dot_ways import mosaic_tile, outer, product
from .reverse import recomputed

_FUSED = "mosaic_gated"
# With three stages there is room for all columns of a result, with four for half of them.
_FUSED_CFGS = [RaggedDotConfig(_FUSED, 128, 256, 64, None, stages) for stages in (4, 3)]
# Rows of a group on average from which products are what takes the time.
_LONG = 512


class MoeExperts(Kernel[RaggedDotConfig, jax.Array]):
    """`(silu(rows @ gate) * (rows @ up)) @ down`, the matrices being (groups, width, inner) and (groups, inner, width).

    Implementations: those of `RaggedDot`, each for three products with a pass over the first two results, and
    "mosaic_gated" (for Hopper GPUs: one kernel for the first two products, which reads the rows once and writes what is
    joined alone, and "mosaic_rolling" for the third; in the gradient what a pass would do is a part of the product
    before it, and the gradients of all matrices are one launch). That launch computes all three where one is asked
    for: to train some of the matrices alone pays for all, and does not by a `cfg=` with "mosaic_rolling".
    """

    op_id = "library.moe_experts"
    version = "1"
    cfg_type = RaggedDotConfig

    def run(
        self,
        rows: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        down: jax.Array,
        group_sizes: jax.Array,
        *,
        cfg: RaggedDotConfig,
        interpret: bool = False,
    ) -> jax.Array:
        """The result by the cfg's implementation."""
        dot = product(_rolling(cfg), interpret)
        if cfg.implementation == _FUSED:
            from .mosaic import ragged_rolling

            way = functools.partial(ragged_rolling.gated, tile=mosaic_tile(cfg), interpret=interpret)
            inner = recomputed(way, lambda *a: _pair(*a)[0])(rows, gate, up, group_sizes)
        else:
            inner = _pair(rows, gate, up, group_sizes, dot=dot)[0]
        return dot(inner, down, group_sizes, transposed=False, dtype=rows.dtype)

    def run_cpu(self, *args: Any, cfg: RaggedDotConfig, **kwargs: Any) -> jax.Array:
        """The result on a CPU, where a Pallas kernel is interpreted, for tests alone."""
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    def fwd_with_residuals(
        self,
        rows: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        down: jax.Array,
        group_sizes: jax.Array,
        *,
        cfg: RaggedDotConfig,
        interpret: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The result, what is joined, and the two products that it is made of.

        To compute these again would take five times as long as to write and read them. One kernel that wrote all three
        took 439 us on an H200 where two products and a pass over them take 356.
        """
        dot = product(_rolling(cfg), interpret)
        kept = _products(cfg, interpret, dot)(rows, gate, up, group_sizes)
        return dot(kept[0], down, group_sizes, transposed=False, dtype=rows.dtype), kept

    def fwd_with_residuals_cpu(self, *args: Any, cfg: RaggedDotConfig, **kwargs: Any) -> tuple[jax.Array, Any]:
        """The result and what is kept on a CPU."""
        return self.fwd_with_residuals(*args, cfg=cfg, interpret=True, **kwargs)

    def vjp(
        self,
        residuals: tuple[jax.Array, ...],
        y: jax.Array,
        dy: jax.Array,
        rows: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        down: jax.Array,
        group_sizes: jax.Array,
        *,
        cfg: RaggedDotConfig,
        interpret: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, None]:
        """Gradients of the first two products, from them those of the rows, and those of each group's matrices."""
        inner, *pair = residuals
        dy = dy.astype(rows.dtype)
        towards = _towards(cfg, interpret)(dy, down, *pair, group_sizes)
        factors = [(rows, towards[0]), (rows, towards[1]), (inner, dy)]
        d_gate, d_up, d_down = _outers(cfg, interpret)(group_sizes, *(x for some in factors for x in some))
        return _back(cfg, interpret)(*towards, gate, up, group_sizes), d_gate, d_up, d_down, None

    def vjp_cpu(self, *args: Any, cfg: RaggedDotConfig, **kwargs: Any) -> tuple[Any, ...]:
        """The gradients on a CPU, where a Pallas kernel is interpreted."""
        return self.vjp(*args, cfg=cfg, interpret=True, **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> RaggedDotConfig:
        """The heuristic cfg of one of the first two products."""
        return RaggedDot().heuristic_cfg(_one(inv))

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> RaggedDotConfig:
        """The heuristic cfg of one product; for long groups two products at once, 0.84 of their time on an H200."""
        rows, gate, *_ = inv.args
        stays = are_known(rows.shape[0]) and rows.shape[0] > _LONG * gate.shape[0] and runs_at_once(inv)
        if stays and is_measured(inv, rows.size, gate.size) and self.valid_cfg(inv, _FUSED_CFGS[0]) is True:
            return _FUSED_CFGS[0]
        return RaggedDot().heuristic_cfg_gpu(_one(inv))

    def heuristic_cfg_cpu(self, inv: Invocation[Any, Any]) -> RaggedDotConfig:
        """The heuristic cfg of one of the first two products on a CPU."""
        return RaggedDot().heuristic_cfg_cpu(_one(inv))

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[RaggedDotConfig]:
        """The candidates of one of the first two products."""
        return RaggedDot().candidate_cfgs(_one(inv))

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[RaggedDotConfig]:
        """The candidates of one of the first two products, and cfgs that compute these two at once."""
        return [*_FUSED_CFGS, *RaggedDot().candidate_cfgs_gpu(_one(inv))]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: RaggedDotConfig) -> bool | str:
        """Checks a cfg for each product; two products at once need what a rolling product needs, as the third does."""
        # Half of a tile's columns are of either matrix, and are handed over by whole chunks.
        if cfg.implementation == _FUSED and cfg.block_n is not None and cfg.block_n < 2 * CHUNK:
            return f"{_FUSED} has columns of two matrices in a tile: block_n must be {2 * CHUNK} at least"
        said = (RaggedDot().valid_cfg(one, _rolling(cfg)) for one in (_one(inv), _last(inv)))
        return next((one for one in said if one is not True), True)

    def operations(self, inv: Invocation[Any, Any]) -> float:
        """The operations of three products."""
        return 3.0 * RaggedDot().operations(_one(inv))

    def example_inputs(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """Groups as a router makes them, where a trace hides the real sizes."""
        (rows, gate, sizes), rest = RaggedDot().example_inputs(_one(inv), rng)
        return (rows, gate, *inv.args[2:4], sizes), rest

    def reference(self, rows: Any, gate: Any, up: Any, down: Any, group_sizes: Any) -> jax.Array:
        """Group by group in float32."""
        with jax.default_matmul_precision("highest"):
            lhs, *upwards, last = (x.astype(jnp.float32) for x in (rows, gate, up, down))
            inner = _pair(lhs, upwards[0], upwards[1], group_sizes)[0]
            return masked(inner, last, group_sizes, transposed=False, dtype=rows.dtype)


@planned()
def moe_experts(
    rows: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    group_sizes: jax.Array,
    *,
    cfg: RaggedDotConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """`(silu(rows @ gate) * (rows @ up)) @ down` of arrays as `moe` has checked them; rows of no group give zeros."""
    if not rows.size or not gate.size:
        return jnp.zeros_like(rows)
    return plan(MoeExperts(), rows, gate, up, down, group_sizes, cfg=cfg, executor=executor)  # type: ignore[no-any-return]


def _one(inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    """The call of one of the first two products."""
    rows, gate, _, _, sizes = inv.args
    return replace(inv, op_id=RaggedDot.op_id, args=(rows, gate, sizes))


def _last(inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    """The call of the third product, of rows as long as what is joined."""
    rows, _, _, down, sizes = inv.args
    inner = jax.ShapeDtypeStruct((rows.shape[0], down.shape[1]), rows.dtype)
    return replace(inv, op_id=RaggedDot.op_id, args=(inner, down, sizes))


def _rolling(cfg: RaggedDotConfig) -> RaggedDotConfig:
    return replace(cfg, implementation="mosaic_rolling") if cfg.implementation == _FUSED else cfg


def _pair(lhs: Any, gate: Any, up: Any, sizes: Any, *, dot: Any = masked) -> tuple[jax.Array, ...]:
    """The joined rows, and both products."""
    opened, raised = (dot(lhs, one, sizes, transposed=False, dtype=lhs.dtype) for one in (gate, up))
    made = joined(opened.astype(jnp.float32), raised.astype(jnp.float32))
    return made.astype(lhs.dtype), opened, raised


def _products(cfg: RaggedDotConfig, interpret: bool, dot: Any) -> Any:
    """`f(rows, gate, up, sizes)`: what is joined, and both products."""
    if cfg.implementation != _FUSED:
        return functools.partial(_pair, dot=dot)
    from .mosaic import ragged_rolling

    def by_mosaic(rows: Any, gate: Any, up: Any, sizes: Any) -> tuple[jax.Array, ...]:
        both = ragged_rolling.pair(rows, gate, up, sizes, tile=mosaic_tile(cfg), interpret=interpret)
        return joined(*(x.astype(jnp.float32) for x in both)).astype(rows.dtype), *both

    return recomputed(by_mosaic, _pair)


def _towards(cfg: RaggedDotConfig, interpret: bool) -> Any:
    """`f(dy, down, opened, raised, sizes)`: the gradients of both products."""

    def plain(dy: Any, down: Any, opened: Any, raised: Any, sizes: Any, dot: Any = masked) -> tuple[jax.Array, ...]:
        middle = dot(dy, down, sizes, transposed=True, dtype=dy.dtype)
        made = pulled(*(x.astype(jnp.float32) for x in (opened, raised, middle)))
        return tuple(x.astype(dy.dtype) for x in made)

    if cfg.implementation != _FUSED:
        return functools.partial(plain, dot=product(cfg, interpret))
    from .mosaic.gated_back import gated_back

    return recomputed(functools.partial(gated_back, interpret=interpret), plain)


def _outers(cfg: RaggedDotConfig, interpret: bool) -> Any:
    """`f(sizes, lhs, out, lhs, out, ...)`: the gradient of each group's matrix for each pair of factors."""

    def plain(sizes: Any, *factors: Any, across: Any = masked_outer) -> tuple[jax.Array, ...]:
        pairs = zip(factors[::2], factors[1::2], strict=True)
        return tuple(across(lhs, out, sizes, dtype=lhs.dtype) for lhs, out in pairs)

    if cfg.implementation != _FUSED:
        return functools.partial(plain, across=outer(cfg, interpret))
    from .mosaic import outer_rolling

    def by_mosaic(sizes: Any, *factors: Any) -> Sequence[jax.Array]:
        tile = mosaic_tile(cfg)
        if any(out.shape[1] % tile.n for out in factors[1::2]):
            # Matrices that are no whole tiles have no launch together; `valid_cfg` refuses such a cfg.
            return plain(sizes, *factors, across=outer(_rolling(cfg), interpret))
        pairs = list(zip(factors[::2], factors[1::2], strict=True))
        how: dict[str, Any] = {"tile": tile, "dtype": factors[0].dtype, "interpret": interpret}
        return tuple(outer_rolling.outers(pairs, sizes, **how))

    return recomputed(by_mosaic, plain)


def _back(cfg: RaggedDotConfig, interpret: bool) -> Any:
    """`f(d_opened, d_raised, gate, up, sizes)`: the gradient of the rows."""

    def plain(d_opened: Any, d_raised: Any, gate: Any, up: Any, sizes: Any, dot: Any = masked) -> jax.Array:
        how = {"transposed": True, "dtype": d_opened.dtype}
        one: jax.Array = dot(d_opened, gate, sizes, **how) + dot(d_raised, up, sizes, **how)
        return one

    if cfg.implementation != _FUSED:
        return functools.partial(plain, dot=product(cfg, interpret))
    from .mosaic import ragged_rolling

    def by_mosaic(d_opened: Any, d_raised: Any, gate: Any, up: Any, sizes: Any) -> jax.Array:
        how: dict[str, Any] = {"tile": mosaic_tile(cfg), "dtype": d_opened.dtype, "interpret": interpret}
        return ragged_rolling.product([d_opened, d_raised], [gate, up], sizes, transposed=True, **how)

    return recomputed(by_mosaic, plain)
