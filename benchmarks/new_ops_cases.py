"""Calls of operations that JAX has no fast way for: plain JAX, every way of ours, and the floor."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import cases.decode_attention
import cases.gated_delta_rule
import cases.moe
import cases.moe_dispatch
import cases.quantized_matmul
import cases.residual_norm
import cases.sample
import cases.scaled_matmul
import cases.top_k

from ejkernel import library
from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Invocation
from ejkernel.ops.core.kernel import variant

# Rates measured on an H200.
FLOPS, FLOPS8, TRAFFIC = 790e12, 1580e12, 4.3e12
UNTUNED: Executor[Any, Any] = Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False)))


@dataclass(frozen=True)
class Case:
    """`ways` are functions of the arrays; the first is plain JAX. `exact` gives what is right, in float32."""

    name: str
    floor: float
    arrays: tuple[Any, ...]
    ways: dict[str, Callable[..., Any]]
    exact: Callable[..., Any]


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    """Random values, made on the device."""
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


def spelled(cfg: Any) -> str:
    """A cfg in a few letters."""
    values = [value for value in vars(cfg).values() if value is not None]
    return "/".join(map(str, values))


def of_kernel(kernel: Any, arrays: tuple[Any, ...], most: int = 24, **static: Any) -> dict[str, Callable[..., Any]]:
    """Every way that may run here, the heuristic one first and with a star."""
    inv = Invocation(kernel.op_id, arrays, static)
    platform = jax.default_backend()
    guess = variant(kernel, "heuristic_cfg", platform=platform)(inv)
    offered = variant(kernel, "candidate_cfgs", platform=platform)(inv)
    valid = [cfg for cfg in dict.fromkeys([guess, *offered]) if kernel.valid_cfg(inv, cfg) is True]
    return {
        spelled(cfg) + ("*" if cfg == guess else ""): functools.partial(
            lambda *given, cfg: UNTUNED(kernel, *given, cfg=cfg, **static), cfg=cfg
        )
        for cfg in valid[:most]
    }


def with_gradient(ways: dict[str, Any], arrays: tuple[Any, ...], floats: int) -> dict[str, Any]:
    """Forward and backward of the first arrays; cotangents follow the arrays."""

    def both(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            arguments, pulled = given[: len(arrays)], given[len(arrays) :]
            out, pull = jax.vjp(lambda *a: fn(*a, *arguments[floats:]), *arguments[:floats])
            leaves, tree = jax.tree.flatten(out)
            left = iter(pulled)
            zeros = [np.zeros(x.shape, jax.dtypes.float0) if x.dtype.kind == "i" else next(left) for x in leaves]
            zeros = [z.astype(x.dtype) if hasattr(z, "aval") else z for z, x in zip(zeros, leaves, strict=True)]
            return out, pull(jax.tree.unflatten(tree, zeros))

        return run

    return {name: both(fn) for name, fn in ways.items()}


def cotangents(fn: Callable[..., Any], arrays: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """Random ones, for each floating-point result."""
    leaves = jax.tree.leaves(jax.eval_shape(fn, *arrays))
    return tuple(normal(90 + at, x.shape, x.dtype) for at, x in enumerate(leaves) if x.dtype.kind != "i")


def pair(name: str, floors: tuple[float, float], arrays: Any, ways: Any, exact: Any, floats: int) -> Iterator[Case]:
    """A case forward, and one with its gradient; what is right is computed in float32, whatever the arrays are."""
    yield Case(name, floors[0], arrays, ways, in_float32(exact))
    pulled = cotangents(next(iter(ways.values())), arrays)
    # Wide before the gradient is taken: else gradients are added up and rounded as plain JAX does.
    wide = in_float32(with_gradient({"exact": exact}, arrays, floats)["exact"])
    yield Case(f"{name}, gradient", floors[1], (*arrays, *pulled), with_gradient(ways, arrays, floats), wide)


def in_float32(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that are made wide before, with exact products."""

    def run(*given: Any) -> Any:
        wide = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in given]
        with jax.default_matmul_precision("highest"):
            return fn(*wide)

    return run


def top_k(small: bool) -> Iterator[Case]:
    """A vocabulary and a router."""
    for rows, width, k in ((8, 32768, 50), (1024, 256, 8)) if small else ((32, 131072, 50), (8192, 256, 8)):
        arrays = (normal(0, (rows, width), jnp.float32),)
        plain = functools.partial(cases.top_k.plain, k=k)
        ways = {"plain": plain, **of_kernel(library.TopK(), arrays, k=k)}
        yield Case(f"top_k {k} of {rows}x{width}", 4 * rows * width / TRAFFIC, arrays, ways, plain)


