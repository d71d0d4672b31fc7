"""Rows with their mean taken off, over their standard deviation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import Executor, Invocation
from . import double, reduce
from .arguments import ArgumentError
from .call import plan, planned
from .double import is_double, refuse_cfg
from .guessed_rows import from_memory, norm_ways
from .mosaic import norm_rows, served, spread, streams
from .reverse import ReverseOnGpu, by_kept, by_kernels, recomputed
from .rows import across, as_vector, epsilon, float_rows, rows_refuse
from .triton.norm_gradients import fits, norm_gradients
from .triton.rows import by_rows, launches

# As a profile shows it.
_NAME = "library_layer_norm"
# Columns from which a row's mean and factor are kept without tuning: a gradient of 8192x4096 took 59.7 us on an H200
# with them and 62.8 without, one of 32768x1024 76 and 61.
_KEPT_FROM = 4096


@dataclass(frozen=True)
class LayerNormConfig:
    """An implementation, and its parameters where it has any."""

    implementation: str
    lanes: int | None = None
    rows: int | None = None
    num_warps: int | None = None
    # Elements of a row that a thread of "mosaic" takes at a time; None: the row is held whole.
    each: int | None = None
    # Of "mosaic": a mean and a factor of each row kept for the gradient, and rows that stream through blocks that stay.
    kept: bool = False
    streams: bool = False


class LayerNorm(ReverseOnGpu[LayerNormConfig, jax.Array]):
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last axis.

    Implementations: "xla" (the mean first), "one_pass" (sums of x and of x^2 together, for bfloat16), "lanes" (partial
    sums side by side), "recompute" (a gradient from the arguments alone), "triton" (blocks of whole rows, and a
    gradient in one pass) and "mosaic" (a block for each row of any width, and such a gradient; or `streams`: blocks
    that stay, and hold the vectors while rows stream through their shared memory).
    """

    op_id = "library.layer_norm"
    version = "4"  # Mosaic's `once` is gone, and `streams` came
    cfg_type = LayerNormConfig

    def run(
        self,
        x: jax.Array,
        weight: jax.Array | None = None,
        bias: jax.Array | None = None,
        *,
        eps: float = 1e-6,
        cfg: LayerNormConfig,
        interpret: bool = False,
    ) -> jax.Array:
        """The computation by the cfg's implementation."""
        kinds = tuple(kind for kind, given in (("weight", weight), ("bias", bias)) if given is not None)
        given = (x, *(vector for vector in (weight, bias) if vector is not None))

        def plain(x: jax.Array, *vectors: jax.Array) -> jax.Array:
            return _finished(_normed(x, eps), kinds, vectors).astype(x.dtype)

        def at_once(x: jax.Array, *vectors: jax.Array) -> jax.Array:
            return _finished(_normed_at_once(x, eps), kinds, vectors).astype(x.dtype)

        def by_triton(x: jax.Array, *vectors: jax.Array) -> jax.Array:
            def compute(block: jax.Array, mask: Any, *others: jax.Array) -> jax.Array:
                width = x.shape[-1]
                off = block - jnp.sum(block, axis=1, keepdims=True) / width
                off = off if mask is None else jnp.where(mask, off, 0.0)
                variance = jnp.sum(off * off, axis=1, keepdims=True) / width
                return _finished(off * jax.lax.rsqrt(variance + eps), kinds, others)

            launch: dict[str, Any] = {"rows": cfg.rows, "num_warps": cfg.num_warps, "interpret": interpret}
            return by_rows(compute, x, vectors, other=0.0, name=_NAME, **launch)

        def back_by_triton(dy: jax.Array, x: jax.Array, *vectors: jax.Array) -> tuple[jax.Array, ...]:
            how: dict[str, Any] = {"centred": True, "eps": eps, "interpret": interpret, "name": _NAME}
            return norm_gradients(x, dy, **how, **dict[str, Any](zip(kinds, vectors, strict=True)))

        def rows_by_mosaic(numbers: int, x: jax.Array, *vectors: jax.Array) -> Sequence[jax.Array]:
            from .mosaic import norm_streams, recipes, rows

            def finished(normed: jax.Array, others: Iterable[jax.Array]) -> jax.Array:
                return _finished(normed, kinds, others)

            stream = streams.forward(*_shape(x)) if cfg.streams else None
            if cfg.streams and stream is None:
                raise ArgumentError(f"{cfg} cannot compute this call: {streams.refuses(*_shape(x))}")
            if stream is not None:
                how: dict[str, Any] = {"numbers": numbers, "eps": eps, "stream": stream, "name": _NAME}
                return norm_streams.layer_norm(x, vectors, finished, interpret=interpret, **how)
            recipe = recipes.layer_norm(x.shape[-1], eps, finished)
            launch: dict[str, Any] = {"num_warps": cfg.num_warps, "each": cfg.each, "interpret": interpret}
            return rows.with_numbers(recipe, x, vectors, numbers=numbers, name=_NAME, **launch)

        def by_mosaic(x: jax.Array, *vectors: jax.Array) -> jax.Array:
            return rows_by_mosaic(0, x, *vectors)[0]

        def keeping(x: jax.Array, *vectors: jax.Array) -> Any:
            return tuple(rows_by_mosaic(2, x, *vectors))

        def back_from_kept(dy: jax.Array, kept: Any, x: jax.Array, *vectors: jax.Array) -> tuple[jax.Array, ...]:
            from .mosaic import norm_gradients, norm_streams

            how: dict[str, Any] = {"eps": eps, "interpret": interpret, "name": _NAME, "kept": kept}
            given = dict[str, Any](zip(kinds, vectors, strict=True))
            # Rows that are whole steps of a forward pass alone have a block each here.
            stream = streams.backward(*_shape(x)) if cfg.streams else None
            if stream is not None:
                given = {"weight": None, "bias": None, **given}
                return norm_streams.gradients(x, dy, stream=stream, **how, **given)
            return norm_gradients.norm_gradients(x, dy, centred=True, **how, **given)

        def back_by_mosaic(dy: jax.Array, x: jax.Array, *vectors: jax.Array) -> tuple[jax.Array, ...]:
            return back_from_kept(dy, None, x, *vectors)

        # On an H200 the gradient of one pass takes half the time of the other.
        again = at_once if x.dtype == jnp.bfloat16 else plain
        # Nothing has no lanes and no blocks.
        if cfg.implementation == "xla" or not x.size:
            return plain(*given)
        if cfg.implementation == "lanes":
            return _finished(_normed(x, eps, cfg.lanes), kinds, given[1:]).astype(x.dtype)
        if cfg.implementation == "one_pass":
            return at_once(*given)
        if cfg.implementation == "recompute":
            return recomputed(plain, plain)(*given)  # type: ignore[no-any-return]
        if cfg.implementation == "triton" and fits(x.shape[-1]):
            return by_kernels(by_triton, back_by_triton, plain)(*given)  # type: ignore[no-any-return]
        if cfg.implementation == "triton":
            return recomputed(by_triton, again)(*given)  # type: ignore[no-any-return]
        if cfg.implementation == "mosaic" and cfg.kept and norm_rows.fits(x.shape[-1], x.dtype.itemsize):
            return by_kept(by_mosaic, keeping, back_from_kept, plain)(*given)  # type: ignore[no-any-return]
        if cfg.implementation == "mosaic" and norm_rows.fits(x.shape[-1], x.dtype.itemsize):
            return by_kernels(by_mosaic, back_by_mosaic, plain)(*given)  # type: ignore[no-any-return]
        if cfg.implementation == "mosaic":
            return recomputed(by_mosaic, again)(*given)  # type: ignore[no-any-return]
        names = "xla, one_pass, lanes, recompute, triton or mosaic"
        raise ArgumentError(f"{cfg} names no implementation of layer_norm; use {names}")

    def run_cpu(self, *args: Any, cfg: LayerNormConfig, **kwargs: Any) -> jax.Array:
        """Runs the kernel on a CPU; a Pallas kernel is interpreted there, which is for tests alone."""
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    def reference(
        self, x: jax.Array, weight: jax.Array | None = None, bias: jax.Array | None = None, *, eps: float = 1e-6
    ) -> jax.Array:
        """The right result, by which candidates are checked."""
        return self.run(x, weight, bias, eps=eps, cfg=LayerNormConfig("xla"))

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> LayerNormConfig:
        """XLA's: right for every mean, and every way of differentiating works."""
        return LayerNormConfig("xla")

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> LayerNormConfig:
        """Rows from memory stream through blocks that stay, others have a block for each row or two.

        With its gradient that took 0.95 of the time of a block for each row on an H200, 0.97 with means kept. Blocks
        for each row took 0.46 to 0.89 of XLA's time, and their gradient 0.38 to 0.47.
        """
        kept = inv.args[0].shape[-1] >= _KEPT_FROM
        streamed = from_memory(inv) and streams.fills(inv)
        ways = [LayerNormConfig(**way) for way in norm_ways(inv)]
        tried = [replace(cfg, streams=True) for cfg in ways if cfg.implementation == "mosaic" and streamed]
        tried += [replace(cfg, kept=kept and not self._refuses(inv, replace(cfg, kept=kept))) for cfg in ways]
        return next((cfg for cfg in tried if self.valid_cfg(inv, cfg) is True), self.heuristic_cfg(inv))

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[LayerNormConfig]:
        """XLA's, one pass, partial sums of two widths of vector registers, and the gradient recomputed."""
        lanes = [LayerNormConfig("lanes", lanes=lanes) for lanes in (16, 64)]
        return [LayerNormConfig("xla"), LayerNormConfig("one_pass"), *lanes, LayerNormConfig("recompute")]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[LayerNormConfig]:
        """XLA's by either sum and with either gradient, and blocks of rows by either backend."""
        blocks = [LayerNormConfig("triton", rows=r, num_warps=w) for r, w in launches(inv.args[0].shape[-1])]
        wide = [LayerNormConfig("mosaic", num_warps=w, each=e) for w, e in spread.launches(inv.args[0])]
        # Fewer meetings of the warpgroups that hold a row.
        more = [replace(cfg, kept=True) for cfg in wide[:1]]
        more += [LayerNormConfig("mosaic", num_warps=4, kept=kept, streams=True) for kept in (False, True)]
        wide += [cfg for cfg in more if self._refuses(inv, cfg) == ""]
        return [*(LayerNormConfig(name) for name in ("xla", "one_pass", "recompute")), *blocks, *wide]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: LayerNormConfig) -> bool | str:
        """Checks a cfg as rms_norm does; one pass needs an argument that is coarser than what its difference loses."""
        x = inv.args[0]
        # Sums of squares in float32 lose 1e-7 of mean^2/variance; bfloat16 rounds 4e-3 of the mean away beforehand.
        if cfg.implementation == "one_pass" and x.dtype.name != "bfloat16":
            return f"mean(x^2) - mean(x)^2 is too coarse for {x.dtype.name} with a large mean"
        refused = rows_refuse(inv, cfg.implementation, cfg.lanes, cfg.rows, cfg.num_warps, cfg.each)
        return refused or self._refuses(inv, cfg) or True

    def _refuses(self, inv: Invocation[Any, Any], cfg: LayerNormConfig) -> str:
        x = inv.args[0]
        if (cfg.kept or cfg.streams) and cfg.implementation != "mosaic":
            return f"kept={cfg.kept} and streams={cfg.streams} are for mosaic alone"
        if cfg.kept and not norm_rows.fits(x.shape[-1], x.dtype.itemsize):
            return f"rows of {x.shape[-1]} have no gradient by mosaic, which nothing is kept for"
        if cfg.streams and (cfg.num_warps != 4 or cfg.each is not None):
            return f"rows stream through blocks of 4 warps, not {cfg.num_warps} with each={cfg.each}"
        if not cfg.streams:
            return ""
        # Shared memory of another generation is not as large.
        return streams.refuses(*_shape(x)) or served.refuses(inv, x.size, hopper=True)


