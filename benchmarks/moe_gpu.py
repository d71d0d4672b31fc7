"""On a Hopper GPU: rows to experts and back, the whole layer and its products by each way, forward and with gradients.

A process a case: all compile at once, and take turns on the device. A line a way: device time over interleaved rounds,
its ratio to the floor, how far it is off float32, and with `--kernels` where its time goes. Exit code 1 where a way
fails or is wrong.

    python benchmarks/moe_gpu.py --only rows layer --kernels 8
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
from ejkernel.library.gate import pulled
from ejkernel.library.moe_combine import combined
from ejkernel.library.mosaic.ragged_joined import gated_back
from ejkernel.library.mosaic.tiles import Tile
from ejkernel.library.ragged_dot_ways import outer, product
from ejkernel.library.ragged_gated import RaggedGated, from_products
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
ROW, PRODUCT = 2 * TOKENS * WIDTH / TRAFFIC, 2 * TOKENS * K * WIDTH * INNER / FLOPS
# Forward 1 and k rows in, k and 1 out; backward k and 1 and once more k in, 1 and k out.
FLOORS = {"rows": (ROW * (2 * K + 2), ROW * (5 * K + 4)), "layer": (3 * PRODUCT, 9 * PRODUCT)}
FLOORS |= {"gated": (2 * PRODUCT, 6 * PRODUCT), "down": (PRODUCT, 3 * PRODUCT), "back": (PRODUCT, PRODUCT)}
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
    "gated": [ROWS, UPWARDS, UPWARDS, SIZES],
    "down": [BETWEEN, DOWN, SIZES],
    # The gradients of a gated pair's products, from those of the rows that come back.
    "back": [ROWS, DOWN, BETWEEN, BETWEEN, SIZES],
}
NAMES = [*SHAPES, *(f"{name}-gradient" for name in SHAPES if name != "back")]


def block(way: str, columns: int = 256, stages: int = 4, lead: int | None = None) -> RaggedDotConfig:
    """A cfg of a kernel for Hopper GPUs."""
    return RaggedDotConfig(way, 128, columns, 64, None, stages, lead)


def rows_ways() -> dict[str, Callable[..., Any]]:
    """Rows there and back."""
    pairs = [(order, sums) for order in ("count", "mosaic") for sums in ("unrolled", "mosaic")]
    ours = functools.partial(cases.moe_dispatch.there_and_back, k=K, executor=UNTUNED)
    return {
        f"{order}, {sums}": functools.partial(ours, dispatch=MoeDispatchConfig(order), combine=MoeCombineConfig(sums))
        for order, sums in pairs
    }


def layer_ways(backward: bool) -> dict[str, Callable[..., Any]]:
    """Whole layers: one part after the other by the newer ways."""
    moved = {"dispatch": MoeDispatchConfig("mosaic"), "combine": MoeCombineConfig("mosaic")}
    kept = {"dispatch": MoeDispatchConfig("count"), "combine": MoeCombineConfig("unrolled")}
    old, (rolling, gated) = block("mosaic"), (block(way, 256, 3) for way in ("mosaic_rolling", "mosaic_gated"))
    cfgs = {
        "old rows, mosaic": MoeConfig(up=old, down=old, **kept),
        "rows, mosaic": MoeConfig(up=old, down=old, **moved),
        "rows, rolling": MoeConfig(up=rolling, down=rolling, **moved),
        "rows, gated, rolling": MoeConfig(up=gated, down=rolling, **moved),
        "rows, gated 4, rolling 4": MoeConfig(up=block("mosaic_gated"), down=block("mosaic_rolling"), **moved),
    }
    # Forward, products that are joined are those that are gated.
    more = [("gated", 4, 2), ("gated", 3, 1), *([("joined", 4, None), ("joined", 4, 2)] if backward else [])]
    whole = {}
    for way, stages, lead in more:
        up, down = (block(f"mosaic_{one}", 256, stages, lead) for one in (way, "rolling"))
        name = f"rows, {way} {stages}, rolling {stages}, lead {lead}"
        cfgs[name] = MoeConfig(up=up, down=down, **moved)
        if backward and stages == 4:
            how = {"up_cfg": up, "down_cfg": down, "back": Tile(128, 256, 64, 4, lead or 0), **moved}
            whole[f"{name}, product and pass back in one"] = functools.partial(joined_layer, **how)
    ours = functools.partial(library.moe, k=K, executor=UNTUNED)
    return {name: functools.partial(ours, cfg=cfg) for name, cfg in cfgs.items()} | whole


def joined_layer(
    x: Any, logits: Any, *matrices: Any, up_cfg: Any, down_cfg: Any, back: Tile, dispatch: Any, combine: Any
) -> Any:
    """`moe` with one kernel for the product with the last matrices and the pass over its result, in its gradient."""
    sent = library.moe_dispatch(x, logits, k=K, cfg=dispatch, executor=UNTUNED)

    @jax.custom_vjp
    def experts(rows: Any, gate: Any, up: Any, down: Any, sizes: Any) -> Any:
        inner = RaggedGated().run(rows, gate, up, sizes, cfg=up_cfg)
        return library.RaggedDot().run(inner, down, sizes, cfg=down_cfg)

    def forward(rows: Any, gate: Any, up: Any, down: Any, sizes: Any) -> Any:
        inner, products = RaggedGated().fwd_with_residuals(rows, gate, up, sizes, cfg=up_cfg)
        out = library.RaggedDot().run(inner, down, sizes, cfg=down_cfg)
        return out, (products, inner, rows, gate, up, down, sizes)

    def backward(kept: Any, dy: Any) -> Any:
        products, inner, rows, gate, up, down, sizes = kept
        towards = gated_back(dy, down, *products, sizes, tile=back, interpret=False)
        d_down = outer(down_cfg, False)(inner, dy, sizes, dtype=down.dtype)
        return *from_products(towards, rows, gate, up, sizes, cfg=up_cfg, interpret=False), d_down, None

    experts.defvjp(forward, backward)
    rows = experts(sent.rows, *matrices, sent.group_sizes)
    return combined(rows, sent.weights, sent.places, cfg=combine, executor=UNTUNED)


def apart(cfg: RaggedDotConfig, dy: Any, down: Any, opened: Any, raised: Any, sizes: Any) -> Any:
    """The gradients of a gated pair's products by a product and a pass over its result."""
    towards = product(cfg, False)(dy, down, sizes, transposed=True, dtype=dy.dtype)
    made = pulled(*(x.astype(jnp.float32) for x in (opened, raised, towards)))
    return tuple(x.astype(dy.dtype) for x in made)


