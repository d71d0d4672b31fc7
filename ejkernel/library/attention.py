"""Attention: every query's weighted mean of the values of the keys that it sees."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Executor, Invocation, Kernel, _jax
from ..ops.core.device import device_of, get_device_platform
from .arguments import ArgumentError, float_array
from .attention_arguments import (
    ARRAYS,
    check_heads,
    floats_of,
    in_range,
    is_float,
    lengths_of,
    named,
    named_args,
    refilled,
    scale_of,
    sight_of,
    sinks_of,
    soft_cap_of,
    spread,
    window_of,
)
from .attention_blocks import chunked
from .attention_jax import (
    by_cudnn,
    by_pallas,
    capability_of,
    cudnn_refuses,
    jax_refuses_cudnn,
    pallas_refuses,
    ready_made_refuses,
)
from .attention_plain import PLAIN, by_plain, hides
from .attention_sight import Sight
from .call import plan, planned
from .examples import drawn
from .guessed_products import tile_of_attention
from .mosaic import attention_tiles, served
from .reverse import recomputed
from .values import were_checked

_FORM = ("batch", "length", "heads", "head_dim")
# JAX's own, and what it does not take is refused.
_READY = ("xla", "cudnn", "pallas")
# More unrolled blocks than this cost more to compile than they save.
_MOST_BLOCKS = 16
# Scores of more than this, in float32, are better not held at once: at this size they are most of the traffic.
_MANY_SCORES = 1 << 28


@dataclass(frozen=True)
class AttentionConfig:
    """An implementation of attention, and its blocks where it has any."""

    implementation: str
    block_q: int | None = None
    block_k: int | None = None
    # The Pallas kernel's: all blocks of its gradient, and launch parameters.
    block_back: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    # On a GPU, the implementation that computes the gradient from the arguments; None: the forward one's own.
    backward: str | None = None
    # Mosaic's: a block of threads stays for several blocks of queries.
    persistent: bool = False


# Its gradient serves where cuDNN has none.
_CHUNKED = AttentionConfig("chunked", block_q=512, block_k=1024)


class Attention(Kernel[AttentionConfig, jax.Array]):
    """Attention in the layout (batch, length, heads, head_dim); arguments as `attention` makes them.

    Implementations: "xla" and "cudnn" of `jax.nn.dot_product_attention`, "pallas" (JAX's kernel for GPUs), "sliced"
    (blocks of queries, each against the keys it can see), "chunked" (a running softmax over blocks of keys) and
    "mosaic" (the same as a kernel for Hopper GPUs).
    """

    op_id = "library.attention"
    version = "4"  # `persistent` is new, and Mosaic's kernel is another
    cfg_type = AttentionConfig

    def run(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        query_lengths: jax.Array | None = None,
        key_value_lengths: jax.Array | None = None,
        sinks: jax.Array | None = None,
        *,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        scale: float,
        logits_soft_cap: float | None = None,
        cfg: AttentionConfig,
        interpret: bool = False,
    ) -> jax.Array:
        """The computation by the cfg's implementation."""
        if any(block is not None and block < 1 for block in (cfg.block_q, cfg.block_k)):
            raise ArgumentError(f"{cfg} has a block of no rows; give a size from 1 on, or None")
        sight = Sight(causal, window, query_lengths, key_value_lengths)
        refused = ready_made_refuses(q, v, sinks, logits_soft_cap) if cfg.implementation in _READY else ""
        if refused:
            raise ArgumentError(f"{cfg} cannot compute this call: {refused}")
        if cfg.implementation == "cudnn":
            capability = capability_of(device_of(Invocation(self.op_id, (q, k, v), {})))
            return by_cudnn(q, k, v, mask, bias, sight=sight, scale=scale, capability=capability)
        if cfg.implementation in PLAIN:
            blocks = {"block_q": cfg.block_q, "block_k": cfg.block_k}
            how: dict[str, Any] = {"sight": sight, "scale": scale, "cap": logits_soft_cap, **blocks}
            return by_plain(q, k, v, mask, bias, sinks, implementation=cfg.implementation, **how)
        if cfg.implementation == "pallas":
            refused = pallas_refuses(q, k, mask, bias, sight=sight, blocks=_pallas_blocks(cfg))
            if refused:
                raise ArgumentError(f"{cfg} cannot compute this call: {refused}")
            return by_pallas(
                q,
                k,
                v,
                sight=sight,
                scale=scale,
                blocks=_pallas_blocks(cfg),
                warps=cfg.num_warps or 4,
                stages=cfg.num_stages or 2,
                interpret=interpret,
            )
        if cfg.implementation == "mosaic":
            others = (mask, bias, window, query_lengths, key_value_lengths, sinks, logits_soft_cap)
            refused = attention_tiles.refuses(q, k, v, others, causal=causal, **_mosaic_tile(cfg))
            if refused:
                raise ArgumentError(f"{cfg} cannot compute this call: {refused}")

            def by_mosaic(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                return _with_logs(q, k, v, scale=scale, causal=causal, cfg=cfg, interpret=interpret)[0]

            def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                return chunked(q, k, v, None, None, sight=sight, scale=scale, block_q=512, block_k=1024)

            return recomputed(by_mosaic, plain)(q, k, v)  # type: ignore[no-any-return]
        names = "xla, cudnn, pallas, sliced, chunked or mosaic"
        raise ArgumentError(f"{cfg} names no implementation of attention; use {names}")

    def run_cpu(self, *args: Any, cfg: AttentionConfig, **kwargs: Any) -> jax.Array:
        """Attention on a CPU, where a Pallas kernel is interpreted, for tests alone."""
        if cfg.implementation == "cudnn":
            raise ArgumentError(f"{cfg} cannot compute this call: cudnn runs on GPUs alone")
        if cfg.implementation == "xla" and named_args(args, kwargs)["q"].dtype == jnp.float16:
            # JAX's own asks for a product of float16 that no CPU's compiler has; its fallback is for eager calls alone.
            args, kwargs = jax.tree.map(lambda x: x.astype(jnp.float32) if _is_half(x) else x, (args, kwargs))
            return self.run(*args, cfg=cfg, **kwargs).astype(jnp.float16)
        return self.run(*args, cfg=cfg, interpret=True, **kwargs)

    # On a GPU some implementations have a gradient of their own, which is reverse mode alone. So all are, there:
    # what a call can do must not depend on what was tuned.
    def fwd_with_residuals_gpu(self, *args: Any, cfg: AttentionConfig, **kwargs: Any) -> tuple[jax.Array, Any]:
        """The output and how to pull its gradient back, by the implementation's own rules."""
        floats, others = floats_of(args)

        def of_floats(*values: Any, way: AttentionConfig = cfg) -> jax.Array:
            return self.run(*refilled(others, values), cfg=way, **kwargs)

        if cfg.backward == "cudnn":
            if cfg.implementation == "mosaic" and not self._is_forward_alone(args, kwargs):
                # cuDNN's gradient takes the logarithms of the sums from either forward pass.
                given = named_args(args, kwargs)
                q, k, v = (given[name] for name in ARRAYS[:3])
                return _with_logs(q, k, v, scale=given["scale"], causal=bool(given.get("causal")), cfg=cfg)
            # It needs what no other forward pass keeps: another's would come on top.
            way = replace(cfg, implementation="cudnn", backward=None)
            return self.fwd_with_residuals_gpu(*args, cfg=way, **kwargs)
        if cfg.backward is not None:
            # Computed in the backward pass, from the arguments: nothing is kept for it.
            return of_floats(*floats), None
        if cfg.implementation == "cudnn" and self._is_forward_alone(args, kwargs):
            # cuDNN computes some calls, such as those of odd lengths, without their gradient: that is then another's.
            _, pull = jax.vjp(functools.partial(of_floats, way=_CHUNKED), *floats)
            return of_floats(*floats), pull
        return jax.vjp(of_floats, *floats)

    def _is_forward_alone(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        given = named_args(args, kwargs)
        arrays = [given.get(name) for name in ARRAYS[:5]]
        return bool(jax_refuses_cudnn(*arrays, sight=sight_of(given), scale=given["scale"], gradient=True))

    def vjp_gpu(
        self, residuals: Any, y: jax.Array, dy: jax.Array, *args: Any, cfg: AttentionConfig, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Gradients of queries, keys, values and bias."""
        if isinstance(residuals, jax.Array):
            from .attention_cudnn_gradient import gradients

            given = named_args(args, kwargs)
            q, k, v = (given[name] for name in ARRAYS[:3])
            how = {"scale": given["scale"], "causal": bool(given.get("causal"))}
            return *gradients(q, k, v, y, residuals, dy, **how), *(None for _ in args[3:])
        if residuals is None:
            floats, others = floats_of(args)
            way = replace(cfg, implementation=cfg.backward or cfg.implementation, backward=None)
            if (cfg.implementation, cfg.backward) == ("mosaic", "chunked"):
                # Blocks of a multiprocessor are too small for a loop of XLA's.
                way = _CHUNKED
            _, residuals = jax.vjp(lambda *values: self.run(*refilled(others, values), cfg=way, **kwargs), *floats)
        grads = iter(residuals(dy))
        return tuple(next(grads) if is_float(arg) else None for arg in args)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> AttentionConfig:
        """XLA's own for small calls; blocks where holding all scores would be most of the traffic."""
        given = named(inv)
        queries, keys = given["q"].shape[1], given["k"].shape[1]
        rows = given["q"].shape[0] * given["q"].shape[2]
        if rows * queries * keys * 4 <= _MANY_SCORES:
            return AttentionConfig("sliced" if _ready_refuses(given) else "xla")
        block = max(128, math.ceil(queries / _MOST_BLOCKS))
        if rows * block * keys * 4 <= _MANY_SCORES:
            return AttentionConfig("sliced", block_q=block)
        return AttentionConfig("chunked", block_q=256, block_k=512)

    def heuristic_cfg_gpu(self, inv: Invocation[Any, Any]) -> AttentionConfig:
        """cuDNN wherever it takes the call: on an H200 it is 3 to 12 times as fast as XLA's; else JAX's Pallas kernel.

        That is 1.6 times as fast as XLA's in float32, with the blocks that it brings. On Hopper GPUs the forward pass
        is Mosaic's where it serves, 0.77 to 0.96 of cuDNN's time in five calls, and the gradient cuDNN's.
        """
        given = named(inv)
        warps = 4 if given["q"].shape[-1] <= 64 else 8
        ready = [AttentionConfig("cudnn"), AttentionConfig("pallas", 128, 128, 32, warps, 2)]
        arrays = [given[name] for name in ARRAYS[:3]]
        tile = tile_of_attention(inv, *arrays, causal=bool(given.get("causal")))
        if tile:
            ready.insert(0, AttentionConfig("mosaic", **tile, backward=self._backward_of_mosaic(inv)))
        return next((cfg for cfg in ready if self.valid_cfg(inv, cfg) is True), self.heuristic_cfg(inv))

    def heuristic_cfg_cpu(self, inv: Invocation[Any, Any]) -> AttentionConfig:
        """Blocks of queries: their scores stay in the processor's cache, and keys out of sight cost nothing."""
        given = named(inv)
        queries = given["q"].shape[1]
        # Below this a block is the whole call. Where keys may be hidden, `sliced` took 0.3 to 1.0 of the time of `xla`:
        # its zeros for them are part of a copy that its product makes anyway.
        if queries <= 64:
            hidden = hides(given.get("mask"), sight_of(given))
            return AttentionConfig("sliced" if hidden or _ready_refuses(given) else "xla")
        return AttentionConfig("sliced", block_q=max(32, math.ceil(queries / 8)))

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[AttentionConfig]:
        """XLA's, blocks of queries of several sizes, and a running softmax."""
        queries = named(inv)["q"].shape[1]
        sizes = dict.fromkeys(max(16, math.ceil(queries / parts)) for parts in (1, 2, 4, 8, _MOST_BLOCKS))
        found = [AttentionConfig("xla"), *(AttentionConfig("sliced", block_q=size) for size in sizes)]
        if queries >= 256:
            found += [AttentionConfig("chunked", block_q=q, block_k=k) for q, k in ((128, 256), (256, 512))]
        return found

    def candidate_cfgs_gpu(self, inv: Invocation[Any, Any]) -> Iterable[AttentionConfig]:
        """cuDNN's and JAX's Pallas kernel as well, the latter over its blocks and launch parameters."""
        # Few: where cuDNN runs, it wins, and each of these takes seconds to compile.
        blocks = [(128, 128, 32), (128, 64, 32), (64, 64, 32), (128, 128, 64)]
        found = [AttentionConfig("cudnn")]
        back = self._backward_of_mosaic(inv)
        tiles = [(128, 128, 2), (192, 128, 2), (192, 64, 3), (128, 64, 2)]
        found += [AttentionConfig("mosaic", q, k, num_stages=s, backward=back) for q, k, s in tiles]
        found += [AttentionConfig("mosaic", 128, 128, num_stages=2, backward=back, persistent=True)]
        found += [AttentionConfig("pallas", q, k, back, warps, 2) for q, k, back in blocks for warps in (4, 8)]
        queries = named(inv)["q"].shape[1]
        found += [AttentionConfig("xla"), AttentionConfig("sliced", block_q=max(128, math.ceil(queries / 8)))]
        return [*found, _CHUNKED]

    def _backward_of_mosaic(self, inv: Invocation[Any, Any]) -> str:
        """cuDNN's gradient, from the logarithms that Mosaic's forward pass keeps; where it has none, that of blocks."""
        return "cudnn" if self.valid_cfg(inv, AttentionConfig("cudnn")) is True else "chunked"

    def valid_cfg(self, inv: Invocation[Any, Any], cfg: AttentionConfig) -> bool | str:
        """Refuses what an implementation does not take, with the reason."""
        refused = _ready_refuses(named(inv)) if {cfg.implementation, cfg.backward} & {*_READY} else ""
        if refused:
            return refused
        if (
            cfg.backward is not None
            and self.valid_cfg(inv, replace(cfg, implementation=cfg.backward, backward=None)) is not True
        ):
            return f"{cfg.backward} cannot compute the gradient of this call"
        if cfg.implementation == "mosaic":
            given = named(inv)
            names = (*ARRAYS[3:], "window", "logits_soft_cap")
            q, k, v = (given[name] for name in ARRAYS[:3])
            how = {"causal": bool(given.get("causal")), **_mosaic_tile(cfg)}
            refused = attention_tiles.refuses(q, k, v, map(given.get, names), **how)
            return refused or served.refuses(inv, q.size, k.size, v.size, hopper=True) or True
        if cfg.implementation not in ("cudnn", "pallas"):
            return True
        device = device_of(inv)
        if get_device_platform(device) != "gpu":
            return f"{cfg.implementation} runs on GPUs alone"
        given = named(inv)
        sight = sight_of(given)
        arrays = [given.get(name) for name in ARRAYS[:5]]
        if cfg.implementation == "pallas":
            if any(_jax.varying_axes(x) for x in arrays if x is not None):
                return "JAX's Pallas kernel does not say over which mesh axes it varies; use check_vma=False"
            blocks = _pallas_blocks(cfg)
            return pallas_refuses(arrays[0], arrays[1], *arrays[3:], sight=sight, blocks=blocks) or True
        scale = given["scale"]
        refused = cudnn_refuses(*arrays, sight=sight, scale=scale, capability=capability_of(device))
        return refused or jax_refuses_cudnn(*arrays, sight=sight, scale=scale, gradient=False) or True

    def example_inputs(self, inv: Invocation[Any, Any], rng: np.random.Generator) -> tuple[tuple[Any, ...], Any]:
        """Lengths between half and all of the places, where a trace hides the real ones."""
        given = named(inv)
        sizes = {"query_lengths": given["q"].shape[1], "key_value_lengths": given["k"].shape[1]}

        def real(name: str, value: Any) -> Any:
            if name not in sizes or value is None:
                return value
            return drawn(rng, value, sizes[name] // 2, sizes[name] + 1)

        kwargs = {name: real(name, value) for name, value in inv.kwargs.items()}
        return tuple(real(*pair) for pair in zip(ARRAYS, inv.args, strict=False)), kwargs

    def reference(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> jax.Array:
        """Computes attention in float32, in chunks, so that large calls need little memory."""
        cfg = AttentionConfig("chunked", block_q=256, block_k=512)
        with jax.default_matmul_precision("highest"):
            wide = self.run(*(x.astype(jnp.float32) for x in (q, k, v)), *args, cfg=cfg, **kwargs)
        return wide.astype(q.dtype)


def _lengths_are_known(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    for name, place in (("query_lengths", 0), ("key_value_lengths", 1)):
        lengths = kwargs.get(name)
        if lengths is not None:
            # All three arrays by position, as nearly every call has them: a call of another form is checked in full.
            shape: tuple[int, ...] = args[place].shape if len(args) == 3 else ()
            if len(shape) != 4 or not were_checked(lengths, shape[1], in_range):
                return False
    return True


@planned(known_good=_lengths_are_known)
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    window: int | tuple[int, int] | None = None,
    query_lengths: jax.Array | None = None,
    key_value_lengths: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    cfg: AttentionConfig | None = None,
    executor: Executor[Any, Any] | None = None,
) -> jax.Array:
    """Attention of queries (batch, length, heads, head_dim) to keys and values, by the best way for the call.

    There may be fewer key heads than query heads: each then serves several. `mask` (True: seen) and `bias` (added to
    scores, finite) broadcast to (batch, heads, queries, keys); `window` is so many keys to both sides, or (left,
    right); lengths hide what is beyond them. Keys that are hidden from all queries need not be numbers. A query that
    sees no key gives zeros and has no gradient. Values may be of another width than keys. `logits_soft_cap`: scores,
    with their bias, become `cap * tanh(scores / cap)`. `sinks` (heads,) are logits that take part in a head's softmax
    and add nothing to its result.
    """
    q, k, v = (float_array(name, x, _FORM) for name, x in (("q", q), ("k", k), ("v", v)))
    check_heads(q, k, v)
    places = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    mask, bias = spread("mask", mask, places), spread("bias", bias, places)
    window = window_of(window, causal, q.shape[1])
    # As plain as the window: a truth of numpy is an array to a kernel.
    causal = bool(causal) or (window is not None and window[1] == 0)
    lengths = [
        lengths_of("query_lengths", query_lengths, q.shape[0], q.shape[1]),
        lengths_of("key_value_lengths", key_value_lengths, q.shape[0], k.shape[1]),
    ]
    factor = scale_of(scale, q.shape[-1])
    cap, logits = soft_cap_of(logits_soft_cap), sinks_of(sinks, q)
    if not q.shape[-1]:
        # All scores are zero, which a width of one with zeros says as well.
        q, k = (jnp.zeros((*x.shape[:3], 1), x.dtype) for x in (q, k))
    if not q.size or not k.size or not v.size:
        return jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
    arrays = [q, k, v, mask, bias, *lengths, logits]
    # A call of arrays alone takes the executor's short way.
    while arrays[-1] is None:
        arrays.pop()
    static: dict[str, Any] = {"causal": causal, "window": window, "scale": factor}
    if cap is not None:
        static["logits_soft_cap"] = cap
    return plan(Attention(), *arrays, cfg=cfg, executor=executor, **static)  # type: ignore[no-any-return]


def _with_logs(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    causal: bool,
    cfg: AttentionConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Mosaic's result, and the logarithm of each query's sum of exponentials."""
    from .mosaic.attention import forward

    return forward(q, k, v, scale=scale, causal=causal, interpret=interpret, **_mosaic_tile(cfg))


def _mosaic_tile(cfg: AttentionConfig) -> dict[str, Any]:
    blocks = {"block_q": cfg.block_q or 128, "block_k": cfg.block_k or 128}
    return {**blocks, "stages": cfg.num_stages or 2, "persistent": cfg.persistent}


def _ready_refuses(given: dict[str, Any]) -> str:
    return ready_made_refuses(given["q"], given["v"], given.get("sinks"), given.get("logits_soft_cap"))


def _pallas_blocks(cfg: AttentionConfig) -> tuple[int, int, int]:
    return cfg.block_q or 128, cfg.block_k or 128, cfg.block_back or 32


def _is_half(arg: Any) -> bool:
    return hasattr(arg, "dtype") and arg.dtype == jnp.float16
