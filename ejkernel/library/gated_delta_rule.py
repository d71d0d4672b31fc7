"""The gated delta rule and its kin: attention by a state that decays and is corrected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel
from .arguments import ArgumentError, as_array, float_array, same, same_dtype
from .attention_arguments import in_range, lengths_of, scale_of
from .call import plan, planned
from .examples import drawn
from .gated_delta_ways import Result, chunked, linear_chunked, linear_stepwise, stepwise
from .recurrence import masked_to
from .values import were_checked

_TOKENS = ("batch", "length", "heads", "head_dim")
_GATES = ("batch", "length", "heads")


@dataclass(frozen=True)
class GatedDeltaRuleConfig:
    """An implementation, and the tokens of a chunk."""

    implementation: str
    chunk: int | None = None


class _Recurrence(Kernel[GatedDeltaRuleConfig, Result]):
    """Offers of all recurrences: "scan" (by token), "chunked" (a scan over chunks) and "levels" (chunks in pairs)."""

    cfg_type = GatedDeltaRuleConfig
    arrays: tuple[str, ...] = ()

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> GatedDeltaRuleConfig:
        """Chunks of 64 tokens, joined one after the other; a few tokens step by step."""
        length = inv.args[0].shape[1]
        return GatedDeltaRuleConfig("scan") if length < 16 else GatedDeltaRuleConfig("chunked", 64)

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> GatedDeltaRuleConfig:
        """Long chunks, joined one after the other: on an H200 fewer states took less time than larger products did.

        2,048 tokens of 16 heads took 0.93 ms so, 1.35 with chunks of 64, and 1.03 with chunks joined in pairs.
        """
        length = inv.args[0].shape[1]
        if length < 16:
            return GatedDeltaRuleConfig("scan")
        return GatedDeltaRuleConfig("chunked", 128 if length >= 256 else 64)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[GatedDeltaRuleConfig]:
        """Step by step, and chunks of three sizes in both ways."""
        chunks = [GatedDeltaRuleConfig(way, size) for way in ("chunked", "levels") for size in (32, 64, 128)]
        return [GatedDeltaRuleConfig("scan"), *chunks]

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: GatedDeltaRuleConfig) -> bool | str:
        """A chunk is a power of two, and no longer than the next one after the sequence."""
        if cfg.implementation == "scan":
            return True
        length = inv.args[0].shape[1]
        if not cfg.chunk or cfg.chunk & (cfg.chunk - 1):
            return f"chunk={cfg.chunk} must be a power of two"
        return True if cfg.chunk < 2 * length else f"chunks of {cfg.chunk} are longer than the {length} tokens"

    def example_inputs(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """Whole sequences, gates that keep most and keys of length one, as models have them."""
        args = list(inv.args)
        names = self.arrays[: len(args)]
        for at, name in enumerate(names):
            if args[at] is None:
                continue
            shape, dtype = args[at].shape, args[at].dtype
            if name == "lengths":
                args[at] = drawn(rng, args[at], args[0].shape[1], args[0].shape[1] + 1)
            elif name == "g":
                args[at] = jnp.asarray(-rng.uniform(0.0, 0.3, shape), dtype)
            elif name == "beta":
                args[at] = jnp.asarray(rng.uniform(0.1, 1.0, shape), dtype)
            elif name == "k":
                keys = jax.random.normal(jax.random.key(int(rng.integers(1 << 31))), shape)
                args[at] = (keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)).astype(dtype)
        return tuple(args), dict(inv.kwargs)


class GatedDeltaRule(_Recurrence):
    """`S = exp(g) S; S += k (beta (v - S^T k))^T; out = S^T q` for each head, over the tokens."""

    op_id = "library.gated_delta_rule"
    version = "1"
    arrays = ("q", "k", "v", "g", "beta", "initial_state", "lengths")

    def run(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array,
        beta: jax.Array,
        initial_state: jax.Array,
        lengths: jax.Array | None = None,
        *,
        cfg: GatedDeltaRuleConfig,
    ) -> Result:
        """The computation by the cfg's implementation."""
        given: list[Any] = [*masked_to(lengths, q, k, v, g, beta), initial_state]
        if cfg.implementation == "scan":
            return stepwise(*given)
        if cfg.implementation in ("chunked", "levels"):
            return chunked(*given, chunk=cfg.chunk or 64, levels=cfg.implementation == "levels")
        raise ArgumentError(f"{cfg} names no implementation of gated_delta_rule; use scan, chunked or levels")

    def reference(self, *args: Any) -> Result:
        """Computes step by step in float32."""
        return self.run(*args, cfg=GatedDeltaRuleConfig("scan"))

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[GatedDeltaRuleConfig]:
        """The candidates without short chunks, which on an H200 took twice as long as the longest."""
        return [cfg for cfg in self.candidate_cfgs(inv) if cfg.chunk != 32]