def back_ways() -> dict[str, Callable[..., Any]]:
    """The product and a pass over its result, and both in one kernel."""
    cfgs = [block("mosaic_rolling", 256, *how) for how in ((4,), (3,), (4, 2))]
    ways = {f"{named(cfg)}, and a pass": functools.partial(apart, cfg) for cfg in cfgs}
    for tile in (Tile(128, 256, 64, 4), Tile(128, 256, 64, 4, 2), Tile(128, 256, 64, 4, 1), Tile(128, 128, 64, 6, 2)):
        name = f"product and pass in one {tile.m}x{tile.n}, {tile.stages}, lead {tile.lead}"
        ways[name] = lambda *arrays, tile=tile: tuple(gated_back(*arrays, tile=tile, interpret=False))
    return ways


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
    leads = [(256, 4, 2), (256, 4, 1), (256, 3, 1)]
    if name == "down":
        cfgs += [*(block("mosaic_rolling", *how) for how in leads), RaggedDotConfig("triton", 128, 128, 64, 4, 3)]
        return product_ways(library.RaggedDot(), cfgs), ragged
    cfgs += [block("mosaic_joined", 256, 4, lead) for lead in (None, 2)]
    cfgs += [block("mosaic_gated", *how) for how in ((256, 4), (256, 3), (128, 5), *leads)]
    return product_ways(RaggedGated(), cfgs), functools.partial(UNTUNED, RaggedGated(), cfg=TILED)


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
        for at in list(built):
            off[at] = max(float(x) for x in distances(built[at](*arrays), wanted))
            if not off[at] <= LIMIT:
                good = False
                said.append(f"   WRONG {names[at]}: off by {off[at]:.3g} of the largest value")
        del wanted
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
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES, help="cases")
    parser.add_argument("--kernels", type=int, default=0, help="so many kernels of each way, the largest")
    options = in_turns.asked_for(parser, seconds=70.0)
    words = ["--kernels", str(options.kernels)]
    return in_turns.run(options, options.only, lambda case, lock: study(case, lock, options.kernels), words)


if __name__ == "__main__":
    sys.exit(main())
