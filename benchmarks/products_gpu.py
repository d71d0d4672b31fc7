"""The compiler's own kernels for products on a GPU: the cost of compiling them, and the gain.

Each product is compiled as in users' programs, where XLA compiles dozens of forms of its own and times them beside
those of cuBLAS, and once more with cuBLAS alone: seconds, processor seconds, and device time in interleaved rounds.
A process each compiles one of these forms as its first product. It compiles the other one after that, in a time that
is not told, since it finds much that the first has made. Both run in both processes.

    python benchmarks/products_gpu.py --seconds 120
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from tuning_gpu import raced

# Rows, depth and columns; with gradients?
PRODUCTS = [
    (8192, 2048, 5632, True),
    (4096, 2048, 32000, True),
    (16384, 1024, 4096, True),
    (2048, 4096, 4096, False),
    (8192, 2048, 1024, True),
    (1024, 4096, 14336, False),
    (512, 4096, 14336, False),
    (1024, 1024, 5120, False),
    (64, 2048, 5632, False),
    (16, 4096, 14336, False),
]
# XLA's default, and cuBLAS alone.
FORMS = ({}, {"xla_gpu_enable_triton_gemm": False})


def processors() -> float:
    """Processor seconds of this process and of those that it has started."""
    used = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def product(backward: bool) -> Callable[..., Any]:
    """A linear layer with a silu, in front of which and behind which something can be fused."""

    def forward(x: Any, w: Any) -> Any:
        return jax.nn.silu((x * 2) @ w)

    def both(x: Any, w: Any, dy: Any) -> Any:
        out, back = jax.vjp(forward, x, w)
        return out, back(dy)

    return both if backward else lambda x, w, dy: forward(x, w) + dy


def compiled(number: int, form: int, backward: bool, arrays: list[Any]) -> tuple[Any, float, float]:
    """A product in one form, with the seconds and processor seconds that this took."""
    fn = product(backward)
    fn.__name__ = fn.__qualname__ = f"product{number}_{form}"
    lowered = jax.jit(fn).lower(*arrays)
    start, before = time.perf_counter(), processors()
    program = lowered.compile(compiler_options=dict(FORMS[form]))
    return program, time.perf_counter() - start, processors() - before


def apart(one: Any, other: Any) -> float:
    """The largest difference between two results, output and gradients alike, over the largest value of its array."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    # NumPy's largest is NaN where one is.
    return float(np.max([float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a))) for a, b in wide]))


def study(number: int, first: int, rounds: int, clock: Any = None) -> dict[str, Any]:
    """One product in both forms, of which the first is compiled in a process that has compiled no product yet."""
    # What was compiled in an earlier run takes no time.
    jax.config.update("jax_enable_compilation_cache", False)
    rows, depth, columns, backward = PRODUCTS[number]
    keys = jax.random.split(jax.random.key(number), 3)
    shapes = [(rows, depth), (depth, columns), (rows, columns)]
    arrays = [jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes, strict=True)]
    jax.block_until_ready(arrays)
    # It is ready, and waits for its turn.
    print(jax.devices()[0].device_kind, flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the process that gives the turns is gone")
    program, seconds, used = compiled(number, first, backward, arrays)
    built = {first: program, 1 - first: compiled(number, 1 - first, backward, arrays)[0]}
    off = apart(built[0](*arrays), built[1](*arrays))
    times = raced(built, tuple(arrays), f"product{number}", rounds=rounds, clock=clock)
    return {"seconds": seconds, "processors": used, "us": [times[form] * 1e6 for form in (0, 1)], "off": off}


def told(number: int, found: list[dict[str, Any]]) -> str:
    """A product's line, from the process that compiled the default form first and from the other one."""
    rows, depth, columns, backward = PRODUCTS[number]
    name = f"{rows}x{depth} by {columns}{', with gradients' if backward else ''}"
    compiling = ", ".join(f"{one['seconds']:5.1f} s ({one['processors']:5.1f})" for one in found)
    times = ", ".join("{:.1f} {:.1f} us {:.3f}".format(*one["us"], one["us"][1] / one["us"][0]) for one in found)
    return f"{name}: {compiling}; {times}; differ by {np.max([one['off'] for one in found]):.1e}"


def answer(child: subprocess.Popen[str], end: float) -> list[dict[str, Any]]:
    """The measurements of a process in its turn; empty where it fails, or the time is up."""
    try:
        said, _ = child.communicate("go\n", timeout=max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return []
    return [json.loads(said)] if child.returncode == 0 else []


def main() -> int:
    """Prints a line a product; the exit code is 1 where one is not measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="most that all may take")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--here", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("this benchmark needs a GPU; nothing was measured")
        return 0
    if options.here:
        print(json.dumps(study(*options.here, options.rounds)))
        return 0
    end, status = time.monotonic() + options.seconds, 0
    command = [sys.executable, __file__, "--rounds", str(options.rounds), "--here"]
    children = {
        case: subprocess.Popen([*command, *map(str, case)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for case in [(number, first) for number in range(len(PRODUCTS)) for first in (0, 1)]
    }
    # To start takes most of the time. All have done so before the first one compiles, and then one works at a time.
    devices = {child.stdout.readline().strip() for child in children.values()}
    print(f"jax {jax.__version__} on {', '.join(sorted(devices))}")
    print("rows x depth by columns: seconds to compile (processor seconds) by default, and with cuBLAS alone;")
    print(
        "device time of both and cuBLAS over default, in the process that compiled the default first and in the other"
    )
    try:
        for number in range(len(PRODUCTS)):
            found = [one for first in (0, 1) for one in answer(children[number, first], end)]
            status |= len(found) < 2
            print(told(number, found) if len(found) == 2 else f"not measured: {PRODUCTS[number]}", flush=True)
    finally:
        for child in children.values():
            child.kill()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
