"""A residual added and the sum normalised, with one pass over memory in each direction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import Executor, Invocation
from . import double, reduce
from .arguments import ArgumentError, same_dtype
from .call import plan, planned
from .double import is_double, refuse_cfg
from .guessed_rows import norm_ways
from .mosaic import norm_rows, spread
from .reverse import ReverseOnGpu, recomputed
from .rows import across, as_vector, epsilon, float_rows, rows_refuse
from .triton.norm_gradients import fits, norm_gradients
from .triton.residual import summed_rows
from .triton.rows import guess, launches
from .varying import varying_like

KINDS = ("rms", "layer")
_NAME = "library_residual_norm"
Pair = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class ResidualNormConfig:
    """An implementation, and its parameters where it has any."""

    implementation: str
    lanes: int | None = None
    rows: int | None = None
    num_warps: int | None = None


class ResidualNorm(ReverseOnGpu[ResidualNormConfig, Pair]):
    """`summed = x + residual` and the norm of that over the last axis, times weight, plus bias.

    Implementations: "xla" (plain `jax.numpy`), "lanes" (partial sums side by side), "recompute" (a gradient from the
    sum and the vectors alone), "triton" (blocks of whole rows, and a gradient in one pass) and "mosaic" (the same by
    Mosaic GPU, each row held by the threads of a block).
    """

    op_id = "library.residual_norm"
    version = "1"
    cfg_type = ResidualNormConfig

    def run(
        self,
        x: jax.Array,
        residual: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None = None,
        *,
        kind: str = "rms",
        eps: float = 1e-6,
        cfg: ResidualNormConfig,
        interpret: bool = False,
    ) -> Pair:
        """The computation by the cfg's implementation."""
        centred = kind == "layer"
        vectors = (weight,) if bias is None else (weight, bias)
        lanes = cfg.lanes if cfg.implementation == "lanes" else None

        def norm(summed: jax.Array, *vectors: jax.Array) -> jax.Array:
            return _norm(summed, vectors, centred, eps, lanes)

        def plain(x: jax.Array, residual: jax.Array, *vectors: jax.Array) -> Pair:
            summed = x + residual
            return norm(summed, *vectors), summed

        def by_triton(x: jax.Array, residual: jax.Array, *vectors: jax.Array) -> Pair:
            def compute(block: jax.Array, mask: Any, *vectors: jax.Array) -> jax.Array:
                off = block
                if centred:
                    off = block - jnp.sum(block, axis=1, keepdims=True) / x.shape[-1]
                    off = off if mask is None else jnp.where(mask, off, 0.0)
                square = jnp.sum(off * off, axis=1, keepdims=True) / x.shape[-1]
                return _scaled(off * jax.lax.rsqrt(square + eps), vectors)

            launch: dict[str, Any] = {"rows": cfg.rows, "num_warps": cfg.num_warps, "interpret": interpret}
            return summed_rows(compute, x, residual, vectors, name=_NAME, **launch)

        def pulled(d_normed: jax.Array, d_summed: jax.Array, summed: jax.Array, *vectors: jax.Array) -> Any:
            wide, *rest = jax.vjp(lambda s, *v: norm(s, *v), summed, *vectors)[1](d_normed)
            return (wide.astype(jnp.float32) + d_summed.astype(jnp.float32)).astype(summed.dtype), *rest

        def pulled_by_triton(d_normed: jax.Array, d_summed: jax.Array, summed: jax.Array, *vectors: jax.Array) -> Any:
            how: dict[str, Any] = {"centred": centred, "eps": eps, "interpret": interpret, "name": _NAME}
            bias = vectors[1] if len(vectors) > 1 else None
            return norm_gradients(summed, d_normed, weight=vectors[0], bias=bias, added=d_summed, **how)

        def by_mosaic(x: jax.Array, residual: jax.Array, *vectors: jax.Array) -> Pair:
            from .mosaic import recipes, residual_rows

            width = x.shape[-1]
            layer = recipes.layer_norm(width, eps, lambda normed, others: _scaled(normed, others))
            rms = replace(recipes.rms_norm(width, eps), finish=lambda normed, *others: _scaled(normed, others))
            launch: dict[str, Any] = {"num_warps": cfg.num_warps, "interpret": interpret, "name": _NAME}
            return residual_rows.summed_rows(layer if centred else rms, x, residual, vectors, **launch)

        def pulled_by_mosaic(d_normed: jax.Array, d_summed: jax.Array, summed: jax.Array, *vectors: jax.Array) -> Any:
            from .mosaic import norm_gradients

            how: dict[str, Any] = {"centred": centred, "eps": eps, "interpret": interpret, "name": _NAME}
            bias = vectors[1] if len(vectors) > 1 else None
            return norm_gradients.norm_gradients(summed, d_normed, weight=vectors[0], bias=bias, added=d_summed, **how)

        # An empty array has no lanes and no blocks.
        if cfg.implementation in ("xla", "lanes") or not x.size:
            return plain(x, residual, *vectors)
        if cfg.implementation == "recompute":
            return _with_gradient(plain, pulled)(x, residual, *vectors)
        if cfg.implementation == "triton":
            back = recomputed(pulled_by_triton, pulled) if fits(x.shape[-1]) else pulled
            return _with_gradient(by_triton, back)(x, residual, *vectors)
        if cfg.implementation == "mosaic":
            back = recomputed(pulled_by_mosaic, pulled) if norm_rows.fits(x.shape[-1], x.dtype.itemsize) else pulled
            return _with_gradient(by_mosaic, back)(x, residual, *vectors)
        names = "xla, lanes, recompute, triton or mosaic"
        raise ArgumentError(f"{cfg} names no implementation of residual_norm; use {names}")

    def run_cpu(self, *args: Any, cfg: ResidualNormConfig, **kwargs: Any) -> Pair:
        """Runs the kernel on a CPU; a Pallas kernel is interpreted there, which is for tests alone."""
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    def reference(self, *args: Any, **kwargs: Any) -> Pair:
        """The right result, by which candidates are checked."""
        return self.run(*args, cfg=ResidualNormConfig("xla"), **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> ResidualNormConfig:
        """XLA's: one pass over memory, and every way of differentiating works."""
        return ResidualNormConfig("xla")

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> ResidualNormConfig:
        """A block for each row; Mosaic's where a norm alone has it: 0.86 of Triton's time with gradient on an H200."""
        first: dict[str, Any] = next(iter(norm_ways(inv)), {})
        mosaic = ResidualNormConfig("mosaic", num_warps=first.get("num_warps"))
        if first.get("implementation") == "mosaic" and self.valid_cfg(inv, mosaic) is True:
            return mosaic
        block = ResidualNormConfig("triton", None, *(guess(inv) or (None, None)))
        return block if block.rows and self.valid_cfg(inv, block) is True else self.heuristic_cfg(inv)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[ResidualNormConfig]:
        """XLA's, with partial sums of two widths of vector registers, and with the gradient recomputed."""
        lanes = [ResidualNormConfig("lanes", lanes=lanes) for lanes in (16, 64)]
        return [ResidualNormConfig("xla"), *lanes, ResidualNormConfig("recompute")]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[ResidualNormConfig]:
        """XLA's with either gradient, and blocks of rows by either backend."""
        blocks = [ResidualNormConfig("triton", rows=r, num_warps=w) for r, w in launches(inv.args[0].shape[-1])]
        held = [ResidualNormConfig("mosaic", num_warps=w) for w, each in spread.launches(inv.args[0]) if each is None]
        return [ResidualNormConfig("xla"), ResidualNormConfig("recompute"), *blocks, *held]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: ResidualNormConfig) -> bool | str:
        """Lanes must divide the rows; a block must fit, and have something to compute."""
        return rows_refuse(inv, cfg.implementation, cfg.lanes, cfg.rows, cfg.num_warps) or True