def sample(small: bool) -> Iterator[Case]:
    """Serving: top-p of a vocabulary, and with top-k."""
    rows, words = (8, 16384) if small else (64, 128256)
    for k, dtype in ((None, jnp.float32), (None, jnp.bfloat16), (50, jnp.float32)):
        logits = normal(1, (rows, words), dtype, 3.0)
        arrays = (jax.random.key(0), logits, jnp.ones(rows), jnp.full(rows, 0.9))
        plain = functools.partial(cases.sample.plain, top_k=k)
        ways = {"plain": plain, **of_kernel(library.Sample(), arrays, top_k=k)}
        kind = "" if k is None else f"top-k {k}, "
        title = f"sample {rows}x{words} {kind}top-p {jnp.dtype(dtype).name}"
        yield Case(title, logits.nbytes / TRAFFIC, arrays, ways, functools.partial(plain))


def residual_norm(small: bool) -> Iterator[Case]:
    """A model of 4096."""
    rows, width = (512, 1024) if small else (8192, 4096)
    x, residual, weight = *(normal(seed, (rows, width)) for seed in (0, 1)), normal(2, (width,))

    def turned(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, weight, residual: fn(x, residual, weight)

    # Gradients of x and weight are asked for: that of residual is the array that x gets, and to return it once more is
    # a copy, which no model makes.
    ours = of_kernel(library.ResidualNorm(), (x, residual, weight), most=16, kind="rms")
    ways = {"plain": cases.residual_norm.plain, **ours}
    ways = {name: turned(fn) for name, fn in ways.items()}
    size = 2 * rows * width / TRAFFIC
    # Forward 2 in and 2 out; backward 3 in and 1 out.
    title, arrays = f"residual_norm {rows}x{width}", (x, weight, residual)
    yield from pair(title, (4 * size, 8 * size), arrays, ways, turned(cases.residual_norm.plain), 2)


def moe(small: bool) -> Iterator[Case]:
    """32 experts, 4 a token: rows there and back alone, and the layer."""
    tokens, width, inner = (256, 64, 64) if small else (8192, 2048, 768)
    count, k = 32, 4
    x, logits = normal(0, (tokens, width)), normal(1, (tokens, count), jnp.float32)
    experts = [normal(2 + i, (count, width, inner), scale=width**-0.5) for i in (0, 1)]
    experts.append(normal(4, (count, inner, width), scale=inner**-0.5))

    # The experts' results are an argument: from the rows themselves, with weights that add up to one, the result would
    # be x, and the gradient of logits nothing but rounding.
    made = normal(5, (tokens * k, width))

    plain = functools.partial(cases.moe_dispatch.plain, k=k)

    def there_and_back(order: str, sums: str) -> Callable[..., Any]:
        cfgs = {"dispatch": library.MoeDispatchConfig(order), "combine": library.MoeCombineConfig(sums)}
        return functools.partial(cases.moe_dispatch.there_and_back, k=k, executor=UNTUNED, **cfgs)

    pairs = [("count", "unrolled"), ("sort", "unrolled"), ("count", "reduce"), ("count", "scatter")]
    ways = {"plain": plain, **{"/".join(p): there_and_back(*p) for p in pairs}}
    row = 2 * tokens * width / TRAFFIC
    # Forward 1 and k in, k and 1 out; backward k and 1 and once more k in, 1 and k out.
    floors = (row * (2 * k + 2), row * (5 * k + 4))
    yield from pair(f"dispatch and combine {tokens}x{width}", floors, (x, logits, made), ways, plain, 3)

    def layer(*arrays: Any) -> Any:
        return library.moe(*arrays, k=k, executor=UNTUNED)

    plain_layer = functools.partial(cases.moe.plain, k=k)
    with_ours = functools.partial(plain_layer, product=functools.partial(library.ragged_dot, executor=UNTUNED))
    tiled = functools.partial(library.ragged_dot, cfg=library.RaggedDotConfig("tiled", block_m=256), executor=UNTUNED)
    exact = functools.partial(plain_layer, product=tiled)

    flops = 3 * 2 * tokens * k * width * inner / FLOPS
    layers = {"plain": plain_layer, "plain, our ragged_dot": with_ours, "moe": layer}
    arrays = (x, logits, *experts)
    yield from pair(f"moe {tokens}x{width} by {count} of {inner}", (flops, 3 * flops), arrays, layers, exact, 5)


def gated_delta_rule(small: bool) -> Iterator[Case]:
    """A layer of 16 heads of 128."""
    batch, length, heads, size = (1, 256, 2, 32) if small else (2, 2048, 16, 128)
    q, k, v = (normal(seed, (batch, length, heads, size)) for seed in range(3))
    k = (k / jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True)).astype(k.dtype)
    g = -jax.random.uniform(jax.random.key(3), (batch, length, heads)) / 4
    beta = jax.random.uniform(jax.random.key(4), (batch, length, heads))
    arrays = (q, k, v, g, beta, jnp.zeros((batch, heads, size, size)))
    kernel = library.GatedDeltaRule()
    # A scan is what plain JAX does, too.
    ours = {name: way for name, way in of_kernel(kernel, arrays).items() if name.rstrip("*") != "scan"}
    # q, k and v are read and out is written.
    floor = 4 * q.nbytes / TRAFFIC
    title = f"gated_delta_rule {batch}x{length}, {heads} heads of {size}"
    ways = {"plain": cases.gated_delta_rule.plain, **ours}
    yield from pair(title, (floor, 3 * floor), arrays, ways, kernel.reference, 6)


