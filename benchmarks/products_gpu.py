"""On a GPU: what the compiler's own kernels for products cost to compile, and what they gain.

Each product is compiled as in users' programs, where XLA compiles dozens of forms of its own and times them beside
those of cuBLAS, and once more with cuBLAS alone: seconds, processor seconds, and device time in interleaved rounds.

    python benchmarks/products_gpu.py --seconds 60
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

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
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


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


def main() -> int:
    """Prints a line a product."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="no product is begun with after that")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    begun = time.perf_counter()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    print("rows x depth by columns: default compiled in (processors), cuBLAS alone; device us; cuBLAS over default")
    for at, (rows, depth, columns, backward) in enumerate(PRODUCTS):
        if time.perf_counter() - begun > options.seconds:
            print(f"not begun: {rows}x{depth} by {columns}")
            continue
        keys = jax.random.split(jax.random.key(at), 3)
        shapes = [(rows, depth), (depth, columns), (rows, columns)]
        arrays = [jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes, strict=True)]
        built, said = {}, []
        for form, how in enumerate(({}, CUBLAS)):
            fn = product(backward)
            fn.__name__ = fn.__qualname__ = f"product{at}_{form}"
            lowered = jax.jit(fn).lower(*arrays)
            start, before = time.perf_counter(), processors()
            built[form] = lowered.compile(compiler_options=dict(how))
            said.append(f"{time.perf_counter() - start:5.1f} s ({processors() - before:5.1f})")
        outs = [jax.tree.leaves(program(*arrays))[0].astype(jnp.float32) for program in built.values()]
        off = float(jnp.max(jnp.abs(outs[0] - outs[1])) / jnp.max(jnp.abs(outs[0])))
        times = raced(built, tuple(arrays), f"product{at}", rounds=options.rounds)
        name = f"{rows}x{depth} by {columns}{', with gradients' if backward else ''}"
        us = f"{times[0] * 1e6:.1f} {times[1] * 1e6:.1f}"
        print(f"{name}: {', '.join(said)}; {us}; {times[1] / times[0]:.3f}; differ by {off:.1e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
