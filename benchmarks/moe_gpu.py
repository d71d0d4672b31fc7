"""Experts on a Hopper GPU: rows there and back, the layer and its products by each way, with and without gradients.

A process a case: all compile at once, and take turns on the device. A line a way: device time over interleaved rounds,
its ratio to the floor, how far it is off float32, and with `--kernels` where its time goes. Exit code 1 where a way
fails or is wrong. The case `gathered` runs only where it is asked for: its kernel has not run on a GPU. As every other
one it is stopped after `--seconds`.

    python benchmarks/moe_gpu.py --only rows layer --kernels 8
    python benchmarks/moe_gpu.py --only gathered --kernels 8
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent))
import cases.moe
import cases.moe_dispatch
import in_turns
from device_kernels import kernels_of
from in_turns import turn
from library_programs import lowered
from ragged_gpu import distances, named
from tuning_gpu import raced

from ejkernel import library
from ejkernel.library import MoeCombineConfig, MoeConfig, MoeDispatchConfig, RaggedDotConfig
from ejkernel.library.gate import joined, pulled
from ejkernel.library.moe_combine import combined
from ejkernel.library.moe_experts import MoeExperts
from ejkernel.library.mosaic import gathered, outer_rolling, ragged_rolling
from ejkernel.library.mosaic.gated_back import TILE as BACK
from ejkernel.library.mosaic.gated_back import gated_back
from ejkernel.library.mosaic.tiles import Tile
from ejkernel.library.permutation import by_counting, inverse
from ejkernel.library.ragged_dot_ways import product
from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor

TOKENS, WIDTH, INNER, COUNT, K = 8192, 2048, 768, 32, 4
FLOPS, TRAFFIC = 790e12, 4.3e12
# Off by more than this share of the largest value is wrong: the router's gradient is a difference of products.
LIMIT = 5e-2
ROUNDS = 8
# Programs of a case that are compiled at once.
THREADS = 6
UNTUNED: Executor[Any, Any] = Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False)))
TILED = RaggedDotConfig("tiled", block_m=256)
TRITON = RaggedDotConfig("triton", 128, 128, 64, 4, 3)
ROW, PRODUCT = 2 * TOKENS * WIDTH / TRAFFIC, 2 * TOKENS * K * WIDTH * INNER / FLOPS
# Forward 1 and k rows in, k and 1 out; backward k and 1 and once more k in, 1 and k out.
FLOORS = {"rows": (ROW * (2 * K + 2), ROW * (5 * K + 4)), "layer": (3 * PRODUCT, 9 * PRODUCT)}
FLOORS |= {"experts": (3 * PRODUCT, 9 * PRODUCT), "down": (PRODUCT, 3 * PRODUCT), "back": (PRODUCT, PRODUCT)}
FLOORS |= {"gathered": (2 * PRODUCT, 2 * PRODUCT)}
X, LOGITS = ((TOKENS, WIDTH), "bfloat16", 1.0), ((TOKENS, COUNT), "float32", 1.0)
UPWARDS = ((COUNT, WIDTH, INNER), "bfloat16", WIDTH**-0.5)
DOWN = ((COUNT, INNER, WIDTH), "bfloat16", INNER**-0.5)
ROWS, BETWEEN, SIZES = (
    ((TOKENS * K, WIDTH), "bfloat16", 1.0),
    ((TOKENS * K, INNER), "bfloat16", 1.0),
    ((COUNT,), "int32", 0),
)
SHAPES: dict[str, list[Any]] = {
    "rows": [X, LOGITS, ROWS],
    "layer": [X, LOGITS, UPWARDS, UPWARDS, DOWN],
    "experts": [ROWS, UPWARDS, UPWARDS, DOWN, SIZES],
    "down": [BETWEEN, DOWN, SIZES],
    # The gradients of a gated pair's products, from those of the rows that come back.
    "back": [ROWS, DOWN, BETWEEN, BETWEEN, SIZES],
}
NAMES = [*SHAPES, *(f"{name}-gradient" for name in SHAPES if name != "back")]
# Rows to experts and the gated pair of products, by a pass over the rows or gathered by the product itself.
SHAPES["gathered"] = [X, LOGITS, UPWARDS, UPWARDS]


def block(way: str, columns: int = 256, stages: int = 4) -> RaggedDotConfig:
    """A cfg of a kernel for Hopper GPUs."""
    return RaggedDotConfig(way, 128, columns, 64, None, stages)


def rows_ways() -> dict[str, Callable[..., Any]]:
    """Rows there and back."""
    pairs = [(order, sums) for order in ("count", "mosaic") for sums in ("unrolled", "mosaic")]
    ours = functools.partial(cases.moe_dispatch.there_and_back, k=K, executor=UNTUNED)
    return {
        f"{order}, {sums}": functools.partial(ours, dispatch=MoeDispatchConfig(order), combine=MoeCombineConfig(sums))
        for order, sums in pairs
    }


def layer_ways(backward: bool) -> dict[str, Callable[..., Any]]:
    """Whole layers: as the library has it, by other kernels, and with some parts of the gradient as they were."""
    ours = functools.partial(library.moe, k=K, executor=UNTUNED)
    moved = {"dispatch": MoeDispatchConfig("mosaic"), "combine": MoeCombineConfig("mosaic")}
    ways = {"gated": functools.partial(ours, cfg=MoeConfig(experts=block("mosaic_gated"), **moved))}
    if backward:
        ways["gated, first products in two launches"] = functools.partial(parted_layer, joint=True)
        return ways | {"gated, each product and pass by itself": functools.partial(parted_layer, joint=False)}
    kept = {"dispatch": MoeDispatchConfig("count"), "combine": MoeCombineConfig("unrolled")}
    cfgs = {
        "two products and a pass": MoeConfig(experts=block("mosaic_rolling"), **moved),
        "old rows, triton": MoeConfig(experts=TRITON, **kept),
    }
    return ways | {name: functools.partial(ours, cfg=cfg) for name, cfg in cfgs.items()}


def parted_layer(x: Any, logits: Any, *matrices: Any, joint: bool) -> Any:
    """`moe` by Mosaic; in its gradient a launch for each of the first two products.

    `joint`: the rest of the gradient is as the library has it, with a pass in the product before it, and one launch for
    the gradients of all matrices.
    """
    sent = library.moe_dispatch(x, logits, k=K, cfg=MoeDispatchConfig("mosaic"), executor=UNTUNED)
    tile = Tile(128, 256, 64, 4)
    how: dict[str, Any] = {"tile": tile, "dtype": x.dtype, "interpret": False}

    @jax.custom_vjp
    def experts(rows: Any, gate: Any, up: Any, down: Any, sizes: Any) -> Any:
        inner = ragged_rolling.gated(rows, gate, up, sizes, tile=tile, interpret=False)
        return ragged_rolling.product([inner], [down], sizes, transposed=False, **how)

    def forward(rows: Any, gate: Any, up: Any, down: Any, sizes: Any) -> Any:
        pair = [ragged_rolling.product([rows], [one], sizes, transposed=False, **how) for one in (gate, up)]
        inner = joined(*(one.astype(jnp.float32) for one in pair)).astype(rows.dtype)
        out = ragged_rolling.product([inner], [down], sizes, transposed=False, **how)
        return out, (pair, inner, rows, gate, up, down, sizes)

    def backward(kept: Any, dy: Any) -> Any:
        pair, inner, rows, gate, up, down, sizes = kept
        if joint:
            towards = gated_back(dy, down, *pair, sizes, interpret=False)
        else:
            towards = apart(block("mosaic_rolling"), dy, down, *pair, sizes)
        factors = [(inner, dy), *((rows, one) for one in towards)]
        groups = [factors] if joint else [[one] for one in factors]
        d_down, d_gate, d_up = (x for some in groups for x in outer_rolling.outers(some, sizes, **how))
        d_rows = ragged_rolling.product(towards, [gate, up], sizes, transposed=True, **how)
        return d_rows, d_gate, d_up, d_down, None

    experts.defvjp(forward, backward)
    rows = experts(sent.rows, *matrices, sent.group_sizes)
    return combined(rows, sent.weights, sent.places, cfg=MoeCombineConfig("mosaic"), executor=UNTUNED)


def apart(cfg: RaggedDotConfig, dy: Any, down: Any, opened: Any, raised: Any, sizes: Any) -> Any:
    """The gradients of a gated pair's products by a product and a pass over its result."""
    towards = product(cfg, False)(dy, down, sizes, transposed=True, dtype=dy.dtype)
    made = pulled(*(x.astype(jnp.float32) for x in (opened, raised, towards)))
    return tuple(x.astype(dy.dtype) for x in made)


