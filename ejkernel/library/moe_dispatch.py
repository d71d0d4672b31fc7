"""Tokens sent to experts: each token's row copied to the groups of its experts."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel
from .arguments import ArgumentError, float_array, integer, same
from .call import plan, planned, program
from .examples import drawn
from .mosaic import served, spread
from .mosaic.measured_calls import is_measured
from .permutation import by_counting, by_sorting, gathered_sum, inverse
from .reverse import recomputed
from .top_k import TopKConfig, top_k

_NAMES = ("sort", "count", "mosaic")


class Dispatched(NamedTuple):
    """Rows in order of their experts, how many each expert has, and each token's weights and places among them."""

    rows: jax.Array
    group_sizes: jax.Array
    weights: jax.Array
    places: jax.Array


@dataclass(frozen=True)
class MoeDispatchConfig:
    """The search for the order of rows, and how they are copied."""

    implementation: str


class MoeDispatch(Kernel[MoeDispatchConfig, Any]):
    """Rows of `x` (tokens, width) copied to `experts` (tokens, k), of which there are `count`, in order of experts.

    Implementations: "sort" (a stable sort by expert), "count" (each token's rank among those of its expert) and
    "mosaic" (ranks as well, and a kernel for NVIDIA GPUs that reads each token's row once and writes it k times).
    """

    op_id = "library.moe_dispatch"
    version = "1"
    cfg_type = MoeDispatchConfig

    def run(
        self, x: jax.Array, experts: jax.Array, *, count: int, cfg: MoeDispatchConfig, interpret: bool = False
    ) -> Any:
        """Rows, group sizes and places."""
        tokens, k = experts.shape
        if cfg.implementation not in _NAMES:
            raise ArgumentError(f"{cfg} names no implementation of moe_dispatch; use sort, count or mosaic")
        order = by_sorting if cfg.implementation == "sort" else by_counting
        places, sizes = order(experts.reshape(-1), count)
        places = places.reshape(tokens, k)
        if cfg.implementation != "mosaic":
            return _copied(x, places), sizes, places
        from .mosaic import token_rows

        def by_mosaic(x: jax.Array, places: jax.Array) -> jax.Array:
            return token_rows.sent(x, places, interpret=interpret)

        return recomputed(by_mosaic, _copied)(x, places), sizes, places

    def run_cpu(self, *args: Any, cfg: MoeDispatchConfig, **kwargs: Any) -> Any:
        """Runs the kernel on a CPU; a Pallas kernel is interpreted there, which is for tests alone."""
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    def fwd_with_residuals(self, *args: Any, cfg: MoeDispatchConfig, **kwargs: Any) -> tuple[Any, Any]:
        """The result; its gradient needs the places alone."""
        out = self.run(*args, cfg=cfg, **kwargs)
        return out, out[2]

    def fwd_with_residuals_cpu(self, *args: Any, cfg: MoeDispatchConfig, **kwargs: Any) -> tuple[Any, Any]:
        """The result on a CPU; its gradient needs the places alone."""
        return self.fwd_with_residuals(*args, cfg=cfg, interpret=True, **kwargs)

    def vjp(
        self,
        residuals: Any,
        y: Any,
        dy: Any,
        x: jax.Array,
        experts: jax.Array,
        *,
        count: int,
        cfg: MoeDispatchConfig,
        interpret: bool = False,
    ) -> tuple[jax.Array, None]:
        """Each token's gradient is the sum of its rows', which are read from where they are."""
        if cfg.implementation != "mosaic":
            return _added(dy[0], residuals).astype(x.dtype), None
        from .mosaic import token_rows

        def by_mosaic(rows: jax.Array, places: jax.Array) -> jax.Array:
            return token_rows.summed(rows, places, None, interpret=interpret)

        return recomputed(by_mosaic, _added)(dy[0], residuals).astype(x.dtype), None

    def vjp_cpu(self, *args: Any, cfg: MoeDispatchConfig, **kwargs: Any) -> tuple[jax.Array, None]:
        """The gradient on a CPU, where a Pallas kernel is interpreted."""
        return self.vjp(*args, cfg=cfg, interpret=True, **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> MoeDispatchConfig:
        """Counting: a sort makes several passes on a GPU, and takes longer on a CPU."""
        return MoeDispatchConfig("count")

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> MoeDispatchConfig:
        """Counting, with the copies by Mosaic where that was measured: half of the time of a gather on an H200."""
        x, experts = _named(inv)
        own = MoeDispatchConfig("mosaic")
        is_guessed = is_measured(inv, experts.shape[1] * x.size) and self.valid_cfg(inv, own) is True
        return own if is_guessed else self.heuristic_cfg(inv)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[MoeDispatchConfig]:
        """Both ways in plain JAX."""
        return [MoeDispatchConfig("count"), MoeDispatchConfig("sort")]

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[MoeDispatchConfig]:
        """The Mosaic kernel, and both ways in plain JAX."""
        return [MoeDispatchConfig("mosaic"), *self.candidate_cfgs(inv)]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: MoeDispatchConfig) -> bool | str:
        """Refuses the Mosaic kernel where it cannot run, with the reason."""
        if cfg.implementation != "mosaic":
            return True
        x, experts = _named(inv)
        refused = spread.tokens_refuse(x.shape[1], x.dtype, experts.shape[1])
        return refused or served.refuses(inv, experts.shape[1] * x.size, hopper=False) or True

    def example_inputs(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """Random experts, where a trace hides the real ones."""
        x, experts = inv.args
        return (x, drawn(rng, experts, 0, inv.kwargs["count"])), dict(inv.kwargs)


def _named(inv: Invocation[Any, Any]) -> tuple[Any, Any]:
    given = dict(zip(("x", "experts"), inv.args, strict=False)) | dict(inv.kwargs)
    return given["x"], given["experts"]


def _copied(x: jax.Array, places: jax.Array) -> jax.Array:
    owner = inverse(places.reshape(-1), places.size) // places.shape[1]
    return jnp.take(x, owner, axis=0, mode="clip")


def _added(rows: jax.Array, places: jax.Array) -> jax.Array:
    return gathered_sum(rows, places).astype(rows.dtype)


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


def __getattr__(name: str) -> Any:
    # The other half was in this file once.
    if name not in ("MoeCombine", "MoeCombineConfig", "moe_combine"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = f"{__package__}.moe_combine"
    warnings.warn(
        f"{__name__}.{name} is {place}.{name} now; the old path goes with the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(importlib.import_module(place), name)