class GatedLinearAttention(_Recurrence):
    """`S = exp(g) S + k v^T; out = S^T q` for each head, over the tokens; g for a head or for each row of its state."""

    op_id = "library.gated_linear_attention"
    version = "1"
    arrays = ("q", "k", "v", "g", "initial_state", "lengths")

    def run(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        g: jax.Array,
        initial_state: jax.Array,
        lengths: jax.Array | None = None,
        *,
        cfg: GatedDeltaRuleConfig,
    ) -> Result:
        """The computation by the cfg's implementation."""
        given: list[Any] = [*masked_to(lengths, q, k, v, g), initial_state]
        if cfg.implementation == "scan":
            return linear_stepwise(*given)
        if cfg.implementation in ("chunked", "levels"):
            return linear_chunked(*given, chunk=cfg.chunk or 64, levels=cfg.implementation == "levels")
        raise ArgumentError(f"{cfg} names no implementation of gated_linear_attention; use scan, chunked or levels")

    def reference(self, *args: Any) -> Result:
        """Computes step by step in float32."""
        return self.run(*args, cfg=GatedDeltaRuleConfig("scan"))

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> GatedDeltaRuleConfig:
        """Shorter chunks where each row decays by itself: their factors are as many as pairs of tokens times rows."""
        found = super().heuristic_cfg(inv)
        return GatedDeltaRuleConfig("chunked", 16) if found.chunk and inv.args[3].ndim == 4 else found

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> GatedDeltaRuleConfig:
        """Shorter chunks for rows that decay by themselves, joined in pairs."""
        found = super().heuristic_cfg_gpu(inv)
        return GatedDeltaRuleConfig("levels", 16) if found.chunk and inv.args[3].ndim == 4 else found

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[GatedDeltaRuleConfig]:
        """Step by step, and chunks of three sizes in both ways."""
        sizes = (8, 16, 32) if inv.args[3].ndim == 4 else (32, 64, 128)
        chunks = [GatedDeltaRuleConfig(way, size) for way in ("chunked", "levels") for size in sizes]
        return [GatedDeltaRuleConfig("scan"), *chunks]