def back_ways() -> dict[str, Callable[..., Any]]:
    """The product and a pass over its result, and both in one kernel."""
    ways = {f"{named(cfg)}, and a pass": functools.partial(apart, cfg) for cfg in [block("mosaic_rolling")]}
    for tile in (BACK, Tile(128, 256, 64, 4)):
        name = f"product and pass in one {tile.m}x{tile.n}, {tile.stages}, lead {tile.lead}"
        ways[name] = lambda *arrays, tile=tile: tuple(gated_back(*arrays, tile=tile, interpret=False))
    return ways


def gathered_ways() -> dict[str, Callable[..., Any]]:
    """Rows sent before the products, which is how the library does it, and products that gather them."""

    def sent(x: Any, logits: Any, gate: Any, up: Any) -> Any:
        rows = library.moe_dispatch(x, logits, k=K, cfg=MoeDispatchConfig("mosaic"), executor=UNTUNED)
        how: dict[str, Any] = {"tile": Tile(128, 256, 64, 4), "interpret": False}
        return ragged_rolling.gated(rows.rows, gate, up, rows.group_sizes, **how)

    def by(tile: Tile, x: Any, logits: Any, gate: Any, up: Any) -> Any:
        source, sizes = tokens_of(logits)
        return gathered.gated(x, source, gate, up, sizes, tile=tile, interpret=False)

    ways: dict[str, Callable[..., Any]] = {"sent, gated": sent}
    for tile in (Tile(128, 256, 64, 4), Tile(128, 256, 64, 4, lead=1), Tile(128, 256, 64, 3)):
        ways[f"gathered {tile.m}x{tile.n}, {tile.stages}, lead {tile.lead}"] = functools.partial(by, tile)
    return ways