def decode_attention(small: bool) -> Iterator[Case]:
    """Many sequences, one long one, and sequences of several lengths with NaN beyond them in a larger pool."""
    sizes = ((4, 512, 8, 2, 32, 16),) if small else ((64, 4096, 32, 8, 128, 64), (1, 65536, 32, 8, 128, 64))
    for at, (batch, length, heads, shared, size, page) in enumerate((*sizes, sizes[0])):
        ragged = at == len(sizes)
        each = length // page
        rng = np.random.default_rng(0)
        count = batch * each + (7 if ragged else 0)
        table = jnp.asarray(rng.permutation(count)[: batch * each].reshape(batch, each), jnp.int32)
        pages = [normal(seed, (count, page, shared, size)) for seed in (1, 2)]
        lengths = jnp.full(batch, length, jnp.int32)
        if ragged:
            lengths = jnp.asarray(rng.integers(1, length + 1, batch), jnp.int32)
            pages = [_nothing_beyond(x, table, lengths) for x in pages]
        arrays = (normal(0, (batch, 1, heads, size)), *pages, lengths, table)

        static: dict[str, Any] = {"scale": size**-0.5}
        kernel = library.DecodeAttention()
        how = "cudnn" if jax.default_backend() == "gpu" else "xla"
        plain = functools.partial(cases.decode_attention.plain, implementation=how, **static)
        ways = {"plain": plain, **of_kernel(kernel, arrays, **static)}
        exact = in_float32(functools.partial(kernel.reference, **static))
        floor = 2 * pages[0].nbytes * float(jnp.sum(lengths)) / (count * page) / TRAFFIC
        title = f"decode {batch}x{length}, {heads} heads on {shared} of {size}"
        yield Case(title + (", ragged, NaN beyond" if ragged else ""), floor, arrays, ways, exact)


def _nothing_beyond(pages: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
    """Pages with NaN at every place that is no token of a sequence."""
    page = pages.shape[1]
    place = jnp.arange(table.shape[1] * page).reshape(1, -1, page)
    used = jnp.zeros(pages.shape[:2], bool).at[table].set(place < lengths[:, None, None])
    return jnp.where(used[..., None, None], pages, jnp.nan)


def quantized_matmul(small: bool) -> Iterator[Case]:
    """Serving with a batch of 64, one token, and a batch of 256."""
    depth, width = (512, 512) if small else (8192, 8192)
    weight = normal(1, (depth, width), jnp.float32, depth**-0.5)
    calls = [(rows, kind, None) for rows in (64, 1, 256) for kind in ("int8", "int4")]
    for rows, kind, group in (*calls[:2], (64, "int4", 128), (64, "int8", 128), *calls[2:]):
        q, scales = library.quantize(weight, kind, group=group)
        arrays = (normal(0, (rows, depth)), q, scales)

        kernel = library.QuantizedMatmul()
        ways = {"plain": cases.quantized_matmul.plain, **of_kernel(kernel, arrays, most=40)}
        held = depth * width * (1 if kind == "int8" else 0.5)
        name = f"quantized {kind}{'' if group is None else f' by {group}'} {rows}x{depth} by {width}"
        yield Case(name, held / TRAFFIC, arrays, ways, in_float32(kernel.reference))


def scaled_matmul(small: bool) -> Iterator[Case]:
    """float8 with one scale, with one a row and column, and with blocks."""
    m, k, n = (128, 256, 128) if small else (4096, 7168, 4096)
    a, b = normal(0, (m, k), jnp.float32), normal(1, (k, n), jnp.float32, k**-0.5)
    for name, blocks in (("tensor", (None, None)), ("row", ((1, k), (k, 1))), ("block", ((1, 128), (128, 128)))):
        arrays = cases.scaled_matmul.scaled(a, b, blocks)
        kernel = library.ScaledMatmul()
        ways = {"plain": cases.scaled_matmul.plain, **of_kernel(kernel, arrays)}
        yield Case(f"float8 {m}x{k}x{n} scales by {name}", 2 * m * k * n / FLOPS8, arrays, ways, kernel.reference)


OPERATIONS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "top_k": top_k,
    "residual_norm": residual_norm,
    "decode_attention": decode_attention,
    "quantized_matmul": quantized_matmul,
    "scaled_matmul": scaled_matmul,
    "gated_delta_rule": gated_delta_rule,
    "moe": moe,
    "sample": sample,
}