def _lengths_are_known(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    lengths = kwargs.get("lengths")
    # Arrays by position, as nearly every call has them: a call of another form is checked in full.
    shape: tuple[int, ...] = args[0].shape if args else ()
    return lengths is None or (len(shape) == 4 and were_checked(lengths, shape[1], in_range))


@planned(known_good=_lengths_are_known)
def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    scale: float = 1.0,
    cfg: GatedDeltaRuleConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> Result:
    """`S = exp(g) S; S += k (beta (v - S^T k))^T; out = scale * S^T q` for each token; returns `out` and the last S.

    `q` and `k` are (batch, length, heads, head_dim), `v` may have another head_dim, `g` (a logarithm, 0 or less) and
    `beta` are (batch, length, heads), the state is (batch, heads, head_dim of k, head_dim of v) in float32. Tokens
    beyond a sequence's length count for nothing: their output is zero, and the state is that of the last real token.
    """
    q, k, v = _heads(q, k, v)
    gates = [_gate(name, value, k, 3) for name, value in (("g", g), ("beta", beta))]
    state, sizes = _start(initial_state, k, v), lengths_of("lengths", lengths, q.shape[0], q.shape[1])
    return _called(GatedDeltaRule(), _scaled(q, scale), k, v, *gates, state, sizes, cfg, executor)


@planned(known_good=_lengths_are_known)
def gated_linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    scale: float = 1.0,
    cfg: GatedDeltaRuleConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> Result:
    """`S = exp(g) S + k v^T; out = scale * S^T q` for each token; returns `out` and the last S.

    Arrays are as those of `gated_delta_rule`; `g` is (batch, length, heads), or (batch, length, heads, head_dim) where
    each row of the state decays by itself.
    """
    q, k, v = _heads(q, k, v)
    array = as_array("g", g)
    gate = _gate("g", array, k, 4 if array.ndim == 4 else 3)
    return _linear(q, k, v, gate, initial_state, lengths, scale, cfg, executor)


@planned(known_good=_lengths_are_known)
def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    decay: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    lengths: jax.Array | None = None,
    scale: float = 1.0,
    cfg: GatedDeltaRuleConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> Result:
    """`gated_linear_attention` with one decay for each head, (heads,), from 0 to 1; without one nothing decays."""
    q, k, v = _heads(q, k, v)
    shape = q.shape[:3]
    if decay is None:
        g = jnp.zeros(shape, jnp.float32)
    else:
        factor = float_array("decay", decay, ("heads",))
        same("heads", "q", q, q.shape[2], "decay", factor, factor.shape[0])
        if not isinstance(factor, jax.core.Tracer) and not were_checked(factor, None, _are_shares, jnp.floating):
            raise ArgumentError(f"decay must be from 0 to 1, got {np.asarray(factor).tolist()}")
        g = jnp.broadcast_to(jnp.log(factor.astype(jnp.float32)), shape)
    return _linear(q, k, v, g, initial_state, lengths, scale, cfg, executor)


def _are_shares(decay: Any, wanted: None) -> bool:
    return not np.any((decay < 0) | (decay > 1))


def _linear(q: Any, k: Any, v: Any, g: Any, initial: Any, lengths: Any, scale: Any, cfg: Any, executor: Any) -> Result:
    state, sizes = _start(initial, k, v), lengths_of("lengths", lengths, q.shape[0], q.shape[1])
    return _called(GatedLinearAttention(), _scaled(q, scale), k, v, g, state, sizes, cfg, executor)


def _heads(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = (float_array(name, value, _TOKENS) for name, value in (("q", q), ("k", k), ("v", v)))
    same_dtype("q", q, "k", k)
    same_dtype("k", k, "v", v)
    if q.shape != k.shape:
        raise ArgumentError(f"q and k must have the same shape, got {q.shape} and {k.shape}")
    if k.shape[:3] != v.shape[:3]:
        raise ArgumentError(f"k and v differ in batch, length or heads: {k.shape} and {v.shape}")
    return q, k, v


def _gate(name: str, value: Any, k: jax.Array, rank: int) -> jax.Array:
    array = float_array(name, value, _TOKENS[:rank])
    if array.shape != k.shape[:rank]:
        raise ArgumentError(f"{name} has the shape {array.shape} and k {k.shape}; {name} needs {k.shape[:rank]}")
    return array


def _start(state: Any, k: jax.Array, v: jax.Array) -> jax.Array:
    shape = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
    if state is None:
        return jnp.zeros(shape, jnp.float32)
    array = float_array("initial_state", state, ("batch", "heads", "key_dim", "value_dim"))
    if array.shape != shape:
        raise ArgumentError(f"initial_state has the shape {array.shape}; k {k.shape} and v {v.shape} need {shape}")
    return array.astype(jnp.float32)


def _scaled(q: jax.Array, scale: Any) -> jax.Array:
    # Numbers of numpy would make narrow queries wide.
    factor = scale_of(scale, 1)
    return q if factor == 1.0 else q * factor


def _called(kernel: _Recurrence, q: Any, *rest: Any) -> Result:
    *arrays, state, sizes, cfg, executor = rest
    if not arrays[1].size or not q.size:
        return jnp.zeros_like(arrays[1]), state
    given = [q, *arrays, state, *([] if sizes is None else [sizes])]
    return plan(kernel, *given, cfg=cfg, executor=executor, then=tuple)  # type: ignore[no-any-return]
