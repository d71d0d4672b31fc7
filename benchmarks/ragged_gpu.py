"""Kernels of ragged_dot on a Hopper GPU beside torch's grouped_mm, even and skewed groups, with gradients.

A process a case: all compile at once, and take turns on the device. A line a way: device time over interleaved rounds,
its ratio to the floor and to torch's best, and how far it is off a float32 product. Exit code 1 where a way fails.

    python benchmarks/ragged_gpu.py --only 0 2

With `--tables`: products with tables of tiles by XLA and by one launch, and either's tables alone. Wall time is that of
many calls in a row, with what lies between launches. Exit code 1 where tables differ.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import in_turns
from in_turns import turn
from library_programs import lowered
from opponents.by_torch import ragged_dot as by_torch
from opponents.clock import Foreign, MixedClock
from opponents.opponent import Call
from tuning_gpu import raced

from ejkernel.library import RaggedDot, RaggedDotConfig
from ejkernel.library.ragged_dot_ways import mosaic_tile
from ejkernel.ops.timing.clock import WallClock

# Rows, depth, width, groups, how alike groups are (large: even), with gradients?
CASES = [
    (8192, 4096, 4096, 8, 1e6, False),
    (32768, 2048, 768, 128, 2.0, False),
    (8192, 4096, 4096, 8, 2.0, True),
    (32768, 2048, 768, 128, 1e6, False),
    (8192, 4096, 14336, 8, 2.0, False),
    (16384, 2048, 1408, 64, 2.0, True),
    # Shorter groups, between which guesses differ.
    (4096, 4096, 14336, 8, 2.0, False),
    (2048, 4096, 4096, 8, 2.0, False),
    (1024, 4096, 4096, 8, 2.0, False),
    (16384, 2048, 1024, 32, 2.0, False),
    (8192, 2048, 768, 64, 2.0, False),
    (4096, 2048, 768, 64, 2.0, False),
    (4096, 2048, 1408, 16, 2.0, True),
    (8192, 2048, 768, 64, 2.0, True),
    (512, 4096, 4096, 8, 2.0, False),
    (256, 4096, 14336, 8, 2.0, False),
    (2048, 2048, 768, 64, 2.0, False),
    (1024, 2048, 1408, 64, 2.0, False),
    (512, 2048, 1024, 8, 2.0, True),
]
FLOPS, TRAFFIC = 790e12, 4.3e12
# Off by more than this share of the largest value is wrong.
LIMIT = 2e-2
ROUNDS = 10
# Short calls, of which tables are the largest share.
SHORT = [7, 10, 8]
# Calls in a row of one wall time, and sizes for which tables are compared.
CALLS, DRAWN = 100, 50


def ways(backward: bool) -> dict[str, Callable[..., Any]]:
    """Functions of the arrays, by the names of their launches."""
    kernel = RaggedDot()

    def run(cfg: RaggedDotConfig, lhs: Any, rhs: Any, sizes: Any, *dy: Any) -> Any:
        out = kernel.run(lhs, rhs, sizes, cfg=cfg)
        return (out, *kernel.vjp((), out, *dy, lhs, rhs, sizes, cfg=cfg)[:2]) if backward else out

    cfgs = [RaggedDotConfig("mosaic_rolling", 128, 256, 64, None, stages) for stages in (4, 3)]
    cfgs += [RaggedDotConfig("mosaic", 128, n, 64, None, s) for n, s in ((256, 4), (256, 3), (128, 5))]
    cfgs += [RaggedDotConfig("triton", high, 128, 64, 4, 3) for high in (128, 64)]
    cfgs += [RaggedDotConfig("mosaic_jax", m, 128, 64, None, s) for m, s in ((128, 4), (64, 6)) if not backward]
    return {named(cfg): functools.partial(run, cfg) for cfg in cfgs}


def named(cfg: RaggedDotConfig) -> str:
    """A way in a few words: its tile and stages."""
    return f"{cfg.implementation} {cfg.block_m}x{cfg.block_n}, {cfg.num_stages}"


def study(number: int, lock: str) -> bool:
    """Prints the lines of a case; False where a way fails or is wrong."""
    rows, depth, width, groups, alike, backward = CASES[number]
    shapes = [((rows, depth), "bfloat16"), ((groups, depth, width), "bfloat16"), ((groups,), "int32")]
    shapes += [((rows, width), "bfloat16")] * backward
    abstract = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    begun, good, said = time.perf_counter(), True, []
    built: dict[int, Any] = {}
    names: dict[int, str] = {}
    for at, (name, fn) in enumerate(ways(backward).items()):
        start = time.perf_counter()
        try:
            built[at] = lowered(f"case{number}_{at}", fn, abstract).compile()
            names[at] = f"{name} [{time.perf_counter() - start:.1f} s]"
        # What one way says, the others do not hear.
        except Exception as error:
            good = False
            said.append(f"   FAILED {name}: {type(error).__name__}: {str(error)[:300]}")
    # Nothing is timed for it by the compiler: other cases may be on the device.
    exact = RaggedDot().reference
    plain = functools.partial(both, exact) if backward else exact
    wide = [jax.ShapeDtypeStruct(s, "float32" if d == "bfloat16" else d) for s, d in shapes]
    reference = jax.jit(plain).lower(*wide).compile({"xla_gpu_autotune_level": 0})
    compiled_s = time.perf_counter() - begun
    with turn(lock):
        arrays = made(shapes, alike)
        wanted = reference(*(a.astype("float32") if a.dtype == jnp.bfloat16 else a for a in arrays))
        off = {}
        for at in list(built):
            off[at] = max(float(x) for x in distances(built[at](*arrays), wanted))
            if not off[at] <= LIMIT:
                good = False
                said.append(f"   WRONG {names[at]}: off by {off[at]:.3g} of the largest value")
                del built[at]
        for name, foreign in torch_ways(arrays, backward):
            at = len(names) + len(said)
            given = [jnp.from_dlpack(x.contiguous()) for x in jax.tree.leaves(foreign().block_until_ready().out)]
            built[at], names[at], off[at] = foreign, name, max(float(x) for x in distances(given, wanted))
        del wanted
        times = raced(built, arrays, f"case{number}", rounds=ROUNDS, clock=MixedClock())
    work = 2.0 * rows * depth * width * (3 if backward else 1)
    moved = 2.0 * (rows * depth + groups * depth * width + rows * width) * (3 if backward else 1)
    floor = max(work / FLOPS, moved / TRAFFIC)
    torchs = min((times[at] for at in times if names[at].startswith("torch")), default=float("nan"))
    kind = ("even" if alike > 100 else "skewed") + (", with gradients" if backward else "")
    print(f"{rows}x{depth} by {groups} of {width}, {kind}: floor {floor * 1e6:.1f} us, compiled in {compiled_s:.0f} s")
    for at in sorted(times, key=times.__getitem__):
        ratio = f"{times[at] / floor:.2f} of the floor, {times[at] / torchs:.2f} of torch's"
        print(f"   {times[at] * 1e6:9.1f} us  {ratio}  {names[at]}  off {off[at]:.1e}")
    print("\n".join(said), flush=True)
    return good


def study_tables(number: int, lock: str) -> bool:
    """Prints times of a case with tables by XLA and by one launch; False where the tables differ."""
    from ejkernel.library.mosaic import ragged_rolling
    from ejkernel.library.mosaic.ragged_tables import visits_at_once, visits_of

    rows, depth, width, groups, alike, _ = CASES[number]
    shapes = [((rows, depth), "bfloat16"), ((groups, depth, width), "bfloat16"), ((groups,), "int32")]
    abstract = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    tile = mosaic_tile(RaggedDotConfig("mosaic_rolling", 128, 256, 64, None, 4))
    how = {"tile": tile, "transposed": False, "dtype": jnp.dtype("bfloat16"), "interpret": False}

    def product(tables: Any, lhs: Any, rhs: Any, sizes: Any) -> Any:
        return ragged_rolling.product([lhs], [rhs], sizes, tables=tables, **how)

    def alone(tables: Any, lhs: Any, rhs: Any, sizes: Any) -> Any:
        return tables(sizes, rows, tile.m)

    ways = {"XLA": visits_of, "one launch": functools.partial(visits_at_once, interpret=False)}
    names = [f"{what}, by {way}" for what in ("product", "tables alone") for way in ways]
    fns = [functools.partial(fn, way) for fn in (product, alone) for way in ways.values()]
    built = {at: lowered(f"case{number}_{at}", fn, abstract).compile() for at, fn in enumerate(fns)}
    with turn(lock):
        arrays, rng = made(shapes, alike), np.random.default_rng(number)
        drawn = rng.integers(-9, 2 * rows // groups, (DRAWN, groups)).astype("int32")
        several = [arrays[2], *map(jnp.asarray, drawn)]
        for sizes in several:
            one, other = (built[at](*arrays[:2], sizes) for at in (2, 3))
            if not all(np.array_equal(a, b[: a.size]) for a, b in zip(one, other, strict=True)):
                print(f"case {number}: tables DIFFER for {sizes}", flush=True)
                return False
        one, other = (built[at](*arrays) for at in (0, 1))
        if not np.array_equal(one, other):
            print(f"case {number}: products DIFFER", flush=True)
            return False
        times = raced(built, arrays, f"case{number}", rounds=ROUNDS)
        clock = WallClock()
        walls = [[clock.time(built[at], arrays, CALLS) for at in built] for _ in range(ROUNDS)]
    print(f"{rows}x{depth} by {groups} of {width}, skewed: tables are equal for {len(several)} sizes")
    for at, name in enumerate(names):
        wall, timed = np.median([found[at] for found in walls]) * 1e6, times.get(at, np.nan) * 1e6
        print(f"   {timed:9.1f} us on the device, {wall:9.1f} us of wall time  {name}", flush=True)
    return True


def both(exact: Callable[..., Any], lhs: Any, rhs: Any, sizes: Any, dy: Any) -> Any:
    """The product and its gradients."""
    out, back = jax.vjp(lambda one, other: exact(one, other, sizes), lhs, rhs)
    return out, *back(dy)


def made(shapes: list[Any], alike: float) -> tuple[Any, ...]:
    """Random arrays, and sizes that add up to all rows."""
    rng, rows, groups = np.random.default_rng(0), shapes[0][0][0], shapes[1][0][0]
    share = np.full(groups, 1 / groups) if alike > 100 else rng.dirichlet([alike] * groups)
    sizes = np.floor(share * rows).astype("int32")
    sizes[0] += rows - sizes.sum()
    keys = jax.random.split(jax.random.key(0), len(shapes))
    floats = [None if d == "int32" else jax.random.normal(k, s, d) for k, (s, d) in zip(keys, shapes, strict=True)]
    return tuple(jnp.asarray(sizes) if a is None else jax.block_until_ready(a) for a in floats)


@jax.jit
def distances(found: Any, wanted: Any) -> list[Any]:
    """The largest error of each array over its largest value."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return [jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b)) for a, b in pairs]


def torch_ways(arrays: tuple[Any, ...], backward: bool) -> Iterator[tuple[str, Foreign]]:
    """The ways of torch, where it is installed."""
    try:
        import torch
    except ImportError:
        return
    tensors = tuple(torch.from_dlpack(a) for a in arrays)
    for opponent in by_torch(torch, Call("ragged_dot", arrays[:3], {}, backward)):
        given = opponent.prepare(*tensors) if opponent.prepare else tensors
        foreign = Foreign(torch, opponent.fn, given)
        try:
            foreign().block_until_ready()
        # It may not serve the layout.
        except Exception as error:
            print(f"   {opponent.name}: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        yield opponent.name, foreign


def main() -> int:
    """All cases at once; their lines as they end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", type=int, help="numbers of cases")
    parser.add_argument("--tables", action="store_true", help="of short calls, tables by XLA and by one launch")
    options = in_turns.asked_for(parser, seconds=150.0)
    way, every = (study_tables, SHORT) if options.tables else (study, range(len(CASES)))
    cases, words = every if options.only is None else options.only, ["--tables"] * options.tables
    return in_turns.run(options, cases, lambda case, lock: way(int(case), lock), words)


if __name__ == "__main__":
    sys.exit(main())
