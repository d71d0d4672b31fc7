"""The cost of warm calls over a bare `jax.jit` call of the same computation, and of choosing in a trace.

Executor calls, bound functions, `tunable`, every function of the library and trees of 300 arrays; tiny arrays, so that
the computation costs next to nothing. Both sides are called in turns within each of many short rounds, and the median
of the rounds' ratios counts: a round that the machine interrupts is far from the median, and its neighbours are not. A
row over its limit is measured again before it counts. Exit code 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import inspect
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel.library as library
from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Kernel, tunable


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
    """An addition behind a `prepare` of its own."""

    op_id = "benchmark.prepared_add"

    def prepare(self, *arrays, **more):
        return tuple(a.astype(jnp.float32) for a in arrays), more


class ScaledAdd(Add):
    """An addition with a state of its own, built anew for each call."""

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


class FirstOfTree(Kernel[int, jax.Array]):
    """Adds the first array of a tree."""

    op_id = "benchmark.tree"

    def run(self, tree, x, *, cfg):
        return x + jax.tree_util.tree_leaves(tree)[0]

    def heuristic_cfg(self, inv):
        return 1


@jax.tree_util.register_pytree_node_class
class Module:
    """A model as frameworks have it: arrays, and a setting that is none."""

    def __init__(self, arrays, name):
        self.arrays = arrays
        self.name = name

    def tree_flatten(self):
        """The arrays, and the setting."""
        return self.arrays, self.name

    @classmethod
    def tree_unflatten(cls, name, arrays):
        """The model again."""
        return cls(arrays, name)


@dataclass(frozen=True)
class Case:
    """Two ways to compute one thing."""

    name: str
    ours: Callable[[], Any]
    bare: Callable[[], Any]
    limit: float
    aim: float
    # Of a round, beside the others: a call of hundreds of arrays is long enough by itself.
    share: float = 1.0


def executor_cases(executor: Executor) -> Iterator[Case]:
    """Calls of kernels through the executor."""
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

    yield Case("two arrays", lambda: executor(add, a, b), lambda: plain(a, b), 1.2, 1.1)
    yield Case("two arrays, own prepare", lambda: executor(prepared, a, b), lambda: plain(a, b), 1.2, 1.1)
    yield Case("own gradient", lambda: executor(product, a, b), lambda: times(a, b), 1.2, 1.1)
    yield Case("40 arrays", lambda: executor(add, *many), lambda: plain(*many), 1.2, 1.1, 0.25)
    yield Case("array by keyword", lambda: executor(add, a, y=b), lambda: keywords(a, y=b), 1.35, 1.2)
    yield Case("fresh kernel", lambda: executor(ScaledAdd(2), a, b), lambda: by_two(a, b), 1.35, 1.2)
    yield Case("static keyword", lambda: executor(add, a, b, scale=2), lambda: scaled(a, b, scale=2), 1.35, 1.2)
    yield Case("tunable function", lambda: declared(a, b), lambda: times(a, b), 1.35, 1.2)
    bound, bound_by_two = executor.bind(add), executor.bind(add, scale=2)
    yield Case("bound function", lambda: bound(a, b), lambda: plain(a, b), 1.2, 1.1)
    yield Case("bound, static keyword", lambda: bound_by_two(a, b), lambda: by_two(a, b), 1.2, 1.1)


def tree_cases(executor: Executor) -> Iterator[Case]:
    """Calls with hundreds of arrays in one argument."""
    x, first = jnp.arange(8.0), FirstOfTree()
    arrays = {f"layer{i}": jnp.full((8,), float(i)) for i in range(300)}
    nested = {f"layer{i}": {name: jnp.full((8,), 1.0) for name in ("weight", "bias")} for i in range(150)}
    module = Module(tuple(arrays.values()), "model")
    plain = jax.jit(lambda tree, x: first.run(tree, x, cfg=1))
    for name, tree in (("dict of 300 arrays", arrays), ("150 dicts of 2", nested), ("module of 300 arrays", module)):
        yield Case(name, *_both(lambda t: executor(first, t, x), lambda t: plain(t, x), tree), 1.3, 1.15, 0.05)


def _both(ours: Callable[[Any], Any], bare: Callable[[Any], Any], tree: Any) -> tuple[Any, Any]:
    return lambda: ours(tree), lambda: bare(tree)


def library_calls() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """A small call of each function of the library, by its name and what is special about the call."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, x, w = normal(1, 8, 2, 4), normal(8, 8), normal(8)
    labels, sizes, lengths = jnp.arange(8), jnp.array([3, 5]), jnp.array([5])
    stack, gates, key = normal(2, 8, 8), -jnp.abs(normal(1, 8, 2)), jax.random.key(0)
    pages, table, one = normal(4, 4, 2, 4), jnp.array([[2, 0]]), normal(1, 2, 4)
    few, scales = library.quantize(x, jnp.int8)
    narrow, factor = library.quantize(x, jnp.float8_e4m3fn)
    return {
        "append_to_pages": ((pages, pages, one, one, table, lengths), {}),
        "attention": ((q, q, q), {}),
        "attention, causal": ((q, q, q), {"causal": True}),
        "attention, a mask": ((q, q, q), {"mask": jnp.ones((1, 1, 8, 8), bool)}),
        "attention, lengths": ((q, q, q), {"key_value_lengths": lengths}),
        "decode_attention": ((one, pages, pages, table, lengths), {}),
        "decode_attention, no pages": ((q[:, :1], q, q, None, lengths), {"window": 4}),
        "dequantize": ((few, scales), {}),
        "float8_matmul": ((x, x), {}),
        "gated_delta_rule": ((q, q, q, gates, gates), {}),
        "gated_delta_rule, lengths": ((q, q, q, gates, gates), {"lengths": lengths, "scale": 0.5}),
        "gated_linear_attention": ((q, q, q, gates), {}),
        "layer_norm": ((x, w, w), {}),
        "linear_attention": ((q, q, q), {}),
        "linear_cross_entropy": ((x, x, labels), {}),
        "linear_cross_entropy, none": ((x, x, labels), {"reduction": "none"}),
        "matmul": ((x, x), {}),
        "matmul, bias, gelu": ((x, x, w), {"activation": "gelu"}),
        "moe": ((x, normal(8, 2), stack, stack, stack), {"k": 1}),
        "moe_combine": ((x, normal(4, 2), labels.reshape(4, 2)), {}),
        "moe_dispatch": ((x, normal(8, 4)), {"k": 2}),
        "quantize": ((x,), {}),
        "quantize, a dtype": ((x, jnp.float8_e4m3fn), {}),
        "quantized_matmul": ((x, few, scales), {}),
        "ragged_dot": ((x, stack, sizes), {}),
        "residual_norm": ((x, x, w), {}),
        "residual_norm, layer": ((x, x, w, w), {"kind": "layer"}),
        "rms_norm": ((x, w), {}),
        "sample": ((key, x), {}),
        "sample, top 5 at 0.7": ((key, x), {"temperature": 0.7, "top_k": 5}),
        "scaled_matmul": ((narrow, narrow, factor, factor), {}),
        "scaled_matmul, numbers": ((narrow, narrow, 0.5, 0.25), {"preferred_element_type": "float32"}),
        "softmax": ((x,), {}),
        "softmax, an axis": ((x,), {"axis": 0}),
        "top_k": ((x, 3), {}),
        "top_k, by name": ((x,), {"k": 3}),
    }


