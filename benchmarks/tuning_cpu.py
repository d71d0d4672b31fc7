"""The tuner's pick on a CPU against the best of all candidates, beside "one warm-up, mean of three".

Both rules pick several times in alternating order; then all candidates are timed over fresh interleaved rounds, and
each pick is told over the best one. Exit code 1 where a pick of the tuner is more than 10% off: timings of a shared
machine are noisy, so the limit is wide and the table is what counts.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops import Invocation, Kernel, Tuner

LIMIT = 0.10


@dataclass(frozen=True)
class NearestConfig:
    """The way in which the distances are computed, and the number of points at a time."""

    way: str
    rows: int


class Nearest(Kernel[NearestConfig, jax.Array]):
    """The squared distance from each point to the nearest of some others."""

    op_id = "nearest"
    version = "1"
    cfg_type = NearestConfig

    def run(self, points, others, *, cfg):
        """The distances, block by block."""
        by_products = cfg.way == "products"

        def block(some):
            if by_products:  # |a - b|^2 = |a|^2 - 2ab + |b|^2: a matrix product does most of it
                squares = jnp.sum(some * some, -1)[:, None] + jnp.sum(others * others, -1)
                return jnp.min(squares - 2 * some @ others.T, -1)
            return jnp.min(jnp.sum((some[:, None] - others) ** 2, -1), -1)

        blocks = points.reshape(-1, cfg.rows, points.shape[1])
        return jax.lax.map(block, blocks).reshape(-1)

    def heuristic_cfg(self, inv):
        """The obvious first version, in blocks that fit a cache."""
        return NearestConfig("differences", min(128, inv.args[0].shape[0]))

    def candidate_cfgs(self, inv):
        """Both ways, in blocks that divide the points."""
        sizes = [r for r in (8, 32, 128, 512) if inv.args[0].shape[0] % r == 0]
        return [NearestConfig(way, rows) for way in ("differences", "products") for rows in sizes]


class BlockedLogSumExp(Kernel[int, jax.Array]):
    """The logarithm of a sum of exponentials of each row, so many rows at a time."""

    op_id = "bench.logsumexp"

    def run(self, x, *, cfg):
        blocks = x.reshape(-1, cfg, x.shape[1])
        return jax.lax.map(lambda block: jax.nn.logsumexp(block, axis=-1), blocks).reshape(-1)

    def heuristic_cfg(self, inv):
        return 16

    def candidate_cfgs(self, inv):
        return [1, 4, 16, 64, 256, 1024]


class SplitMatmul(Kernel[int, jax.Array]):
    """A matrix product as a sum over parts of the inner dimension."""

    op_id = "bench.split_matmul"

    def run(self, a, b, *, cfg):
        parts = zip(jnp.split(a, cfg, axis=1), jnp.split(b, cfg, axis=0), strict=True)
        return sum(x @ y for x, y in parts)

    def heuristic_cfg(self, inv):
        return 8

    def candidate_cfgs(self, inv):
        return [1, 2, 4, 8, 16, 32]


class Windows(Kernel[str, jax.Array]):
    """Sums of neighbouring values, by three ways."""

    op_id = "bench.windows"

    def run(self, x, *, cfg):
        if cfg == "reduce":
            return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 32), (1, 1), "VALID")
        if cfg == "differences":
            total = jnp.pad(jnp.cumsum(x, axis=1), ((0, 0), (1, 0)))
            return total[:, 32:] - total[:, :-32]
        return sum(x[:, i : x.shape[1] - 31 + i] for i in range(32))

    def heuristic_cfg(self, inv):
        return "reduce"

    def candidate_cfgs(self, inv):
        return ["reduce", "differences", "shifts"]


def arrays(*shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Random arrays."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


SUBJECTS: dict[str, tuple[Kernel, tuple[jax.Array, ...]]] = {
    "nearest 1024x1024x32": (Nearest(), arrays((1024, 32), (1024, 32))),
    "logsumexp 1024x1024": (BlockedLogSumExp(), arrays((1024, 1024))),
    "split matmul 512^3": (SplitMatmul(), arrays((512, 512), (512, 512))),
    "windows 256x4096": (Windows(), arrays((256, 4096))),
}


def once(program: Callable[..., Any], args: Any) -> float:
    """Seconds of one run that is waited for."""
    start = time.perf_counter()
    jax.block_until_ready(program(*args))
    return time.perf_counter() - start


def mean_of_three(programs: dict[Any, Callable[..., Any]], args: Any) -> Any:
    """The other rule: candidate by candidate, one run to warm up, then three."""
    found = {}
    for cfg, program in programs.items():
        once(program, args)
        found[cfg] = mean(once(program, args) for _ in range(3))
    return min(found, key=found.__getitem__)


def study(kernel: Kernel, args: Any, repeats: int, rounds: int) -> dict[str, Any]:
    """Picks of both rules, told over the best of fresh rounds."""
    inv: Invocation = Invocation(kernel.op_id, args, {})
    cfgs = list(dict.fromkeys([kernel.heuristic_cfg(inv), *kernel.candidate_cfgs(inv)]))
    programs = {cfg: jax.jit(lambda *a, cfg=cfg: kernel.run(*a, cfg=cfg)).lower(*args).compile() for cfg in cfgs}
    picks: dict[str, list[Any]] = {"ours": [], "three": []}
    for repeat in range(repeats):
        sides = ["ours", "three"] if repeat % 2 == 0 else ["three", "ours"]
        for side in sides:
            if side == "ours":
                make = lambda cfg: lambda *a: kernel.run(*a, cfg=cfg)  # noqa: E731  (one use, next line)
                picks[side].append(Tuner(seed=repeat).autotune(make, args, {}, cfgs))
            else:
                picks[side].append(mean_of_three(programs, args))
    shuffled = random.Random(0)
    samples: dict[Any, list[float]] = {cfg: [] for cfg in cfgs}
    for _ in range(rounds):
        shuffled.shuffle(cfgs)
        for cfg in cfgs:
            samples[cfg].append(once(programs[cfg], args))
    times = {cfg: median(seconds) for cfg, seconds in samples.items()}
    best = min(times.values())
    off = {side: [times[pick] / best - 1 for pick in found] for side, found in picks.items()}
    return {"off": off, "best": best, "worst": max(times.values()), "candidates": len(cfgs)}


def main() -> int:
    """Prints the table; 1 where a pick of ours is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].platform}")
    print(f"{'kernel':<24}{'candidates':>11}{'best':>10}{'worst':>10}   off: ours / mean of three, %")
    broken = 0
    for name, (kernel, args) in SUBJECTS.items():
        row = study(kernel, args, options.repeats, options.rounds)
        shown = {side: " ".join(f"{100 * value:.1f}" for value in off) for side, off in row["off"].items()}
        broken += max(row["off"]["ours"]) > LIMIT
        times = f"{row['best'] * 1e3:>8.2f}ms{row['worst'] * 1e3:>8.2f}ms"
        print(f"{name:<24}{row['candidates']:>11}{times}   {shown['ours']} / {shown['three']}", flush=True)
    print(f"limits broken: {broken}" if broken else "all within limits")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
