"""Rows of experts added up again: the weighted sum of each token's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel
from .arguments import ArgumentError, as_int32, float_array, integers, known_values
from .call import plan, planned
from .mosaic import served, spread
from .mosaic.measured_calls import is_measured
from .permutation import gathered_sum, inverse
from .reverse import recomputed
from .values import were_checked

_SCATTERS = 1 << 4


@dataclass(frozen=True)
class MoeCombineConfig:
    """The sum of a token's rows."""

    implementation: str


class MoeCombine(Kernel[MoeCombineConfig, jax.Array]):
    """The sum of each token's rows times its weights: `rows` (n, width), `weights` and `places` (tokens, k).

    Implementations: "unrolled" (a gather for each of the k, in one program), "reduce" (one gather and a sum),
    "scatter" (rows added to their tokens, as plain JAX is often written) and "mosaic" (a kernel for NVIDIA GPUs with a
    block for each token, forward and backward).
    """

    op_id = "library.moe_combine"
    version = "1"
    cfg_type = MoeCombineConfig

    def run(
        self,
        rows: jax.Array,
        weights: jax.Array,
        places: jax.Array,
        *,
        permuted: bool = False,
        cfg: MoeCombineConfig,
        interpret: bool = False,
    ) -> jax.Array:
        """The computation by the cfg's implementation; `permuted`: each row has its place, which a gradient may use."""
        if cfg.implementation == "unrolled":
            return gathered_sum(rows, places, weights).astype(rows.dtype)
        if cfg.implementation == "reduce":
            return _reduced(rows, weights, places)
        if cfg.implementation == "scatter":
            return _scattered(rows, weights, places)
        if cfg.implementation == "mosaic":
            from .mosaic import token_rows

            def by_mosaic(rows: jax.Array, weights: jax.Array, places: jax.Array) -> jax.Array:
                return token_rows.summed(rows, places, weights, interpret=interpret)

            return recomputed(by_mosaic, _reduced)(rows, weights, places)  # type: ignore[no-any-return]
        names = "unrolled, reduce, scatter or mosaic"
        raise ArgumentError(f"{cfg} names no implementation of moe_combine; use {names}")

    def run_cpu(self, *args: Any, cfg: MoeCombineConfig, **kwargs: Any) -> jax.Array:
        """Runs the kernel on a CPU; a Pallas kernel is interpreted there, which is for tests alone."""
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    def reference(self, rows: jax.Array, weights: jax.Array, places: jax.Array, *, permuted: bool = False) -> jax.Array:
        """The right result, by which candidates are checked."""
        return _reduced(rows, weights, places)

    def fwd_with_residuals(self, *args: Any, cfg: MoeCombineConfig, **kwargs: Any) -> tuple[Any, Any]:
        """The result; its gradient needs the arguments alone."""
        return self.run(*args, cfg=cfg, **kwargs), ()

    def fwd_with_residuals_cpu(self, *args: Any, cfg: MoeCombineConfig, **kwargs: Any) -> tuple[Any, Any]:
        """The result on a CPU; its gradient needs the arguments alone."""
        return self.run_cpu(*args, cfg=cfg, **kwargs), ()

    def vjp(
        self,
        residuals: Any,
        y: Any,
        dy: jax.Array,
        rows: jax.Array,
        weights: jax.Array,
        places: jax.Array,
        *,
        permuted: bool = False,
        cfg: MoeCombineConfig,
        interpret: bool = False,
    ) -> tuple[jax.Array, jax.Array, None]:
        """Each row's gradient is its token's times its weight, and each weight's a product of two rows."""
        # Where a row has no place, as where another's is out of range, the kernel would leave its gradient unwritten.
        if cfg.implementation != "mosaic" or rows.shape[0] != places.size or not permuted:
            return *_pulled(dy, rows, weights, places), None
        from .mosaic import token_rows

        def by_mosaic(dy: jax.Array, rows: jax.Array, weights: jax.Array, places: jax.Array) -> Any:
            return token_rows.pulled(dy, rows, places, weights, interpret=interpret)

        d_rows, d_weights = recomputed(by_mosaic, _pulled)(dy, rows, weights, places)
        return d_rows, d_weights, None

    def vjp_cpu(self, *args: Any, cfg: MoeCombineConfig, **kwargs: Any) -> tuple[jax.Array, jax.Array, None]:
        """The gradients on a CPU, where a Pallas kernel is interpreted."""
        return self.vjp(*args, cfg=cfg, interpret=True, **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> MoeCombineConfig:
        """Unrolled: one read of every row and one write of every token."""
        return MoeCombineConfig("unrolled" if _named(inv)["places"].shape[1] <= _SCATTERS else "reduce")

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> MoeCombineConfig:
        """A block for each token where that was measured: 0.87 of the time of plain JAX on an H200."""
        own = MoeCombineConfig("mosaic")
        is_guessed = is_measured(inv, _named(inv)["rows"].size) and self.valid_cfg(inv, own) is True
        return own if is_guessed else self.heuristic_cfg(inv)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[MoeCombineConfig]:
        """All ways in plain JAX."""
        return [MoeCombineConfig(way) for way in ("unrolled", "reduce", "scatter")]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[MoeCombineConfig]:
        """The Mosaic kernel, and all ways in plain JAX."""
        return [MoeCombineConfig("mosaic"), *self.candidate_cfgs(inv)]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: MoeCombineConfig) -> bool | str:
        """Refuses the Mosaic kernel where it cannot run, with the reason."""
        if cfg.implementation != "mosaic":
            return True
        rows, places = (_named(inv)[name] for name in ("rows", "places"))
        refused = spread.tokens_refuse(rows.shape[1], rows.dtype, places.shape[1])
        return refused or served.refuses(inv, rows.size, hopper=False) or True

    def example_inputs(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """Each place once, where a trace hides the real ones."""
        rows, weights, places = inv.args
        if known_values(places) is None:
            count = max(places.size, rows.shape[0])
            places = rng.permutation(count)[: places.size].reshape(places.shape).astype(places.dtype)
        return (rows, weights, places), dict(inv.kwargs)


def _reduced(rows: jax.Array, weights: jax.Array, places: jax.Array) -> jax.Array:
    taken = jnp.take(rows, places, axis=0, mode="clip").astype(jnp.float32)
    return jnp.sum(taken * weights[:, :, None].astype(jnp.float32), axis=1).astype(rows.dtype)


def _scattered(rows: jax.Array, weights: jax.Array, places: jax.Array) -> jax.Array:
    owner = inverse(places.reshape(-1), rows.shape[0])
    weight = jnp.take(weights.reshape(-1).astype(jnp.float32), owner, mode="fill", fill_value=0)
    parts = rows.astype(jnp.float32) * weight[:, None]
    parts = jnp.where((owner < places.size)[:, None], parts, 0)
    zeros = jnp.zeros((places.shape[0], rows.shape[1]), jnp.float32)
    return zeros.at[owner // places.shape[1]].add(parts, mode="drop").astype(rows.dtype)


def _pulled(dy: jax.Array, rows: jax.Array, weights: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    owner = inverse(places.reshape(-1), rows.shape[0])
    used = owner < places.size
    weight = jnp.take(weights.reshape(-1).astype(jnp.float32), owner, mode="fill", fill_value=0)
    towards = jnp.take(dy, owner // places.shape[1], axis=0, mode="clip").astype(jnp.float32)
    d_rows = jnp.where(used[:, None], towards * weight[:, None], 0).astype(rows.dtype)
    wide = dy.astype(jnp.float32)
    parts = [jnp.take(rows, places[:, at], axis=0, mode="clip") for at in range(places.shape[1])]
    d_weights = jnp.stack([jnp.sum(part.astype(jnp.float32) * wide, axis=1) for part in parts], axis=1)
    return d_rows, d_weights.astype(weights.dtype)


def _named(inv: Invocation[Any, Any]) -> dict[str, Any]:
    return dict(zip(("rows", "weights", "places"), inv.args, strict=False)) | dict(inv.kwargs)


def _out_of(places: np.ndarray[Any, Any], rows: int) -> bool:
    return bool(places.size and (places.min() < 0 or places.max() >= rows))


def _fit(places: np.ndarray[Any, Any], rows: int) -> bool:
    return not _out_of(places, rows) and np.unique(places).size == places.size


def _places_are_known(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    # All three arrays by position, as nearly every call has them: a call of another form is checked in full.
    shape: tuple[int, ...] = args[0].shape if len(args) == 3 else ()
    return len(shape) == 2 and were_checked(args[2], shape[0], _fit)


@planned(known_good=_places_are_known)
def moe_combine(
    rows: jax.Array,
    weights: jax.Array,
    places: jax.Array,
    *,
    cfg: MoeCombineConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """The sum of each token's rows times its weights: row `places[t, j]` of `rows` (n, width) by `weights[t, j]`.

    Each row has at most one place. Places out of range are an error where they can be read; under a trace the nearest
    row is read.
    """
    rows = float_array("rows", rows, ("n", "width"))
    weights = float_array("weights", weights, ("tokens", "k"))
    given = integers("places", places, ("tokens", "k"))
    if weights.shape != given.shape:
        raise ArgumentError(f"weights and places must have the same shape, got {weights.shape} and {given.shape}")
    known = known_values(given)
    if known is not None and _out_of(known, rows.shape[0]):
        raise ArgumentError(
            f"places must be from 0 to before the {rows.shape[0]} rows of rows {rows.shape}; "
            f"they are from {known.min()} to {known.max()}"
        )
    if known is not None and not _fit(known, rows.shape[0]):
        raise ArgumentError("places must differ from each other: a row belongs to one token")
    if not given.size or not rows.size:
        return jnp.zeros((given.shape[0], rows.shape[1]), rows.dtype)
    return plan(MoeCombine(), rows, weights, as_int32(given), cfg=cfg, executor=executor)  # type: ignore[no-any-return]


@planned()
def combined(
    rows: jax.Array,
    weights: jax.Array,
    places: jax.Array,
    *,
    cfg: MoeCombineConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """The sum for places as `moe_dispatch` has made them: each row has one."""
    if not places.size or not rows.size:
        return jnp.zeros((places.shape[0], rows.shape[1]), rows.dtype)
    return plan(MoeCombine(), rows, weights, places, permuted=True, cfg=cfg, executor=executor)  # type: ignore[no-any-return]
