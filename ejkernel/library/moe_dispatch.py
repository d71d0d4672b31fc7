"""Tokens sent to experts: each token's row copied to the groups of its experts, and added up again afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel
from .arguments import (
    ArgumentError,
    as_int32,
    float_array,
    integer,
    integers,
    known_values,
    same,
)
from .call import plan, planned, program
from .examples import drawn
from .permutation import by_counting, by_sorting, gathered_sum, inverse
from .top_k import TopKConfig, top_k
from .values import were_checked

_SCATTERS = 1 << 4


class Dispatched(NamedTuple):
    """Rows in order of their experts, how many each expert has, and each token's weights and places among them."""

    rows: jax.Array
    group_sizes: jax.Array
    weights: jax.Array
    places: jax.Array


@dataclass(frozen=True)
class MoeDispatchConfig:
    """The search for the order of rows."""

    implementation: str


class MoeDispatch(Kernel[MoeDispatchConfig, Any]):
    """Rows of `x` (tokens, width) copied to `experts` (tokens, k), of which there are `count`, in order of experts.

    Implementations: "sort" (a stable sort by expert) and "count" (each token's rank among those of its expert).
    """

    op_id = "library.moe_dispatch"
    version = "1"
    cfg_type = MoeDispatchConfig

    def run(self, x: jax.Array, experts: jax.Array, *, count: int, cfg: MoeDispatchConfig) -> Any:
        """Rows, group sizes and places."""
        tokens, k = experts.shape
        if cfg.implementation not in ("sort", "count"):
            raise ArgumentError(f"{cfg} names no implementation of moe_dispatch; use sort or count")
        order = by_sorting if cfg.implementation == "sort" else by_counting
        places, sizes = order(experts.reshape(-1), count)
        owner = inverse(places, tokens * k) // k
        return jnp.take(x, owner, axis=0, mode="clip"), sizes, places.reshape(tokens, k)

    def fwd_with_residuals(self, *args: Any, cfg: MoeDispatchConfig, **kwargs: Any) -> tuple[Any, Any]:
        """The result; its gradient needs the places alone."""
        out = self.run(*args, cfg=cfg, **kwargs)
        return out, out[2]

    def vjp(
        self, residuals: Any, y: Any, dy: Any, x: jax.Array, experts: jax.Array, *, count: int, cfg: MoeDispatchConfig
    ) -> tuple[jax.Array, None]:
        """Each token's gradient is the sum of its rows', which are read from where they are."""
        return gathered_sum(dy[0], residuals).astype(x.dtype), None

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> MoeDispatchConfig:
        """Counting: a sort makes several passes on a GPU, and takes longer on a CPU."""
        return MoeDispatchConfig("count")

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[MoeDispatchConfig]:
        """Both."""
        return [MoeDispatchConfig("count"), MoeDispatchConfig("sort")]

    def example_inputs(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """Random experts, where a trace hides the real ones."""
        x, experts = inv.args
        return (x, drawn(rng, experts, 0, inv.kwargs["count"])), dict(inv.kwargs)


@dataclass(frozen=True)
class MoeCombineConfig:
    """The sum of a token's rows."""

    implementation: str


class MoeCombine(Kernel[MoeCombineConfig, jax.Array]):
    """The sum of each token's rows times its weights: `rows` (n, width), `weights` and `places` (tokens, k).

    Implementations: "unrolled" (a gather for each of the k, in one program), "reduce" (one gather and a sum) and
    "scatter" (rows added to their tokens, as plain JAX is often written).
    """

    op_id = "library.moe_combine"
    version = "1"
    cfg_type = MoeCombineConfig

    def run(self, rows: jax.Array, weights: jax.Array, places: jax.Array, *, cfg: MoeCombineConfig) -> jax.Array:
        """The computation by the cfg's implementation."""
        if cfg.implementation == "unrolled":
            return gathered_sum(rows, places, weights).astype(rows.dtype)
        if cfg.implementation == "reduce":
            return _reduced(rows, weights, places)
        if cfg.implementation == "scatter":
            owner = inverse(places.reshape(-1), rows.shape[0])
            weight = jnp.take(weights.reshape(-1).astype(jnp.float32), owner, mode="fill", fill_value=0)
            parts = rows.astype(jnp.float32) * weight[:, None]
            parts = jnp.where((owner < places.size)[:, None], parts, 0)
            zeros = jnp.zeros((places.shape[0], rows.shape[1]), jnp.float32)
            return zeros.at[owner // places.shape[1]].add(parts, mode="drop").astype(rows.dtype)
        raise ArgumentError(f"{cfg} names no implementation of moe_combine; use unrolled, reduce or scatter")

    def reference(self, rows: jax.Array, weights: jax.Array, places: jax.Array) -> jax.Array:
        """The right result, by which candidates are checked."""
        return _reduced(rows, weights, places)

    def fwd_with_residuals(self, *args: Any, cfg: MoeCombineConfig, **kwargs: Any) -> tuple[Any, Any]:
        """The result; its gradient needs the arguments alone."""
        return self.run(*args, cfg=cfg, **kwargs), ()

    def vjp(
        self,
        residuals: Any,
        y: Any,
        dy: jax.Array,
        rows: jax.Array,
        weights: jax.Array,
        places: jax.Array,
        *,
        cfg: MoeCombineConfig,
    ) -> tuple[jax.Array, jax.Array, None]:
        """Each row's gradient is its token's times its weight, and each weight's a product of two rows."""
        owner = inverse(places.reshape(-1), rows.shape[0])
        used = owner < places.size
        weight = jnp.take(weights.reshape(-1).astype(jnp.float32), owner, mode="fill", fill_value=0)
        towards = jnp.take(dy, owner // places.shape[1], axis=0, mode="clip").astype(jnp.float32)
        d_rows = jnp.where(used[:, None], towards * weight[:, None], 0).astype(rows.dtype)
        wide = dy.astype(jnp.float32)
        parts = [jnp.take(rows, places[:, at], axis=0, mode="clip") for at in range(places.shape[1])]
        d_weights = jnp.stack([jnp.sum(part.astype(jnp.float32) * wide, axis=1) for part in parts], axis=1)
        return d_rows, d_weights.astype(weights.dtype), None

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> MoeCombineConfig:
        """Unrolled: one read of every row and one write of every token."""
        places = inv.args[2] if len(inv.args) > 2 else inv.kwargs["places"]
        return MoeCombineConfig("unrolled" if places.shape[1] <= _SCATTERS else "reduce")

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[MoeCombineConfig]:
        """All of them."""
        return [MoeCombineConfig(way) for way in ("unrolled", "reduce", "scatter")]

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


@planned()
def moe_dispatch(
    x: jax.Array,
    router_logits: jax.Array,
    *,
    k: int,
    normalize: bool = True,
    cfg: MoeDispatchConfig | None = None,
    route: TopKConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> Dispatched:
    """Copies each row of `x` (tokens, width) to its k experts, those of the largest `router_logits` (tokens, experts).

    Weights are the softmax over those k, or with `normalize=False` over all experts. `rows` and `group_sizes` are as
    `ragged_dot` takes them; row `places[t, j]` is that of token t for its j-th expert.
    """
    x = float_array("x", x, ("tokens", "width"))
    logits = float_array("router_logits", router_logits, ("tokens", "experts"))
    same("tokens", "x", x, x.shape[0], "router_logits", logits, logits.shape[0])
    k = integer("k", k)
    if not 1 <= k <= logits.shape[1]:
        raise ArgumentError(f"k={k} is not from 1 to the {logits.shape[1]} experts of router_logits {logits.shape}")

    def dispatched(executor: Executor[Any, Any] | None) -> Dispatched:
        values, experts = top_k(logits, k, cfg=route, executor=executor)
        wide = values.astype(jnp.float32)
        if normalize:
            weights = jax.nn.softmax(wide, axis=-1)
        else:
            weights = jnp.exp(wide - jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True))
        if not x.shape[0]:
            empty = jnp.zeros(logits.shape[1], jnp.int32)
            return Dispatched(x, empty, weights, experts)
        rows, sizes, places = _sent(x, experts, count=logits.shape[1], cfg=cfg, executor=executor)
        return Dispatched(rows, sizes, weights, places)

    return program("library.moe_dispatch", dispatched, executor)  # type: ignore[no-any-return]


@planned()
def _sent(x: jax.Array, experts: jax.Array, *, count: int, cfg: Any, executor: Any) -> Any:
    return plan(MoeDispatch(), x, experts, count=count, cfg=cfg, executor=executor)


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
