"""What a warm call through the executor costs over a bare `jax.jit` call of the same computation.

Also what choosing from a warm memory cache adds to a trace. Tiny arrays, so that the computation itself costs next to
nothing. Both sides are called in turns within each round,
and the medians of the rounds are compared. Exit code 1 where a ratio is over its limit.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel, tunable


class Add(Kernel[int, jax.Array]):
    """Adds any number of arrays; the cfg does not matter."""

    op_id = "benchmark.add"

    def run(self, *arrays, cfg, scale=None, **more):
        total = sum((*arrays, *more.values()))
        return total if scale is None else total * scale

    def heuristic_cfg(self, inv):
        return 1

    def candidate_cfgs(self, inv):
        return [1, 2]


class PreparedAdd(Add):
    """The same behind a `prepare` of its own."""

    op_id = "benchmark.prepared_add"

    def prepare(self, *arrays, **more):
        return tuple(a.astype(jnp.float32) for a in arrays), more


class ScaledAdd(Add):
    """The same with a state of its own, built anew for each call."""

    op_id = "benchmark.scaled_add"

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def run(self, *arrays, cfg):
        return sum(arrays) * self.factor


class OwnGradient(Kernel[int, jax.Array]):
    """A product with a gradient of its own."""

    op_id = "benchmark.product"

    def run(self, a, b, *, cfg):
        return a * b

    def heuristic_cfg(self, inv):
        return 1

    def candidate_cfgs(self, inv):
        return [1, 2]

    def fwd_with_residuals(self, a, b, *, cfg):
        return a * b, ()

    def vjp(self, residuals, y, dy, a, b, *, cfg):
        return dy * b, dy * a


@dataclass(frozen=True)
class Case:
    """Two ways to compute one thing."""

    name: str
    ours: Callable[[], Any]
    bare: Callable[[], Any]
    limit: float
    aim: float


def cases(executor: Executor) -> list[Case]:
    """The calls that people make."""
    a, b = jnp.arange(8.0), jnp.ones(8)
    many = [jnp.full((8,), float(i)) for i in range(40)]
    add, prepared, product = Add(), PreparedAdd(), OwnGradient()
    plain = jax.jit(lambda *xs: sum(xs))
    keywords = jax.jit(lambda x, *, y: x + y)
    scaled = jax.jit(lambda x, y, scale: (x + y) * scale, static_argnames="scale")
    by_two = jax.jit(lambda x, y: (x + y) * 2)
    times = jax.jit(lambda x, y: x * y)

    @tunable(way=[1, 2], executor=executor, op_id="benchmark.tunable")
    def declared(x, y, *, way):
        return x * y

    return [
        Case("two arrays", lambda: executor(add, a, b), lambda: plain(a, b), 1.25, 1.10),
        Case("two arrays, own prepare", lambda: executor(prepared, a, b), lambda: plain(a, b), 1.25, 1.10),
        Case("own gradient", lambda: executor(product, a, b), lambda: times(a, b), 1.25, 1.10),
        Case("tunable function", lambda: declared(a, b), lambda: times(a, b), 1.35, 1.15),
        Case("40 arrays", lambda: executor(add, *many), lambda: plain(*many), 1.25, 1.10),
        Case("array by keyword", lambda: executor(add, a, y=b), lambda: keywords(a, y=b), 1.5, 1.25),
        Case("fresh kernel", lambda: executor(ScaledAdd(2), a, b), lambda: by_two(a, b), 1.5, 1.25),
        Case("static keyword", lambda: executor(add, a, b, scale=2), lambda: scaled(a, b, scale=2), 1.5, 1.25),
    ]


def seconds(call: Callable[[], Any], count: int) -> float:
    """Seconds per call over so many calls in a row."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def compare(case: Case, rounds: int, count: int) -> tuple[float, float]:
    """Medians of both sides, which took turns."""
    shuffled = random.Random(0)
    ours, bare = [], []
    for _ in range(rounds):
        sides = [(ours, case.ours), (bare, case.bare)]
        shuffled.shuffle(sides)
        for samples, call in sides:
            samples.append(seconds(call, count))
    return median(ours), median(bare)


TRACE_LIMIT_US = 200


def trace_cost(executor: Executor, rounds: int) -> tuple[float, float]:
    """Median seconds of tracing a call through the executor, and of tracing `run` called by hand."""
    kernel, a, b = Add(), jnp.arange(8.0), jnp.ones(8)
    cfg = executor.choose_config(kernel, a, b)

    def traced(function: Callable[..., Any]) -> float:
        # A function of its own each time, or JAX would answer from its cache.
        fresh = jax.jit(lambda *xs: function(*xs))
        start = time.perf_counter()
        fresh.trace(a, b)
        return time.perf_counter() - start

    ours, bare = [], []
    for _ in range(rounds):
        ours.append(traced(lambda *xs: executor(kernel, *xs)))
        bare.append(traced(lambda *xs: kernel.run(*xs, cfg=cfg)))
    return median(ours), median(bare)


def main() -> int:
    """Prints the table; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=500)
    options = parser.parse_args()
    selector = ConfigSelectorChain(ConfigCache())
    executor = Executor(selector)
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {jax.devices()[0].platform}")
    print(f"{'call':<26}{'executor':>10}{'bare jit':>10}{'ratio':>8}{'limit':>8}{'aim':>7}")
    broken = 0
    for case in cases(executor):
        np.testing.assert_allclose(case.ours(), case.bare())
        np.testing.assert_allclose(case.ours(), case.bare())
        ours, bare = compare(case, options.rounds, options.calls)
        ratio = ours / bare
        broken += ratio > case.limit
        mark = "over" if ratio > case.limit else ""
        times = f"{ours * 1e6:>8.2f}us{bare * 1e6:>8.2f}us"
        print(f"{case.name:<26}{times}{ratio:>8.2f}{case.limit:>8.2f}{case.aim:>7.2f} {mark}")
    ours, bare = trace_cost(executor, 10 * options.rounds)
    added = (ours - bare) * 1e6
    broken += added > TRACE_LIMIT_US
    times = f"{ours * 1e6:.0f} against {bare * 1e6:.0f}"
    print(f"choosing while tracing adds {added:.0f} us ({times}), limit {TRACE_LIMIT_US}")
    tuned = selector.cache.size()
    print(f"{tuned} tuned configs in the cache; {'limits broken: ' + str(broken) if broken else 'all within limits'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