@planned()
def residual_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    kind: str = "rms",
    eps: float = 1e-6,
    cfg: ResidualNormConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The norm of `x + residual` over the last axis, times weight, plus bias; and that sum, in the dtype of `x`.

    `kind` is "rms" or "layer". The norm is that of the sum as it is returned, in float32.
    """
    x, residual = float_rows("x", x), float_rows("residual", residual)
    same_dtype("x", x, "residual", residual)
    if x.shape != residual.shape:
        raise ArgumentError(f"x and residual must have the same shape, got {x.shape} and {residual.shape}")
    if kind not in KINDS:
        raise ArgumentError(f"kind={kind!r} is no norm; use rms or layer")
    given = [as_vector("weight", weight, "x", x), *([] if bias is None else [as_vector("bias", bias, "x", x)])]
    if is_double(x, *given):
        refuse_cfg(cfg)
        return _double(x + residual, given, kind == "layer", epsilon(eps))
    how: dict[str, Any] = {"kind": kind, "eps": epsilon(eps), "cfg": cfg, "executor": executor}
    return plan(ResidualNorm(), x, residual, *given, then=tuple, **how)  # type: ignore[no-any-return]


def _double(summed: jax.Array, vectors: Any, centred: bool, eps: float) -> Pair:
    weight, bias = vectors[0], vectors[1] if len(vectors) > 1 else None
    if centred:
        return double.layer_norm(summed, weight, bias, eps), summed
    normed = double.rms_norm(summed, weight, eps)
    return (normed if bias is None else (normed + across(bias, normed)).astype(summed.dtype)), summed


def _norm(x: jax.Array, vectors: Any, centred: bool, eps: float, lanes: int | None) -> jax.Array:
    wide = x.astype(jnp.float32)
    off = wide - reduce.mean(wide, lanes) if centred else wide
    normed = off * jax.lax.rsqrt(reduce.mean(off * off, lanes) + eps)
    return _scaled(normed, [vector.astype(jnp.float32) for vector in vectors]).astype(x.dtype)


def _scaled(x: jax.Array, vectors: Any) -> jax.Array:
    x = x * across(vectors[0], x)
    return x + across(vectors[1], x) if len(vectors) > 1 else x


def _with_gradient(forward: Callable[..., Pair], pulled: Callable[..., Any]) -> Callable[..., Pair]:
    """The forward function, with a gradient from its second result and the vectors; both summands get the same."""
    made = jax.custom_vjp(forward)

    def kept(x: jax.Array, residual: jax.Array, *vectors: jax.Array) -> tuple[Pair, Any]:
        # Not the forward function itself: gradients of gradients differentiate this rule.
        out = made(x, residual, *vectors)
        return out, (out[1], *vectors)

    def back(residuals: Any, dy: Pair) -> tuple[jax.Array, ...]:
        towards, *rest = pulled(*dy, *residuals)
        return towards, towards, *rest

    made.defvjp(kept, back)

    def alike(*args: jax.Array) -> Pair:
        # Inside shard_map, arrays that all shards share are spread before, so that JAX itself adds up their gradients.
        return made(*(varying_like(arg, *args) for arg in args))

    return alike