@planned()
def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    cfg: LayerNormConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last axis; the result has the dtype of `x`."""
    x = float_rows("x", x)
    scale = None if weight is None else as_vector("weight", weight, "x", x)
    given = (x, scale) if bias is None else (x, scale, as_vector("bias", bias, "x", x))
    if is_double(*given):
        refuse_cfg(cfg)
        return double.layer_norm(x, scale, None if bias is None else given[-1], epsilon(eps))
    return plan(LayerNorm(), *given, eps=epsilon(eps), cfg=cfg, executor=executor)  # type: ignore[no-any-return]


def _shape(x: Any) -> tuple[int, int, int]:
    """Rows, their elements, and the bytes of one."""
    return math.prod(x.shape[:-1]), x.shape[-1], x.dtype.itemsize


def _normed(x: jax.Array, eps: float, lanes: int | None = None) -> jax.Array:
    wide = x.astype(jnp.float32)
    off = wide - reduce.mean(wide, lanes)
    return off * jax.lax.rsqrt(reduce.mean(off * off, lanes) + eps)


def _normed_at_once(x: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    middle = reduce.mean(wide)
    # Rounding may leave a constant row with less than nothing.
    variance = jnp.maximum(reduce.mean(wide * wide) - middle * middle, 0.0)
    return (wide - middle) * jax.lax.rsqrt(variance + eps)


def _finished(normed: jax.Array, kinds: Iterable[str], vectors: Iterable[jax.Array]) -> jax.Array:
    for kind, vector in zip(kinds, vectors, strict=True):
        wide = across(vector.astype(jnp.float32), normed)
        normed = normed * wide if kind == "weight" else normed + wide
    return normed
