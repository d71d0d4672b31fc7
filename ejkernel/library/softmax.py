"""Rows as probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import Executor, Invocation
from . import reduce
from .arguments import ArgumentError, integer
from .call import plan, planned
from .double import is_double, refuse_cfg
from .guessed_rows import softmax_ways
from .mosaic import shelf, spread
from .reverse import ReverseOnGpu, recomputed
from .rows import float_rows, rows_refuse
from .triton.rows import by_rows, launches

# Beyond this XLA reads a row for its maximum, for its sum and for the result; in registers it reads it once.
_WIDE = 1 << 13


@dataclass(frozen=True)
class SoftmaxConfig:
    """An implementation, and its parameters where it has any."""

    implementation: str
    lanes: int | None = None
    parts: int | None = None
    rows: int | None = None
    num_warps: int | None = None
    # Elements of a row that a thread of "mosaic" takes at a time; None: the row is held whole.
    each: int | None = None
    # Is a row of "mosaic" kept in shared memory, rather than held in registers or read twice?
    shared: bool | None = None


class Softmax(ReverseOnGpu[SoftmaxConfig, jax.Array]):
    """`exp(x) / sum(exp(x))` over one axis.

    Implementations: "xla" (`jax.nn.softmax` in float32), "jax" (`jax.nn.softmax` in the argument's own dtype), "lanes"
    (maxima and sums side by side), "split" (each row in parts, joined at the end), "online" (maxima and sums in one
    pass), "triton" (blocks of whole rows) and "mosaic" (a block for each row of any width; with `shared` wide rows are
    kept in shared memory).
    """

    op_id = "library.softmax"
    version = "3"  # Mosaic's `shared`
    cfg_type = SoftmaxConfig

    def run(self, x: jax.Array, *, axis: int = -1, cfg: SoftmaxConfig, interpret: bool = False) -> jax.Array:
        """The computation by the cfg's implementation."""

        def plain(x: jax.Array) -> jax.Array:
            return jax.nn.softmax(x.astype(jnp.float32), axis=axis).astype(x.dtype)

        def by_triton(x: jax.Array) -> jax.Array:
            launch: dict[str, Any] = {"rows": cfg.rows, "num_warps": cfg.num_warps, "interpret": interpret}
            return by_rows(_of_block, x, (), other=-math.inf, name="library_softmax", **launch)

        def by_mosaic(x: jax.Array) -> jax.Array:
            from .mosaic import recipes, rows, staged

            launch: dict[str, Any] = {"num_warps": cfg.num_warps, "each": cfg.each, "interpret": interpret}
            if cfg.shared:
                return staged.softmax_rows(x, name="library_softmax", **launch)
            fast = x.dtype.itemsize == 2
            return rows.by_rows(recipes.softmax(), x, (), name="library_softmax", fast=fast, **launch)

        # JAX's own has no maximum of nothing.
        if x.size == 0:
            return x
        if cfg.implementation == "xla":
            return plain(x)
        if cfg.implementation == "jax":
            return jax.nn.softmax(x, axis=axis)
        if cfg.implementation == "lanes":
            return _by_lanes(x, cfg.lanes)
        if cfg.implementation == "split":
            return _by_parts(x, cfg.parts or 1)
        if cfg.implementation == "triton":
            return recomputed(by_triton, plain)(x)  # type: ignore[no-any-return]
        if cfg.implementation == "mosaic":
            return recomputed(by_mosaic, plain)(x)  # type: ignore[no-any-return]
        if cfg.implementation == "online":
            return recomputed(_online, plain)(x)  # type: ignore[no-any-return]
        names = "xla, jax, lanes, split, online, triton or mosaic"
        raise ArgumentError(f"{cfg} names no implementation of softmax; use {names}")

    def run_cpu(self, *args: Any, cfg: SoftmaxConfig, **kwargs: Any) -> jax.Array:
        """Runs the kernel on a CPU; a Pallas kernel is interpreted there, which is for tests alone."""
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    def reference(self, x: jax.Array, *, axis: int = -1) -> jax.Array:
        """The right result, by which candidates are checked."""
        return self.run(x, axis=axis, cfg=SoftmaxConfig("xla"))

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> SoftmaxConfig:
        """XLA's, in float32: exponentials of narrow values lose more than the conversion costs."""
        return SoftmaxConfig("xla")

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> SoftmaxConfig:
        """A block for each row: that took 0.38 to 0.91 of XLA's time on an H200, and half with a gradient."""
        ways = (SoftmaxConfig(**way) for way in softmax_ways(inv))
        return next((cfg for cfg in ways if self.valid_cfg(inv, cfg) is True), self.heuristic_cfg(inv))

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[SoftmaxConfig]:
        """Both of JAX's, lanes of two widths of vector registers, and parts, which give few rows to many cores."""
        lanes = [SoftmaxConfig("lanes", lanes=lanes) for lanes in (16, 64)]
        parts = [SoftmaxConfig("split", parts=parts) for parts in (4, 16)]
        return [SoftmaxConfig("xla"), SoftmaxConfig("jax"), *lanes, *parts]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[SoftmaxConfig]:
        """Both of JAX's, parts, maxima and sums in one pass for wide rows, and blocks of rows by either backend."""
        parts = [SoftmaxConfig("split", parts=parts) for parts in (4, 16, 64)]
        blocks = [SoftmaxConfig("triton", rows=r, num_warps=w) for r, w in launches(inv.args[0].shape[-1])]
        wide = [SoftmaxConfig("mosaic", num_warps=w, each=e) for w, e in spread.launches(inv.args[0])]
        wide += [SoftmaxConfig("mosaic", num_warps=w, each=e, shared=True) for w, e in shelf.launches(inv.args[0])]
        online = [SoftmaxConfig("online")] if inv.args[0].shape[-1] > _WIDE else []
        return [SoftmaxConfig("xla"), SoftmaxConfig("jax"), *parts, *online, *blocks, *wide]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: SoftmaxConfig) -> bool | str:
        """Everything but JAX's own works on the last axis; lanes and parts must divide it."""
        x = inv.args[0]
        if cfg.implementation in ("xla", "jax"):
            return True
        if inv.kwargs.get("axis", -1) != -1:
            return f"{cfg.implementation} works on the last axis alone"
        # A part of a row must be worth a program of its own.
        if cfg.implementation == "split" and (not cfg.parts or x.shape[-1] % cfg.parts or x.shape[-1] < 4096):
            return f"{cfg.parts} parts do not divide rows of {x.shape[-1]}, or the rows are short"
        launch = (cfg.lanes, cfg.rows, cfg.num_warps, cfg.each)
        return rows_refuse(inv, cfg.implementation, *launch, shared=bool(cfg.shared)) or True


