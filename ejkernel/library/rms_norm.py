"""Rows over their root mean square."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import Executor, Invocation
from . import double, reduce
from .arguments import ArgumentError
from .call import plan, planned
from .double import is_double, refuse_cfg
from .guessed_rows import norm_ways
from .mosaic import norm_rows, spread
from .reverse import ReverseOnGpu, by_kernels, recomputed
from .rows import across, as_vector, epsilon, float_rows, rows_refuse
from .triton.norm_gradients import fits, norm_gradients
from .triton.rows import by_rows, launches

# As a profile shows it.
_NAME = "library_rms_norm"


@dataclass(frozen=True)
class RmsNormConfig:
    """An implementation, and its parameters where it has any."""

    implementation: str
    lanes: int | None = None
    rows: int | None = None
    num_warps: int | None = None
    # Elements of a row that a thread of "mosaic" takes at a time; None: the row is held whole.
    each: int | None = None


class RmsNorm(ReverseOnGpu[RmsNormConfig, jax.Array]):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis.

    Implementations: "xla" (plain `jax.numpy`), "lanes" (partial sums side by side), "recompute" (a gradient from
    the arguments alone), "triton" (blocks of whole rows, and a gradient in one pass) and "mosaic" (a block for each row
    of any width, and such a gradient).
    """

    op_id = "library.rms_norm"
    version = "2"  # Mosaic's `each`
    cfg_type = RmsNormConfig

    def run(
        self,
        x: jax.Array,
        weight: jax.Array | None = None,
        *,
        eps: float = 1e-6,
        cfg: RmsNormConfig,
        interpret: bool = False,
    ) -> jax.Array:
        """The computation by the cfg's implementation."""

        def plain(x: jax.Array, weight: jax.Array | None = None) -> jax.Array:
            return _plain(x, weight, eps)

        def by_triton(x: jax.Array, *weights: jax.Array) -> jax.Array:
            def compute(block: jax.Array, mask: Any, *weights: jax.Array) -> jax.Array:
                square = jnp.sum(block * block, axis=1, keepdims=True) / x.shape[-1]
                return _scaled(block * jax.lax.rsqrt(square + eps), *weights)

            launch: dict[str, Any] = {"rows": cfg.rows, "num_warps": cfg.num_warps, "interpret": interpret}
            return by_rows(compute, x, weights, other=0.0, name=_NAME, **launch)

        def back_by_triton(dy: jax.Array, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
            how: dict[str, Any] = {"centred": False, "eps": eps, "interpret": interpret, "name": _NAME}
            return norm_gradients(x, dy, weight=weights[0] if weights else None, **how)

        def by_mosaic(x: jax.Array, *weights: jax.Array) -> jax.Array:
            from .mosaic import recipes, rows

            recipe = recipes.rms_norm(x.shape[-1], eps)
            launch: dict[str, Any] = {"num_warps": cfg.num_warps, "each": cfg.each, "interpret": interpret}
            return rows.by_rows(recipe, x, weights, name=_NAME, **launch)

        def back_by_mosaic(dy: jax.Array, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
            from .mosaic import norm_gradients

            how: dict[str, Any] = {"centred": False, "eps": eps, "interpret": interpret, "name": _NAME}
            return norm_gradients.norm_gradients(x, dy, weight=weights[0] if weights else None, **how)

        given = (x,) if weight is None else (x, weight)
        # Nothing has no lanes and no blocks.
        if cfg.implementation == "xla" or not x.size:
            return plain(*given)
        if cfg.implementation == "lanes":
            return _plain(x, weight, eps, cfg.lanes)
        if cfg.implementation == "recompute":
            return recomputed(plain, plain)(*given)  # type: ignore[no-any-return]
        if cfg.implementation == "triton" and fits(x.shape[-1]):
            return by_kernels(by_triton, back_by_triton, plain)(*given)  # type: ignore[no-any-return]
        if cfg.implementation == "triton":
            return recomputed(by_triton, plain)(*given)  # type: ignore[no-any-return]
        if cfg.implementation == "mosaic" and norm_rows.fits(x.shape[-1], x.dtype.itemsize):
            return by_kernels(by_mosaic, back_by_mosaic, plain)(*given)  # type: ignore[no-any-return]
        if cfg.implementation == "mosaic":
            return recomputed(by_mosaic, plain)(*given)  # type: ignore[no-any-return]
        raise ArgumentError(f"{cfg} names no implementation of rms_norm; use xla, lanes, recompute, triton or mosaic")

    def run_cpu(self, *args: Any, cfg: RmsNormConfig, **kwargs: Any) -> jax.Array:
        """Runs the kernel on a CPU; a Pallas kernel is interpreted there, which is for tests alone."""
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    def reference(self, x: jax.Array, weight: jax.Array | None = None, *, eps: float = 1e-6) -> jax.Array:
        """The right result, by which candidates are checked."""
        return _plain(x, weight, eps)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> RmsNormConfig:
        """XLA's: one pass over memory, and every way of differentiating works."""
        return RmsNormConfig("xla")

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> RmsNormConfig:
        """A block for each row: that took 0.6 to 0.99 of XLA's time on an H200, and its gradient 0.37 to 0.95."""
        ways = (RmsNormConfig(**way) for way in norm_ways(inv))
        return next((cfg for cfg in ways if self.valid_cfg(inv, cfg) is True), self.heuristic_cfg(inv))

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[RmsNormConfig]:
        """XLA's, with partial sums of two widths of vector registers, and with the gradient recomputed."""
        lanes = [RmsNormConfig("lanes", lanes=lanes) for lanes in (16, 64)]
        return [RmsNormConfig("xla"), *lanes, RmsNormConfig("recompute")]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[RmsNormConfig]:
        """XLA's with either gradient, and blocks of rows by either backend."""
        blocks = [RmsNormConfig("triton", rows=r, num_warps=w) for r, w in launches(inv.args[0].shape[-1])]
        wide = [RmsNormConfig("mosaic", num_warps=w, each=e) for w, e in spread.launches(inv.args[0])]
        return [RmsNormConfig("xla"), RmsNormConfig("recompute"), *blocks, *wide]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: RmsNormConfig) -> bool | str:
        """Lanes must divide the rows; a block must fit, and have something to compute."""
        return rows_refuse(inv, cfg.implementation, cfg.lanes, cfg.rows, cfg.num_warps, cfg.each) or True


@planned()
def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    cfg: RmsNormConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in float32; the result has the dtype of `x`."""
    x = float_rows("x", x)
    given = () if weight is None else (as_vector("weight", weight, "x", x),)
    if is_double(x, *given):
        refuse_cfg(cfg)
        return double.rms_norm(x, given[0] if given else None, epsilon(eps))
    return plan(RmsNorm(), x, *given, eps=epsilon(eps), cfg=cfg, executor=executor)  # type: ignore[no-any-return]


def _plain(x: jax.Array, weight: jax.Array | None, eps: float, lanes: int | None = None) -> jax.Array:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(reduce.mean(wide * wide, lanes) + eps)
    return _scaled(normed, *([] if weight is None else [weight.astype(jnp.float32)])).astype(x.dtype)


def _scaled(x: jax.Array, *weights: jax.Array) -> jax.Array:
    return x * across(weights[0], x) if weights else x