def tokens_of(logits: Any) -> tuple[Any, Any]:
    """The token of each row in order of experts, and how many rows each expert has."""
    experts = library.top_k(logits, K, executor=UNTUNED)[1]
    places, sizes = by_counting(experts.reshape(-1), COUNT)
    return inverse(places, places.shape[0]) // K, sizes


def pair_of_tokens(x: Any, logits: Any, gate: Any, up: Any) -> Any:
    """The joined products that `gathered_ways` compute, in plain JAX."""
    source, sizes = tokens_of(logits)
    rows = jnp.take(x, source, axis=0)
    return joined(*(library.ragged_dot(rows, one, sizes, cfg=TILED, executor=UNTUNED) for one in (gate, up)))


def product_ways(kernel: Any, cfgs: list[RaggedDotConfig]) -> dict[str, Callable[..., Any]]:
    """One kernel by several cfgs."""
    return {named(cfg): functools.partial(UNTUNED, kernel, cfg=cfg) for cfg in cfgs}


def of_case(name: str, backward: bool = False) -> tuple[dict[str, Callable[..., Any]], Callable[..., Any]]:
    """The ways of a case, and what is right."""
    ragged = functools.partial(library.ragged_dot, cfg=TILED, executor=UNTUNED)
    if name == "rows":
        return rows_ways(), functools.partial(cases.moe_dispatch.plain, k=K)
    if name == "layer":
        return layer_ways(backward), functools.partial(cases.moe.plain, k=K, product=ragged)
    cfgs = [block("mosaic"), block("mosaic_rolling"), block("mosaic_rolling", 256, 3), block("mosaic_rolling", 128, 5)]
    if name == "back":
        return back_ways(), functools.partial(apart, TILED)
    if name == "gathered":
        return gathered_ways(), pair_of_tokens
    if name == "down":
        return product_ways(library.RaggedDot(), [*cfgs, TRITON]), ragged
    cfgs += [block("mosaic_gated", *how) for how in ((256, 4), (256, 3), (128, 5))]
    return product_ways(MoeExperts(), cfgs), functools.partial(UNTUNED, MoeExperts(), cfg=TILED)