@planned()
def softmax(
    x: jax.Array,
    *,
    axis: int = -1,
    cfg: SoftmaxConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """`exp(x) / sum(exp(x))` over an axis, computed in float32; the result has the dtype of `x`."""
    x = float_rows("x", x)
    axis = integer("axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ArgumentError(f"axis={axis!r} is no axis of x of shape {x.shape}")
    # Counted from the end, so that one call has one key.
    place = axis if axis < 0 else axis - x.ndim
    if is_double(x):
        refuse_cfg(cfg)
        return jax.nn.softmax(x, place)
    return plan(Softmax(), x, axis=place, cfg=cfg, executor=executor)  # type: ignore[no-any-return]


def _by_lanes(x: jax.Array, lanes: int | None) -> jax.Array:
    wide = x.astype(jnp.float32)
    top = jax.lax.stop_gradient(reduce.along(wide, jnp.max, lanes))
    powers = jnp.exp(wide - top)
    return (powers / reduce.along(powers, jnp.sum, lanes)).astype(x.dtype)


def _by_parts(x: jax.Array, parts: int) -> jax.Array:
    if x.shape[-1] % parts:
        raise ArgumentError(f"{parts} parts do not divide rows of {x.shape[-1]}")
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], parts, -1)
    tops = jax.lax.stop_gradient(jnp.max(wide, axis=-1, keepdims=True))
    top = jnp.max(tops, axis=-2, keepdims=True)
    # A part that holds nothing but -inf has no maximum of its own to take off.
    tops = jnp.where(tops == -math.inf, top, tops)
    powers = jnp.exp(wide - tops)
    shares = jnp.exp(tops - top)
    total = jnp.sum(jnp.sum(powers, axis=-1, keepdims=True) * shares, axis=-2, keepdims=True)
    return (powers * (shares / total)).reshape(x.shape).astype(x.dtype)


def _online(x: jax.Array) -> jax.Array:
    """Maximum and sum by one reduction of pairs, so that a row is read twice in all."""
    wide = x.astype(jnp.float32)

    def join(one: Any, other: Any) -> tuple[jax.Array, jax.Array]:
        top = jnp.maximum(one[0], other[0])
        # Equal ones keep their sum as it is: minus infinity less itself is no number.
        shares = [jnp.where(part[0] == top, 1.0, jnp.exp(part[0] - top)) for part in (one, other)]
        return top, one[1] * shares[0] + other[1] * shares[1]

    top, norm = jax.lax.reduce(
        (wide, jnp.ones_like(wide)), (jnp.float32(-math.inf), jnp.float32(0)), join, (x.ndim - 1,)
    )
    made: jax.Array = jnp.exp(wide - top[..., None]) / norm[..., None]
    return made.astype(x.dtype)


def _of_block(block: jax.Array, mask: Any) -> jax.Array:
    powers = jnp.exp(block - jnp.max(block, axis=1, keepdims=True))
    return powers / jnp.sum(powers, axis=1, keepdims=True)