def library_cases() -> Iterator[Case]:
    """Every function of the library, against a jit of itself: the same program without the call around it."""
    untuned = Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(allow_autotune=False)))
    for name, (args, kwargs) in library_calls().items():
        function = getattr(library, name.partition(",")[0])
        # Some compute without a kernel.
        if "executor" in inspect.signature(function).parameters:
            kwargs = {**kwargs, "executor": untuned}
        yield Case(name, *_calls(function, args, kwargs), 1.5, 1.2)


def _calls(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    # Numbers that may be arrays are no constants of the bare program either: another one must not compile.
    arrays = {key: value for key, value in kwargs.items() if isinstance(value, jax.Array) or key == "temperature"}
    static = {key: value for key, value in kwargs.items() if key not in arrays}
    given = [arg for arg in args if isinstance(arg, (jax.Array, float))]

    def whole(*xs: Any, **more: Any) -> Any:
        left = iter(xs)
        whole = [next(left) if isinstance(arg, (jax.Array, float)) else arg for arg in args]
        return function(*whole, **more, **static)

    bare = jax.jit(whole)
    return lambda: function(*args, **arrays, **static), lambda: bare(*given, **arrays)


def functions_without_a_row() -> set[str]:
    """Functions of the library that no row calls."""
    # Those of providers compute nothing.
    public = {name for name in library.__all__ if name[0].islower() and "provider" not in name}
    return public - {name.partition(",")[0] for name in library_calls()}


def seconds(call: Callable[[], Any], count: int) -> float:
    """Seconds per call over so many calls in a row."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


@dataclass(frozen=True)
class Compared:
    """Medians over the rounds: of both sides, and of the ratios."""

    ours: float
    bare: float
    ratio: float


def compare(case: Case, rounds: int, count: int) -> Compared:
    """Calls both sides in turns."""
    shuffled = random.Random(0)
    each = max(2, round(count * case.share))
    ours, bare = [], []
    for _ in range(rounds):
        sides = [(ours, case.ours), (bare, case.bare)]
        shuffled.shuffle(sides)
        for samples, call in sides:
            samples.append(seconds(call, each))
    ratios = [mine / other for mine, other in zip(ours, bare, strict=True)]
    return Compared(median(ours), median(bare), median(ratios))


TRACE_LIMIT_US, TRACE_AIM_US = 100, 50


def trace_cost(executor: Executor, rounds: int) -> tuple[float, float]:
    """Seconds of tracing a call through the executor, and of `run` by hand: of each the lower quartile of the rounds.

    A trace is long enough to be interrupted more often than not on a busy machine, which is no cost of either side.
    """
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
    return quantiles(ours, n=4)[0], quantiles(bare, n=4)[0]


def is_broken(case: Case, rounds: int, count: int) -> bool:
    """Prints a row; measures up to three times where it is over its limit."""
    for _ in range(2):
        for ours, bare in zip(*map(jax.tree_util.tree_leaves, (case.ours(), case.bare())), strict=True):
            np.testing.assert_allclose(*(np.asarray(x).astype(np.float32) for x in (ours, bare)), rtol=1e-5, atol=1e-6)
    for _ in range(3):
        found = compare(case, rounds, count)
        if found.ratio <= case.limit:
            break
    mark = "over" if found.ratio > case.limit else "" if found.ratio > case.aim else "aim"
    times = f"{found.ours * 1e6:>8.2f}us{found.bare * 1e6:>8.2f}us"
    print(f"{case.name:<28}{times}{found.ratio:>8.2f}{case.limit:>8.2f}{case.aim:>7.2f} {mark}", flush=True)
    return found.ratio > case.limit


def main() -> int:
    """Prints the table; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--only", default="", help="rows with this in their name")
    options = parser.parse_args()
    executor = Executor(ConfigSelectorChain(ConfigCache()))
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {jax.devices()[0].platform}")
    print(f"{'call':<28}{'ours':>10}{'bare jit':>10}{'ratio':>8}{'limit':>8}{'aim':>7}")
    cases = [*executor_cases(executor), *tree_cases(executor), *library_cases()]
    cases = [case for case in cases if options.only in case.name]
    broken = [case.name for case in cases if is_broken(case, options.rounds, options.calls)]
    broken += [f"{name} (no row)" for name in sorted(functions_without_a_row())]
    for _ in range(3):
        ours, bare = (1e6 * cost for cost in trace_cost(executor, options.rounds))
        added = ours - bare
        if added <= TRACE_LIMIT_US:
            break
    if added > TRACE_LIMIT_US:
        broken.append("choosing while tracing")
    print(f"choosing while tracing adds {added:.0f} us ({ours:.0f} against {bare:.0f}), limit {TRACE_LIMIT_US}", end="")
    print(f", aim {TRACE_AIM_US}")
    print(f"limits broken: {', '.join(broken)}" if broken else "all within limits")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