def with_gradient(fn: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Results and gradients of the floating-point arrays, of which there are so many; cotangents come last."""

    def run(*given: Any) -> Any:
        arrays, pulled = given[:count], given[count:]
        floats = [x for x in arrays if x.dtype != jnp.int32]
        out, pull = jax.vjp(lambda *a: fn(*a, *arrays[len(a) :]), *floats)
        leaves, form = jax.tree.flatten(out)
        towards = [dy.astype(x.dtype) for dy, x in zip(pulled, leaves, strict=True)]
        return out, pull(jax.tree.unflatten(form, towards))

    return run


def exact(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function in float32, with exact products."""

    def run(*given: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return fn(*(x if x.dtype == jnp.int32 else x.astype(jnp.float32) for x in given))

    return run


def made(shapes: list[Any]) -> tuple[Any, ...]:
    """Random arrays, and sizes as a router makes them."""
    found = []
    for at, (shape, dtype, scale) in enumerate(shapes):
        key = jax.random.key(at)
        if dtype == "int32":
            chosen = jax.lax.top_k(jax.random.normal(key, (TOKENS, COUNT)), K)[1]
            found.append(jnp.bincount(chosen.reshape(-1), length=COUNT).astype(jnp.int32))
        else:
            found.append((jax.random.normal(key, shape) * scale).astype(dtype))
    return tuple(jax.block_until_ready(found))


def study(name: str, lock: str, most: int) -> bool:
    """Prints the lines of a case; False where a way fails or is wrong."""
    kind, _, backward = name.partition("-")
    shapes, (ways, right) = list(SHAPES[kind]), of_case(kind, bool(backward))
    tag, count = f"moe_{name.replace('-', '_')}", len(shapes)
    if backward:
        results = jax.eval_shape(right, *(jax.ShapeDtypeStruct(s, d) for s, d, _ in shapes))
        shapes += [(x.shape, "bfloat16", 1.0) for x in jax.tree.leaves(results)]
        ways = {way: with_gradient(fn, count) for way, fn in ways.items()}
        right = with_gradient(right, count)
    abstract = tuple(jax.ShapeDtypeStruct(s, d) for s, d, _ in shapes)
    begun, good, said = time.perf_counter(), True, []
    built, names = {}, dict(enumerate(ways))

    def program(at: int) -> Any:
        return lowered(f"{tag}_{at}", ways[names[at]], abstract).compile()

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        waiting = {at: pool.submit(program, at) for at in names}
        # Nothing is timed for it by the compiler: other cases may be on the device.
        reference = jax.jit(exact(right)).lower(*abstract).compile({"xla_gpu_autotune_level": 0})
        for at, future in waiting.items():
            try:
                built[at] = future.result()
            # What one way says, the others do not hear.
            except Exception as error:
                good = False
                said.append(f"   FAILED {names[at]}: {type(error).__name__}: {str(error)[:300]}")
    compiled_s = time.perf_counter() - begun
    with turn(lock):
        arrays = made(shapes)
        wanted, off = reference(*arrays), {}
        first = built[0](*arrays) if kind == "gathered" and 0 in built else None
        for at in list(built):
            off[at] = max(float(x) for x in distances(built[at](*arrays), wanted))
            if not off[at] <= LIMIT:
                good = False
                said.append(f"   WRONG {names[at]}: off by {off[at]:.3g} of the largest value")
            if first is not None:
                count = int(jnp.sum(built[at](*arrays) != first))
                said.append(f"   {count} elements of {names[at]} are not those of {names[0]}")
        del wanted, first
        times = raced(built, arrays, tag, rounds=ROUNDS)
        parts = kernels_of(built, arrays, tag, most)
    floor = FLOORS[kind][bool(backward)]
    print(f"{name}: floor {floor * 1e6:.1f} us, compiled in {compiled_s:.0f} s")
    for at in sorted(times, key=times.__getitem__):
        print(f"   {times[at] * 1e6:9.1f} us  {times[at] / floor:.2f} of the floor  {names[at]}  off {off[at]:.1e}")
        print("".join(f"   {line}\n" for line in parts.get(at, [])), end="")
    print("\n".join(said), flush=True)
    return good


def main() -> int:
    """All cases at once; their lines as they end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=NAMES, choices=[*NAMES, "gathered"], help="cases")
    parser.add_argument("--kernels", type=int, default=0, help="so many kernels of each way, the largest")
    options = in_turns.asked_for(parser, seconds=70.0)
    words = ["--kernels", str(options.kernels)]
    return in_turns.run(options, options.only, lambda case, lock: study(case, lock, options.kernels), words)


if __name__ == "__main__":
    sys.exit(main())
