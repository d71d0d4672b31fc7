"""The cost of checking candidates on this device: alone, against a copy of the same bytes, and in a tuning.

Alone: one answer (a forward pass, and one with its gradients) is compared with what is right again and again. Printed
are the seconds to compile, the milliseconds to make ready what is right (once for each set of inputs), those of one
comparison as a tuning sees it and as the device does (many in a row, one wait), and how often a copy would have moved
the same bytes in that time. In a tuning: one product, forward and backward, all its candidates, once more with the
comparison compiled. Exit code 1 where the check takes more than a tenth of a tuning. Sizes are small on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.library import matmul
from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Tuner
from ejkernel.ops.timing import check
from ejkernel.ops.tuning import check as tuning_check

LARGE = {
    "output 8192x5632": [(8192, 5632)],
    "with gradients": [(8192, 5632), (8192, 2048), (2048, 5632)],
    "attention and gradients": [(4, 2048, 16, 128)] * 4,
    "one vector of 33 million": [(1 << 25,)],
    "rows of 1000": [(16384, 1000)],
}
SMALL = {"output 512x352": [(512, 352)], "with gradients": [(512, 352), (512, 128), (128, 352)], "vector": [(1 << 18,)]}


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """The median of single runs, each waited for."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def in_a_row(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of one of many runs that are waited for together."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(repeats)])
    return (time.perf_counter() - start) / repeats


def answer(shapes: list[tuple[int, ...]], dtype: Any, noise: float) -> list[Any]:
    """Arrays of these shapes, the same but for rounding wherever they are made."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    made = [jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True)]
    return [(x * (1 + noise * jax.random.normal(jax.random.key(1), x.shape))).astype(dtype) for x in made]


def alone(shapes: list[tuple[int, ...]], dtype: Any, repeats: int) -> dict[str, float]:
    """One answer against what is right."""
    want, got = answer(shapes, dtype, 0.0), answer(shapes, dtype, 2.0**-10)
    device = next(iter(want[0].devices()))
    taken = []
    for build in check.builders((want,), device, inputs=[dtype], plain=True):
        start = time.perf_counter()
        build()
        taken.append(time.perf_counter() - start)
    made = [check.Standard([want], plain=[got], inputs=[dtype]) for _ in range(3)]
    ready = seconds(lambda: check.Standard([want], plain=[got], inputs=[dtype]) and None, 3)
    standard = made[0]
    found = standard.compare([got])
    if found.reason:
        raise SystemExit(f"the benchmark's own answer is wrong: {found.reason}")
    one = seconds(lambda: standard.compare([got]) and None, repeats)
    row = in_a_row(lambda: standard.begin([got]), repeats)
    copy = in_a_row(lambda: _copied(want), repeats)
    return {
        # They are compiled side by side.
        "compile_s": max(taken, default=0.0),
        "ready_ms": ready * 1e3,
        "one_ms": one * 1e3,
        "device_ms": row * 1e3,
        "copy_ms": copy * 1e3,
        "over_copy": row / copy,
        "mbytes": sum(x.nbytes for x in want) / 1e6,
    }


@jax.jit
def _copied(arrays: list[Any]) -> list[Any]:
    """Reads and writes as many bytes as a comparison reads at least: the answer, and what is right."""
    return [-x for x in arrays]


class Stopwatch:
    """Adds up the seconds inside some functions, of the outermost one where they call each other."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._inside = 0

    @contextlib.contextmanager
    def watching(self, *places: tuple[Any, str]) -> Iterator[None]:
        """Replaces the functions while it lasts."""
        kept = [(owner, name, getattr(owner, name)) for owner, name in places]
        for owner, name, function in kept:
            setattr(owner, name, self._watched(f"{getattr(owner, '__name__', owner)}.{name}", function))
        try:
            yield
        finally:
            for owner, name, function in kept:
                setattr(owner, name, function)

    def _watched(self, label: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self._inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._inside -= 1
                if not self._inside:
                    self.taken[label] = self.taken.get(label, 0.0) + time.perf_counter() - start
                    self.calls[label] = self.calls.get(label, 0) + 1

        return run


def tuned(sizes: tuple[int, int, int]) -> dict[str, Any]:
    """One tuning of a product, forward and backward, and the seconds of its check."""
    rows, inner, columns = sizes
    a, b = (jnp.zeros(shape, jnp.bfloat16) for shape in ((rows, inner), (inner, columns)))
    policy = AutotunePolicy(validate_backward=True)
    selector = ConfigSelectorChain(ConfigCache(), policy, tuner=Tuner(isolate=False))
    watch = Stopwatch()
    places = [
        *((check.Standard, name) for name in ("__init__", "begin", "end")),
        (tuning_check, "_poison"),
    ]
    start = time.perf_counter()
    with watch.watching(*places):
        matmul(a, b, executor=Executor(selector))
    total = time.perf_counter() - start
    taken = sum(watch.taken.values())
    return {
        "seconds": total,
        "check_seconds": taken,
        "share": taken / total,
        "parts": {name: round(s, 4) for name, s in watch.taken.items()},
        "calls": watch.calls,
    }


def main() -> None:
    """Prints a table, and the same as JSON where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--no-tuning", action="store_true")
    given = parser.parse_args()
    on_cpu = jax.devices()[0].platform == "cpu"
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {given.dtype}")
    found: dict[str, Any] = {}
    columns = (
        ("MB", 9),
        ("compile s", 11),
        ("ready ms", 10),
        ("one ms", 9),
        ("device ms", 11),
        ("copy ms", 9),
        ("ratio", 7),
    )
    print(f"{'answer':26}" + "".join(f"{name:>{width}}" for name, width in columns))
    for name, shapes in (SMALL if on_cpu else LARGE).items():
        row = found[name] = alone(shapes, jnp.dtype(given.dtype), given.repeats)
        print(
            f"{name:26}{row['mbytes']:9.1f}{row['compile_s']:11.2f}{row['ready_ms']:10.2f}{row['one_ms']:9.3f}"
            f"{row['device_ms']:11.3f}{row['copy_ms']:9.3f}{row['over_copy']:7.1f}"
        )
    share = 0.0
    if not given.no_tuning:
        sizes = (256, 128, 192) if on_cpu else (8192, 2048, 5632)
        for turn in ("first tuning", "comparison compiled"):
            one = found[turn] = tuned(sizes)
            share = one["share"]
            print(f"{turn}: {one['seconds']:.2f} s, of it the check {one['check_seconds']:.2f} s ({share:.1%})")
            print(f"  {one['parts']} {one['calls']}")
            jax.clear_caches()
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    sys.exit(int(share > 0.1))


if __name__ == "__main__":
    main()
